"""Replicas of a tiny service, in each condition: one answers, redirects, hangs, or is not there."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from rallypoint.rpc.errors import ServiceError
from rallypoint.serving.server import Server

Serve = Callable[..., Awaitable[Server]]


class Tiny:
    """The stub of the tiny service."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.Ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            "/tiny.v1.TinyService/Ask"
        )


class Replica:
    """One server, and its requests with their clients.

    Attributes:
        owner: Address of the owner that it names; None: it answers itself; empty: there is no owner.
        reason: Reason of its refusal, NOT_OWNER unless set.
        pause: Seconds before each reply.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.owner: str | None = None
        self.reason = "NOT_OWNER"
        self.pause = 0.0
        self.asked: list[bytes] = []
        self.peers: set[str] = set()
        self.address = ""
        self.server: Server
        self.called = asyncio.Event()

    async def start(self, serve: Serve, **options: Any) -> Replica:
        self.server = await serve({"Ask": grpc.unary_unary_rpc_method_handler(self._answer)}, **options)
        self.address = self.server.address
        return self

    async def _answer(self, request: bytes, context: Any) -> bytes:
        self.asked.append(request)
        self.peers.add(context.peer())
        self.called.set()
        if self.owner is not None:
            raise not_owner(self.owner, self.reason)
        await asyncio.sleep(self.pause)
        return self.name.encode()


def not_owner(owner: str = "", reason: str = "NOT_OWNER") -> ServiceError:
    """Return the refusal of a replica that does not, or no longer, own the run."""
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        reason,
        "the run is elsewhere",
        metadata={"run_id": "r", **({"owner_address": owner} if owner else {})},
        retry_after=None if owner else 0.1,
    )


def refusing() -> tuple[socket.socket, str]:
    """Return a bound socket without a listener, and its address, which stays without one."""
    nobody = socket.socket()
    nobody.bind(("127.0.0.1", 0))
    return nobody, f"127.0.0.1:{nobody.getsockname()[1]}"


def mute() -> tuple[socket.socket, str]:
    """Return a socket that accepts connections and never replies, like a stopped process, and its address."""
    server = socket.create_server(("127.0.0.1", 0))
    return server, f"127.0.0.1:{server.getsockname()[1]}"
