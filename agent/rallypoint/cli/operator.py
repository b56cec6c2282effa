"""What the commands for operators share: one call to a service, bounded, with clear errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

from rallypoint.agent.v1 import supervisor_service_pb2_grpc as supervisor_grpc
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as rendezvous_grpc
from rallypoint.rpc.calls import ask_any
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ClientTLS, SettingError
from rallypoint.rpc.errors import ServiceError, tls_advice
from rallypoint.rpc.loop import run
from rallypoint.rpc.replicas import Switchboard
from rallypoint.rpc.selector import GONE
from rallypoint.timer.v1 import timer_service_pb2_grpc as timer_grpc

# Seconds for a question that is better answered, before one is asked that anybody answers.
_PREFERRED = 2.0

_T = TypeVar("_T")
_Stub = TypeVar("_Stub")


@dataclass(frozen=True, slots=True)
class Asked(Generic[_Stub]):
    """What is asked: the service's name, the flag with its address, and its stub."""

    name: str
    flag: str
    stub: Callable[[grpc.aio.Channel], _Stub]


RENDEZVOUS: Asked[rendezvous_grpc.RendezvousServiceAsyncStub] = Asked(
    "rendezvous service", "--rdzv-endpoint", rendezvous_grpc.RendezvousServiceStub
)
TIMER: Asked[timer_grpc.TimerServiceAsyncStub] = Asked(
    "timer service", "--timer-endpoint", timer_grpc.TimerServiceStub
)
SUPERVISOR: Asked[supervisor_grpc.SupervisorServiceAsyncStub] = Asked(
    "agent", "--agent", supervisor_grpc.SupervisorServiceStub
)


def ask(
    endpoint: str,
    tls: ClientTLS | None,
    timeout: float,
    question: Callable[[rendezvous_grpc.RendezvousServiceAsyncStub], Awaitable[_T]],
    *,
    repeatable: bool = True,
    preferred: Callable[[rendezvous_grpc.RendezvousServiceAsyncStub], Awaitable[_T]] | None = None,
) -> _T:
    """Ask a rendezvous service, within `timeout` seconds.

    Args:
        endpoint: Where it is; of several replicas, separated by commas, whichever answers.
        tls: How to speak with it.
        timeout: Seconds for it all.
        question: Makes the calls.
        repeatable: Whether what is asked may be done twice, so that another replica is asked where one was lost.
        preferred: Asked first, for a part of the time: a question that is answered better, but not always.

    Raises:
        SettingError: It could not be reached, or refused; one line.
    """
    return _ask(RENDEZVOUS, endpoint, tls, timeout, question, repeatable=repeatable, preferred=preferred)


def ask_timer(
    endpoint: str,
    tls: ClientTLS | None,
    timeout: float,
    question: Callable[[timer_grpc.TimerServiceAsyncStub], Awaitable[_T]],
) -> _T:
    """Ask a timer service, within `timeout` seconds.

    Raises:
        SettingError: It could not be reached, or refused; one line.
    """
    return _ask(TIMER, endpoint, tls, timeout, question)


def ask_agent(
    endpoint: str,
    tls: ClientTLS | None,
    timeout: float,
    question: Callable[[supervisor_grpc.SupervisorServiceAsyncStub], Awaitable[_T]],
) -> _T:
    """Ask an agent, within `timeout` seconds.

    Raises:
        SettingError: It could not be reached, or refused; one line.
    """
    return _ask(SUPERVISOR, endpoint, tls, timeout, question)


def _ask(
    asked: Asked[_Stub],
    endpoint: str,
    tls: ClientTLS | None,
    timeout: float,
    question: Callable[[_Stub], Awaitable[_T]],
    *,
    repeatable: bool = True,
    preferred: Callable[[_Stub], Awaitable[_T]] | None = None,
) -> _T:
    async def call() -> _T:
        async with AsyncExitStack() as stack:
            if asked.name == RENDEZVOUS.name:
                board = await stack.enter_async_context(Switchboard(endpoint, tls))
            else:
                board = Switchboard.over(await stack.enter_async_context(open_channel(endpoint, tls)))
            try:
                async with asyncio.timeout(timeout):
                    if preferred is not None:
                        # Whether nobody answers at all is told by the other question.
                        with suppress(TimeoutError, _NobodyAnswered):
                            async with asyncio.timeout(min(_PREFERRED, timeout / 2)):
                                return await _ask_the_best(board, asked.stub, preferred)
                    return await ask_any(board, asked.stub, question, repeatable=repeatable)
            except TimeoutError:
                raise SettingError(f"no {asked.name} answered at {endpoint} within {timeout:g} s") from None
            except ServiceError as error:
                raise refusal(endpoint, tls, error, asked) from None

    return run(call())


class _NobodyAnswered(Exception):
    """Of those who could answer best."""


async def _ask_the_best(
    board: Switchboard, stub: Callable[[grpc.aio.Channel], _Stub], question: Callable[[_Stub], Awaitable[_T]]
) -> _T:
    try:
        return await ask_any(board, stub, question)
    except ServiceError as error:
        if error.code in GONE:
            raise _NobodyAnswered from None
        raise


def refusal(
    endpoint: str,
    tls: ClientTLS | None,
    error: ServiceError,
    asked: Asked[_Stub] | None = None,
) -> SettingError:
    """Why a call to a service, the rendezvous service unless told, failed: a line with what to do about it."""
    name, flag = (asked.name, asked.flag) if asked is not None else (RENDEZVOUS.name, RENDEZVOUS.flag)
    # gRPC's own reasons, which nobody of ours said, and that none came of it.
    if error.reason in (grpc.StatusCode.UNAVAILABLE.name, "NO_CONNECTION", "NO_ANSWER"):
        advice = tls_advice(error.message, tls) or f"check {flag}"
        return SettingError(f"no {name} answers at {endpoint}: {error.message}; {advice}")
    if error.reason == grpc.StatusCode.UNIMPLEMENTED.name:
        return SettingError(f"what answers at {endpoint} is no {name} ({error.message}); check {flag}")
    return SettingError(f"{endpoint}: {error.message} ({error.reason})")
