"""A failed handshake is reported with the setting to change, for each wording of gRPC and its libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from rallypoint.rpc.endpoint import ClientSecurity, ClientTLS, Plaintext, RunSecret, ServerOptions
from rallypoint.rpc.errors import tls_advice
from support.waiting import PATIENCE

# The fixtures' Certificates, by its fields: ca, server, server_key, client, client_key.
Certificates = Any
Start = Callable[..., Any]


@pytest.fixture
def advised(serve: Start, connect: Start) -> Callable[..., Any]:
    """Return the advice to a client that a server refuses."""

    async def ask(options: ServerOptions, security: ClientSecurity) -> str | None:
        channel = connect(await serve({}, options=options), security)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/tiny.v1.TinyService/Any")(b"", timeout=PATIENCE)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        return tls_advice(caught.value.details() or "", security)

    return ask


async def test_a_plaintext_client_learns_that_tls_is_wanted(
    advised: Callable[..., Any], certificates: Certificates
) -> None:
    """The reverse holds too."""
    secure = ServerOptions(tls_cert=certificates.server, tls_key=certificates.server_key)
    assert (await advised(secure, Plaintext()) or "").startswith("it may require TLS or a run secret")
    told = await advised(ServerOptions(insecure=True), ClientTLS(ca=certificates.ca))
    assert told == "it speaks plaintext: leave the --tls flags out"


async def test_a_client_with_another_secret_learns_so(advised: Callable[..., Any]) -> None:
    """The secret is of the run, or of its user."""
    ours, theirs = RunSecret("a" * 32), RunSecret("b" * 32)
    told = "its run secret is another: give all hosts of the job the same"
    assert await advised(ServerOptions(run_secret=ours), theirs) == told
    assert "this user did not start" in (await advised(ServerOptions(run_secret=ours), None) or "")
    plaintext = ServerOptions(insecure=True)
    assert (await advised(plaintext, theirs) or "").startswith("it speaks plaintext")
    assert (await advised(plaintext, None) or "").startswith("it speaks plaintext")


async def test_a_client_of_another_authority_learns_so(
    advised: Callable[..., Any], certificates: Certificates, other_certificates: Certificates
) -> None:
    """The server's certificate is not signed by a CA that the client trusts."""
    secure = ServerOptions(tls_cert=certificates.server, tls_key=certificates.server_key)
    told = await advised(secure, ClientTLS(ca=other_certificates.ca))
    assert told == "its certificate is not signed by an authority in --tls-ca"


async def test_a_client_whose_certificate_is_missing_or_wrong_learns_so(
    advised: Callable[..., Any], certificates: Certificates, other_certificates: Certificates
) -> None:
    """The server only closes the connection: its log has the rest."""
    mutual = ServerOptions(
        tls_cert=certificates.server, tls_key=certificates.server_key, tls_client_ca=certificates.ca
    )
    told = await advised(mutual, ClientTLS(ca=certificates.ca))
    assert told == "it may require a client certificate: give --tls-cert and --tls-key"
    foreign = ClientTLS(certificates.ca, other_certificates.client, other_certificates.client_key)
    told = await advised(mutual, foreign)
    assert told == "it may require a client certificate of another authority: check --tls-cert"


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("Hostname Verification Check failed.", "its certificate is for another host name"),
        ("CERTIFICATE_VERIFY_FAILED: certificate has expired", "its certificate is expired"),
        ("Failed to connect to remote host: Connection refused", None),
    ],
)
def test_other_failures_are_distinguished(message: str, advice: str | None) -> None:
    """They occur with no server of the tests; the messages are gRPC's."""
    told = tls_advice(message, ClientTLS())
    assert told is None if advice is None else told is not None and told.startswith(advice)
