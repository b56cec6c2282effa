"""A client that records each of its operations: the request, and the outcome as far as the client knows it."""

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

# Timeout of one attempt, seconds: a stopped replica does not reply.
_ATTEMPT = 4.0
# Longest time for which a client retries, seconds.
_RETRY_TIMEOUT = 15.0
# Longest pause between two attempts, seconds; the actual one is random.
_PAUSE = 0.4
# Codes which mean that the operation had no effect. Any other leaves that open.
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
    """Runs one operation at a time. Unlike the product's clients, it also calls replicas that do not own the run."""

    def __init__(self, name: str, doors: Doors, history: History, draw: random.Random) -> None:
        """Send nothing yet; operations are added to `history` under this name."""
        self.name = name
        self.draw = draw
        self._doors = doors
        self._history = history
        self._door = draw.choice(list(doors.by_name.values()))

    def anywhere(self) -> str:
        """Return the name of a random replica."""
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
        """Retry an operation until there is a final reply, and record its outcome.

        Args:
            `what`: The kind of operation.
            object_: The run, or key of a run, that it acts on.
            asked: The fields of the request, for the history.
            call: Makes one attempt at a replica, with a timeout in seconds. Attempts must be repetitions of one and the
                same operation.
            read: Returns the fields of a response, for the history.
            at: The only replica to call, once; empty: the presumed owner, with retries.
            `patience`: Seconds after which its outcome stays unknown; None: random, so that some clients give up soon.
        """
        began = self._history.clock()
        patience = self.draw.uniform(0.5, _RETRY_TIMEOUT) if patience is None else patience
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
                # An earlier attempt may have taken effect; this one's refusal does not rule that out.
                return (Outcome.UNKNOWN if open_ else Outcome.REFUSED), {"reason": error.reason}
            open_ = open_ or error.code not in _REFUSALS
            if at or self._history.clock() >= deadline:
                return Outcome.UNKNOWN, {"reason": error.reason}
            self._move_on(error)
            await asyncio.sleep(self.draw.random() * _PAUSE)

    def _move_on(self, error: ServiceError) -> None:
        """Choose the replica for the next attempt: the owner that the error names, or a random one."""
        named = self._doors.at(error.metadata.get("owner_address", ""))
        self._door = named or self._doors.by_name[self.anywhere()]
