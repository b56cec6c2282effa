"""The kept records of a run never have a gap, and no revision comes twice."""

from __future__ import annotations

import pytest

from rallypoint.rendezvous.journal.journal import Dropped, OutOfSequenceError, Span
from rendezvous.journal.entries import checkpoint, forgotten, record


@pytest.mark.parametrize("revision", [0, 1, 5, 7, 100])
def test_only_the_next_record_is_taken(revision: int) -> None:
    """A repeated or early record raises an error with the expected one; nothing has changed."""
    span = Span(3, 5)
    with pytest.raises(
        OutOfSequenceError, match=f"record {revision} of run 'run' comes where record 6 is due"
    ):
        span.add(record(revision))
    assert span == Span(3, 5)
    span.add(record(6))
    assert span == Span(3, 6)


@pytest.mark.parametrize(
    ("revision", "keep_from", "first"), [(5, 6, 6), (5, 4, 4), (3, 4, 4), (5, 1, 3), (2, 1, 3)]
)
def test_a_checkpoint_drops_records_that_it_does_not_keep(revision: int, keep_from: int, first: int) -> None:
    """Possibly none, or all; records that were dropped before do not come back."""
    span = Span(3, 5)
    span.cover(checkpoint(revision, keep_from))
    assert span == Span(first, 5)


@pytest.mark.parametrize(("revision", "keep_from"), [(6, 6), (5, 7), (3, 5), (1, 1)])
def test_a_checkpoint_that_would_leave_a_gap_is_refused(revision: int, keep_from: int) -> None:
    """It is ahead of the records, drops some that it does not cover, or is older than the first kept record."""
    span = Span(3, 5)
    with pytest.raises(OutOfSequenceError, match="a checkpoint of run 'run' after record"):
        span.cover(checkpoint(revision, keep_from))
    assert span == Span(3, 5)


@pytest.mark.parametrize("span", [Span(), Span(6, 5, 2), Span(6, 5, 2, dropped=True)])
def test_a_run_without_records_begins_after_a_checkpoint(span: Span) -> None:
    """Not below its last revision, nor with a gap; a run with records does not."""
    for refused in (checkpoint(span.last - 1, span.last), checkpoint(9, 9), checkpoint(9, 11)):
        with pytest.raises(OutOfSequenceError):
            span.cover(refused)
    span.cover(checkpoint(9, 10))
    assert span == Span(10, 9, span.era)
    span.add(record(10))
    with pytest.raises(OutOfSequenceError):
        span.cover(checkpoint(12, 13))


def test_only_a_run_without_records_is_dropped() -> None:
    span = Span(3, 5)
    with pytest.raises(OutOfSequenceError, match="records 3 to 5 are kept"):
        span.drop(Dropped("run"))
    span.forget(forgotten(5))
    span.drop(Dropped("run"))
    assert span.dropped


def test_a_forgotten_run_goes_on_from_its_revision() -> None:
    """In a new era, as often as it is forgotten."""
    span = Span(3, 5)
    span.forget(forgotten(5))
    assert span == Span(6, 5, 1)
    span.add(record(6))
    span.forget(forgotten(8))
    assert span == Span(9, 8, 2)
    with pytest.raises(OutOfSequenceError, match="forgotten up to record 7, but the latest is 8"):
        span.forget(forgotten(7))
