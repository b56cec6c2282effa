"""The exit code of a submitted job is that of the event that ended its run."""

from __future__ import annotations

import pytest

from rallypoint.submission.session import exit_code_of


@pytest.mark.parametrize(
    ("codes", "succeeded", "told"),
    [
        ([0, 0], None, 0),
        ([0, 1], None, 1),
        ([1, 1, 93], None, 93),
        ([1, 3], None, 1),
        ([3, 143], None, 3),
        ([2, 2], None, 2),
        ([143, 143], None, 143),
        # Some hosts left, or were lost, while the others succeeded.
        ([0, 143], None, 0),
        ([0, 3, None], None, 0),
        ([0, None], None, 0),
        # The outcome from the rendezvous service has priority.
        ([1, 0], True, 0),
        ([None, None], True, 0),
        ([0, 143], False, 143),
        ([0, None], False, 1),
        ([None], None, 1),
        # The run had succeeded before this job was started.
        ([4, 4], True, 4),
        ([4, 0], True, 0),
    ],
)
def test_the_run_outcome_comes_first(codes: list[int | None], succeeded: bool | None, told: int) -> None:
    """The outcome of the run comes before the exit codes of single hosts; a job with no known result has failed."""
    assert exit_code_of(codes, succeeded=succeeded) == told
