"""A client that writes down everything it asks for: what it asked, how often, and what it knows of the outcome."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import grpc

from ha.doors import Door, Doors
from ha.history import NEVER, History, Operation, Outcome
from rallypoint.rpc.errors import ServiceError, decode

_Response = TypeVar("_Response")

# One attempt, seconds: a replica that is stopped answers nothing.
_ATTEMPT = 4.0
# Longest that a client goes on asking, seconds.
_PATIENCE = 15.0
# Longest pause between two attempts, seconds; cut at random.
_PAUSE = 0.4
# Codes with which a service says that nothing happened. Any other leaves it open.
_REFUSALS = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)


class Caller:
    """Asks for one thing at a time. Not as the product's clients do: it also goes where these would not go."""

    def __init__(self, name: str, doors: Doors, history: History, draw: random.Random) -> None:
        """Ask nothing yet; what is asked is written to `history` under this name."""
        self.name = name
        self.draw = draw
        self._doors = doors
        self._history = history
        self._door = draw.choice(list(doors.by_name.values()))

    def anywhere(self) -> str:
        """A replica, drawn."""
        return self.draw.choice(self._doors.names)

    async def ask(
        self,
        what: str,
        object_: str,
        asked: Mapping[str, Any],
        call: Callable[[Door, float], Awaitable[_Response]],
        read: Callable[[_Response], Mapping[str, Any]],
        *,
        at: str = "",
        patience: float | None = None,
    ) -> Operation:
        """Ask until there is an answer, and write down how it went.

        Args:
            what: The kind of operation.
            object_: What it is done to.
            asked: What is asked, for the history.
            call: Makes one attempt at a replica, with a timeout in seconds. Attempts must be repetitions of one and the
                same operation.
            read: What a response says, for the history.
            at: The only replica to ask, once; empty: whoever is thought to be the owner, until it answers.
            patience: Seconds after which its outcome is left unknown; None: drawn, so that some give up soon.
        """
        began = self._history.clock()
        patience = self.draw.uniform(0.5, _PATIENCE) if patience is None else patience
        outcome, answered, ended = Outcome.UNKNOWN, dict[str, Any](), NEVER
        try:
            outcome, answered = await self._attempts(call, read, at, began + patience)
            ended = self._history.clock()
        finally:
            if outcome is Outcome.UNKNOWN:
                ended = NEVER
            operation = Operation(
                self.name, what, object_, began, ended, outcome, asked, answered, at or self._door.name
            )
            self._history.add(operation)
        return operation

    async def _attempts(
        self,
        call: Callable[[Door, float], Awaitable[_Response]],
        read: Callable[[_Response], Mapping[str, Any]],
        at: str,
        deadline: float,
    ) -> tuple[Outcome, dict[str, Any]]:
        open_ = False
        while True:
            door = self._doors.by_name[at] if at else self._door
            try:
                response = await call(door, min(_ATTEMPT, max(0.1, deadline - self._history.clock())))
            except grpc.aio.AioRpcError as failure:
                error = decode(failure)
            else:
                return Outcome.OK, dict(read(response))
            if error.code in _REFUSALS and error.retry_after is None:
                # Where an earlier attempt may have taken effect, this one's refusal says nothing about that.
                return (Outcome.UNKNOWN if open_ else Outcome.REFUSED), {"reason": error.reason}
            open_ = open_ or error.code not in _REFUSALS
            if at or self._history.clock() >= deadline:
                return Outcome.UNKNOWN, {"reason": error.reason}
            self._move_on(error)
            await asyncio.sleep(self.draw.random() * _PAUSE)

    def _move_on(self, error: ServiceError) -> None:
        """Ask whoever is named as the owner next, or anybody."""
        named = self._doors.at(error.metadata.get("owner_address", ""))
        self._door = named or self._doors.by_name[self.anywhere()]
