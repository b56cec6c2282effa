"""A waiting caller gets the result or the error; a caller that has gone disturbs no other."""

from __future__ import annotations

import pytest

from rallypoint.rendezvous.core.commands import RunNotFound
from rallypoint.rendezvous.journal.commit_loop import PendingRequest


async def test_an_outcome_is_the_answer() -> None:
    answer = PendingRequest[bytes](run_id="r")
    answer.settle(b"1")
    assert await answer.reply == b"1"


async def test_a_refusal_is_raised() -> None:
    answer = PendingRequest[bytes](run_id="r")
    answer.settle(RunNotFound("r"))
    with pytest.raises(RunNotFound):
        await answer.reply


@pytest.mark.parametrize("outcome", [b"1", RunNotFound("r")], ids=["answered", "refused"])
async def test_a_cancelled_request_gets_no_outcome(outcome: bytes | RunNotFound) -> None:
    answer = PendingRequest[bytes](run_id="r")
    answer.reply.cancel()
    answer.settle(outcome)
    assert answer.reply.cancelled()
