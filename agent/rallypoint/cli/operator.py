"""What the commands for operators share: one call to a rendezvous service, bounded, with clear errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.serving.advice import tls_advice
from rallypoint.serving.channel import open_channel
from rallypoint.serving.errors import decode
from rallypoint.serving.loop import run
from rallypoint.serving.settings import ClientTLS, SettingError

_T = TypeVar("_T")


def ask(
    endpoint: str,
    tls: ClientTLS | None,
    timeout: float,
    question: Callable[[pb_grpc.RendezvousServiceAsyncStub], Awaitable[_T]],
) -> _T:
    """Ask a rendezvous service, within `timeout` seconds.

    Raises:
        SettingError: It could not be reached, or refused; one line.
    """

    async def call() -> _T:
        channel = open_channel(endpoint, tls)
        try:
            async with asyncio.timeout(timeout):
                return await question(pb_grpc.RendezvousServiceStub(channel))
        except TimeoutError:
            raise SettingError(f"no rendezvous service answered at {endpoint} within {timeout:g} s") from None
        except grpc.aio.AioRpcError as rpc_error:
            raise refusal(endpoint, tls, rpc_error) from None
        finally:
            await channel.close()

    return run(call())


def refusal(endpoint: str, tls: ClientTLS | None, rpc_error: grpc.aio.AioRpcError) -> SettingError:
    """Why a call to a rendezvous service failed, in one line with what to do about it."""
    error = decode(rpc_error)
    # gRPC's own reasons, which nobody of ours said.
    if error.reason == grpc.StatusCode.UNAVAILABLE.name:
        advice = tls_advice(error.message, tls) or "check --rdzv-endpoint"
        return SettingError(f"no rendezvous service answers at {endpoint}: {error.message}; {advice}")
    if error.reason == grpc.StatusCode.UNIMPLEMENTED.name:
        return SettingError(
            f"what answers at {endpoint} is no rendezvous service ({error.message}); check --rdzv-endpoint"
        )
    return SettingError(f"{endpoint}: {error.message} ({error.reason})")
