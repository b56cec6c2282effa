"""The first failure of a host is reported at once, and so is one that is later found to be earlier."""

from __future__ import annotations

from rallypoint.agent.failures.analysis import FirstFailure, LocalFailures
from rallypoint.agent.failures.failure import WorkerFailure


def failure(rank: int, at: float) -> WorkerFailure:
    """A failure of one of this host's workers."""
    return WorkerFailure(rank, rank, "trainer", "host", 100 + rank, 1, 1.8e9 + at, "it broke", at=at)


class Reported:
    """The failures that are reported."""

    def __init__(self) -> None:
        self.first: list[int] = []
        self.earlier: list[int] = []
        self.failures = LocalFailures(
            lambda event: (self.first if isinstance(event, FirstFailure) else self.earlier).append(
                event.failure.rank
            )
        )

    def end(self, rank: int, at: float) -> None:
        """Report the end of a worker."""
        self.failures.note(failure(rank, at))
        self.failures.report_first()


def test_the_first_failure_is_reported_once() -> None:
    """Later failures are its consequence."""
    told = Reported()
    told.failures.report_first()
    for rank, at in ((2, 5.0), (0, 5.1), (1, 6.0)):
        told.end(rank, at)
    assert (told.first, told.earlier) == ([2], [])
    assert [each.rank for each in told.failures.in_order] == [2, 0, 1]


def test_a_worker_that_raised_earlier_is_the_first_at_once() -> None:
    """It is reported although it has not ended."""
    told = Reported()
    told.failures.note(failure(0, 5.05))
    told.failures.report_first([failure(3, 5.0), failure(2, 5.06)])
    assert (told.first, told.earlier) == ([3], [])
    told.end(3, 5.0)  # now it has ended
    told.failures.report_first([failure(2, 5.06)], stopping=True)
    assert (told.first, told.earlier) == ([3], [])
    assert [each.rank for each in told.failures.in_order] == [3, 0, 2]


def test_an_earlier_failure_is_reported_when_it_is_found() -> None:
    """Each earlier one is reported; a later one is not."""
    told = Reported()
    told.end(0, 5.05)
    told.end(1, 5.02)
    told.end(2, 5.03)
    told.failures.report_first([failure(3, 5.0)], stopping=True)
    assert (told.first, told.earlier) == ([0], [1, 3])


def test_a_failure_found_during_a_stop_is_no_reason_to_stop() -> None:
    """It is reported as an earlier failure."""
    told = Reported()
    told.failures.report_first([failure(3, 5.0)], stopping=True)
    assert (told.first, told.earlier) == ([], [3])
