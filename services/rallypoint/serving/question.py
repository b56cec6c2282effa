"""A question to whichever replica of a service answers it, for those who wait no longer than they must."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
import grpc.aio

from rallypoint.serving.attempts import FIRST_BACKOFF, GONE, LONGEST_BACKOFF, MOVED, UNHEARD, Pace
from rallypoint.serving.errors import ServiceError, decode
from rallypoint.serving.switchboard import Line, Switchboard

_Stub = TypeVar("_Stub")
_Answer = TypeVar("_Answer")

_NOTHING_DONE = frozenset({"NOT_OWNER", "NO_CONNECTION"})

OUTCOME_UNKNOWN = "OUTCOME_UNKNOWN"
"""Reason of the error where what must not be done twice may have been done, by a replica that was lost then."""


async def ask_any(
    board: Switchboard,
    stub: Callable[[grpc.aio.Channel], _Stub],
    question: Callable[[_Stub], Awaitable[_Answer]],
    *,
    repeatable: bool = True,
    pace: Pace | None = None,
) -> _Answer:
    """Ask each replica until one answers; a run that has no owner just now is waited for. Bound it with a timeout.

    Args:
        board: Where the service is.
        stub: Makes its stub.
        question: Makes the calls; from the first again where a replica could not be reached.
        repeatable: Whether it may be done twice. If not, only who surely did nothing is left for another.
        pace: How time passes.

    Raises:
        ServiceError: Every replica refused, or could not be reached: as the last of those had it that answered.
            OUTCOME_UNKNOWN: one was lost with what must not be done twice.
    """
    pace = pace or Pace()
    search = board.search()
    backoff = FIRST_BACKOFF
    said: ServiceError | None = None
    while True:
        try:
            line = await board.line(search)
        except ServiceError as no_connection:
            error = no_connection
        else:
            try:
                if not (repeatable or line.alone or line.connected):
                    raise ServiceError(
                        grpc.StatusCode.UNAVAILABLE, "NO_CONNECTION", f"{line.place} takes no connection"
                    )
                answer = await _answer(line, line.stub(stub), question, repeatable=repeatable)
                line.answered()
                return answer
            except ServiceError as failure:
                error = failure
                line.failed(error)
                # Who never was the owner did nothing. Any other end of a call, once it was sent, leaves that open.
                lost = error.reason == "OWNERSHIP_LOST" or (not line.alone and error.code in GONE)
                if not repeatable and lost and error.reason not in _NOTHING_DONE:
                    raise ServiceError(
                        error.code,
                        OUTCOME_UNKNOWN,
                        f"{line.place} was lost before it answered, so it may have been done ({error.message})",
                    ) from None
            finally:
                line.hang_up()
        if error.reason not in UNHEARD:
            said = error
        if search.at_once:
            continue
        if error.reason not in MOVED:
            # One that is there knows better what is wrong than that another one is not.
            raise said or error
        board.rest(search)
        await pace.sleep((error.retry_after or 0.0) + pace.draw() * backoff)
        backoff = min(2 * backoff, LONGEST_BACKOFF)


async def _answer(
    line: Line, stub: _Stub, question: Callable[[_Stub], Awaitable[_Answer]], *, repeatable: bool
) -> _Answer:
    patience = line.patience if repeatable else float("inf")
    try:
        async with asyncio.timeout(patience if patience < float("inf") else None) as bound:
            return await question(stub)
    except TimeoutError:
        if not bound.expired():
            raise
        message = f"{line.place} gave no answer within {patience:g} s"
        raise ServiceError(grpc.StatusCode.UNAVAILABLE, "NO_ANSWER", message) from None
    except grpc.aio.AioRpcError as failure:
        raise decode(failure) from None
