"""What the commands for operators share: one call to a service, bounded, with clear errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc

from rallypoint.agent.v1 import supervisor_service_pb2_grpc as supervisor_grpc
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as rendezvous_grpc
from rallypoint.serving.advice import tls_advice
from rallypoint.serving.channel import open_channel
from rallypoint.serving.errors import decode
from rallypoint.serving.loop import run
from rallypoint.serving.settings import ClientTLS, SettingError
from rallypoint.timer.v1 import timer_service_pb2_grpc as timer_grpc

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
) -> _T:
    """Ask a rendezvous service, within `timeout` seconds.

    Raises:
        SettingError: It could not be reached, or refused; one line.
    """
    return _ask(RENDEZVOUS, endpoint, tls, timeout, question)


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
) -> _T:
    async def call() -> _T:
        channel = open_channel(endpoint, tls)
        try:
            async with asyncio.timeout(timeout):
                return await question(asked.stub(channel))
        except TimeoutError:
            raise SettingError(f"no {asked.name} answered at {endpoint} within {timeout:g} s") from None
        except grpc.aio.AioRpcError as rpc_error:
            raise refusal(endpoint, tls, rpc_error, asked) from None
        finally:
            await channel.close()

    return run(call())


def refusal(
    endpoint: str,
    tls: ClientTLS | None,
    rpc_error: grpc.aio.AioRpcError,
    asked: Asked[_Stub] | None = None,
) -> SettingError:
    """Why a call to a service, the rendezvous service unless told, failed: a line with what to do about it."""
    name, flag = (asked.name, asked.flag) if asked is not None else (RENDEZVOUS.name, RENDEZVOUS.flag)
    error = decode(rpc_error)
    # gRPC's own reasons, which nobody of ours said.
    if error.reason == grpc.StatusCode.UNAVAILABLE.name:
        advice = tls_advice(error.message, tls) or f"check {flag}"
        return SettingError(f"no {name} answers at {endpoint}: {error.message}; {advice}")
    if error.reason == grpc.StatusCode.UNIMPLEMENTED.name:
        return SettingError(f"what answers at {endpoint} is no {name} ({error.message}); check {flag}")
    return SettingError(f"{endpoint}: {error.message} ({error.reason})")
