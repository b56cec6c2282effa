"""The outcome of an operation, as far as a recording client knows it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Any

import grpc
import pytest

from ha.caller import Caller
from ha.doors import Door, Doors
from ha.history import NEVER, History, Operation, Outcome
from rallypoint.rpc.errors import ServiceError, encode

_ENDPOINTS = {"one": "10.0.0.1:29400", "two": "10.0.0.2:29400"}


def _failure(code: grpc.StatusCode, reason: str = "", **metadata: str) -> grpc.aio.AioRpcError:
    trailing: Any = ()
    if reason:
        trailing = encode(ServiceError(code, reason, "so it is", metadata=metadata)).trailing_metadata
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), "so it is")


GONE = _failure(grpc.StatusCode.UNAVAILABLE, "JOURNAL_FAILED")
LATE = _failure(grpc.StatusCode.DEADLINE_EXCEEDED)
LOST = _failure(grpc.StatusCode.FAILED_PRECONDITION, "LEASE_LOST")


class _Script:
    """Gives one answer after the other, and records which replica was called."""

    def __init__(self, answers: Iterable[str | Exception]) -> None:
        self._answers = iter(answers)
        self.asked: list[str] = []

    async def __call__(self, door: Door, timeout: float) -> str:
        self.asked.append(door.name)
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def _ask(script: Callable[[Door, float], Any], at: str = "", patience: float = 60.0) -> Operation:
    history = History()
    channels = {name: grpc.aio.insecure_channel(endpoint) for name, endpoint in _ENDPOINTS.items()}
    try:
        caller = Caller("c", Doors(channels, _ENDPOINTS), history, random.Random(1))
        operation = await caller.ask(
            "state.get", "run", {"x": 1}, script, lambda answer: {"value": answer}, at=at, patience=patience
        )
    finally:
        for channel in channels.values():
            await channel.close()
    assert list(history.of(Operation)) == [operation]
    return operation


async def test_an_answer_is_kept() -> None:
    """A reply ends an operation, regardless of the results of its earlier attempts."""
    scripts: list[list[str | Exception]] = [["fine"], [GONE, LATE, "fine"]]
    for answers in scripts:
        operation = await _ask(_Script(answers))
        assert (operation.outcome, operation.answered) == (Outcome.OK, {"value": "fine"})
        assert operation.began <= operation.ended < NEVER


async def test_an_immediate_refusal_means_no_effect() -> None:
    """A refusal after an attempt of unknown outcome leaves the outcome unknown."""
    refused = await _ask(_Script([LOST]))
    assert (refused.outcome, refused.answered) == (Outcome.REFUSED, {"reason": "LEASE_LOST"})
    assert refused.ended < NEVER
    unknown = await _ask(_Script([GONE, LOST]))
    assert (unknown.outcome, unknown.ended) == (Outcome.UNKNOWN, NEVER)


async def test_the_next_attempt_goes_to_the_named_owner() -> None:
    """The next attempt goes to the owner that the error names."""
    for owner, endpoint in _ENDPOINTS.items():
        elsewhere = _failure(grpc.StatusCode.UNAVAILABLE, "NOT_OWNER", owner_address=endpoint)
        script = _Script([elsewhere, "fine"])
        assert (await _ask(script)).at == owner
        assert script.asked[-1] == owner


async def test_a_given_replica_is_called_once() -> None:
    """An operation at one given replica has an unknown outcome if that replica fails."""
    script = _Script([GONE])
    operation = await _ask(script, at="two")
    assert (operation.outcome, operation.at, script.asked) == (Outcome.UNKNOWN, "two", ["two"])


async def test_an_unanswered_operation_ends_as_unknown() -> None:
    """An operation that no replica answers has an unknown outcome in the end."""
    operation = await _ask(_Script([GONE] * 1000), patience=0.0)
    assert (operation.outcome, operation.ended) == (Outcome.UNKNOWN, NEVER)


async def test_a_cancelled_operation_is_recorded() -> None:
    """An operation that is pending when its client ends is in the history: it may have taken effect."""
    history = History()
    channel = grpc.aio.insecure_channel(_ENDPOINTS["one"])
    asked = asyncio.Event()

    async def call(door: Door, timeout: float) -> None:
        asked.set()
        await asyncio.Event().wait()

    doors = Doors({"one": channel}, _ENDPOINTS)
    caller = Caller("c", doors, history, random.Random(1))
    asking = asyncio.create_task(caller.ask("state.set", "run", {}, call, lambda _: {}))
    await asked.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    (operation,) = history.of(Operation)
    assert (operation.outcome, operation.ended) == (Outcome.UNKNOWN, NEVER)
    await channel.close()
