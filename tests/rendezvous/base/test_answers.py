"""Who waits for an answer gets it, or the reason why there is none; who has gone disturbs nobody."""

from __future__ import annotations

import asyncio

import pytest

from rallypoint.rendezvous.base.cooperative import settle
from rallypoint.rendezvous.core.commands import RunNotFound


def waiting() -> asyncio.Future[bytes]:
    return asyncio.get_running_loop().create_future()


async def test_an_outcome_is_the_answer() -> None:
    answer = waiting()
    settle(answer, b"1")
    assert await answer == b"1"


async def test_a_refusal_is_raised() -> None:
    answer = waiting()
    settle(answer, RunNotFound("r"))
    with pytest.raises(RunNotFound):
        await answer


@pytest.mark.parametrize("outcome", [b"1", RunNotFound("r")], ids=["answered", "refused"])
async def test_who_has_gone_is_told_nothing(outcome: bytes | RunNotFound) -> None:
    answer = waiting()
    answer.cancel()
    settle(answer, outcome)
    assert answer.cancelled()
