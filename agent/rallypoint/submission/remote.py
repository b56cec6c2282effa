"""An agent on another host: what it is called, and how its calls are made over a network that may break."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from rallypoint.agent.v1 import supervisor_service_pb2_grpc as pb_grpc
from rallypoint.rpc.endpoint import ClientTLS, parse_endpoint
from rallypoint.rpc.errors import ServiceError, tls_advice
from rallypoint.rpc.selector import GONE


@dataclass(frozen=True, slots=True, eq=False)
class RemoteAgent:
    """An agent of a job.

    Attributes:
        endpoint: Where it is.
        label: What it is called before lines of output.
        stub: To call it.
    """

    endpoint: str
    label: str
    stub: pb_grpc.SupervisorServiceAsyncStub


def labels(endpoints: Sequence[str]) -> list[str]:
    """Short names of agents: their hosts, or the whole endpoints of those that share one."""
    hosts = [parse_endpoint(endpoint).host for endpoint in endpoints]
    return [
        host if host and hosts.count(host) == 1 else endpoint
        for host, endpoint in zip(hosts, endpoints, strict=True)
    ]


def is_lost(error: ServiceError) -> bool:
    """Whether a call has failed for a connection, or an agent that is busy, rather than for what it asked."""
    if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return error.retry_after is not None
    if error.reason in ("UNEXPECTED_ERROR", "SUBSCRIBER_TOO_SLOW", "LOGS_UNREADABLE"):
        return True
    # An agent that refuses, or that goes away and says so, gives a reason of its own.
    return error.reason == error.code.name and error.code in (*GONE, grpc.StatusCode.DEADLINE_EXCEEDED)


def in_words(error: ServiceError, tls: ClientTLS | None, *, answered: bool = False) -> str:
    """Why an agent could not be asked, or refused.

    Args:
        error: What came of the call.
        tls: What is spoken with it; None for plaintext.
        answered: Whether it ever has: then nothing is wrong with the certificates.
    """
    if error.reason == grpc.StatusCode.UNIMPLEMENTED.name:
        return f"no agent answers there ({error.message})"
    if error.reason != error.code.name:
        return f"{error.message} ({error.reason})"
    advice = tls_advice(error.message, tls) if not answered else None
    return error.message + (f"; {advice}" if advice else "")
