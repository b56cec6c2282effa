"""TLS from a secret: only its holders connect, and it is never sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import (
    ClientSecurity,
    ClientTLS,
    Plaintext,
    RunSecret,
    ServerOptions,
    SettingError,
)
from rallypoint.rpc.run_secret import identity_of
from support.refusals import refusal
from support.waiting import PATIENCE

Start = Callable[..., Any]

OURS, THEIRS = RunSecret("a" * 32), RunSecret("b" * 32)
METHOD = "/tiny.v1.TinyService/Ask"


async def said(_request: bytes, _context: object) -> bytes:
    """Reply."""
    return b"yes"


HANDLERS: dict[str, Any] = {"Ask": grpc.unary_unary_rpc_method_handler(said)}


async def ask(channel: grpc.aio.Channel) -> bytes:
    """Call the service once."""
    call: Any = channel.unary_unary(METHOD)
    return bytes(await call(b"?", timeout=PATIENCE))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
async def test_holders_of_the_secret_connect(serve: Start, connect: Start, host: str) -> None:
    """They use any name or address: certificates are for the secret, not for hosts."""
    server = await serve(HANDLERS, options=ServerOptions(host=host, run_secret=OURS))
    assert await ask(connect(server, OURS)) == b"yes"


@pytest.mark.parametrize("security", [THEIRS, None, Plaintext(), ClientTLS()])
async def test_other_clients_do_not_connect(serve: Start, connect: Start, security: ClientSecurity) -> None:
    """Clients with another secret, of another user of the host, or without a secret are refused."""
    server = await serve(HANDLERS, options=ServerOptions(run_secret=OURS))
    assert (await refusal(ask(connect(server, security)))).code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    "options", [ServerOptions(run_secret=THEIRS), ServerOptions(insecure=True), ServerOptions()]
)
async def test_a_server_without_the_secret_gets_no_call(
    serve: Start, connect: Start, options: ServerOptions
) -> None:
    """Otherwise a process that listens there first could send a job a false address for its workers."""
    server = await serve(HANDLERS, options=options)
    assert (await refusal(ask(connect(server, OURS)))).code is grpc.StatusCode.UNAVAILABLE


async def test_without_a_setting_loopback_is_this_users(serve: Start, connect: Start) -> None:
    server = await serve(HANDLERS, options=ServerOptions())
    assert await ask(connect(server, None)) == b"yes"


def test_without_a_setting_no_client_uses_plaintext_over_a_network() -> None:
    with pytest.raises(
        SettingError, match=r"refusing to speak plaintext at 10.0.0.1:1.*RALLYPOINT_RUN_SECRET"
    ):
        open_channel("10.0.0.1:1")


def test_nothing_that_is_sent_has_the_secret() -> None:
    """Two processes have different keys, and the same CA's public key."""
    one = identity_of(OURS)
    identity_of.cache_clear()
    other = identity_of(OURS)
    assert one.key != other.key
    for pem in (one.certificate, one.key, one.authorities):
        assert pem is not None
        assert OURS.text.encode() not in pem
    assert OURS.text not in repr(OURS)
