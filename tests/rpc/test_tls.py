"""TLS and mutual TLS with real certificates: accepted clients, refused clients, and files that are wrong or change."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import (
    ClientTLS,
    FileNames,
    Plaintext,
    RunSecret,
    ServerOptions,
    ServiceStartError,
    parse_endpoint,
)
from rallypoint.rpc.tls import TLSFileError, transport
from rallypoint.serving.server import Server
from support.refusals import refusal
from support.waiting import PATIENCE, until

# The fixtures' Certificates, by its fields: ca, server, server_key, client, client_key.
Certificates = Any
Start = Callable[..., Any]


async def whoami(_request: bytes, context: Any) -> bytes:
    names = context.auth_context().get("x509_common_name", [b"nobody"])
    return bytes(names[0])


HANDLERS: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
    "WhoAmI": grpc.unary_unary_rpc_method_handler(whoami)
}


async def ask(channel: grpc.aio.Channel) -> bytes:
    """Return the client's name as the server sees it; AioRpcError UNAVAILABLE if no connection is made."""
    method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
        "/tiny.v1.TinyService/WhoAmI"
    )
    return await method(b"", timeout=PATIENCE)


def options_for(certificates: Certificates, **changes: Any) -> ServerOptions:
    return dataclasses.replace(
        ServerOptions(tls_cert=certificates.server, tls_key=certificates.server_key), **changes
    )


async def assert_refused(channel: grpc.aio.Channel) -> None:
    assert (await refusal(ask(channel))).code is grpc.StatusCode.UNAVAILABLE


async def test_a_client_that_trusts_the_authority_is_served(
    serve: Start, connect: Start, certificates: Certificates
) -> None:
    server = await serve(HANDLERS, options=options_for(certificates))
    assert await ask(connect(server, ClientTLS(ca=certificates.ca))) == b"nobody"


async def test_a_client_that_trusts_another_authority_does_not_connect(
    serve: Start, connect: Start, certificates: Certificates, other_certificates: Certificates
) -> None:
    server = await serve(HANDLERS, options=options_for(certificates))
    await assert_refused(connect(server, ClientTLS(ca=other_certificates.ca)))


async def test_a_plaintext_client_does_not_get_in(
    serve: Start, connect: Start, certificates: Certificates
) -> None:
    server = await serve(HANDLERS, options=options_for(certificates))
    await assert_refused(connect(server))


async def test_mutual_tls_identifies_the_client_to_the_service(
    serve: Start, connect: Start, certificates: Certificates
) -> None:
    server = await serve(HANDLERS, options=options_for(certificates, tls_client_ca=certificates.ca))
    tls = ClientTLS(certificates.ca, certificates.client, certificates.client_key)
    assert await ask(connect(server, tls)) == b"first client"


async def test_mutual_tls_refuses_clients_without_a_certificate_or_with_a_foreign_one(
    serve: Start, connect: Start, certificates: Certificates, other_certificates: Certificates
) -> None:
    server = await serve(HANDLERS, options=options_for(certificates, tls_client_ca=certificates.ca))
    await assert_refused(connect(server, ClientTLS(ca=certificates.ca)))
    foreign = ClientTLS(certificates.ca, other_certificates.client, other_certificates.client_key)
    await assert_refused(connect(server, foreign))


async def test_changed_files_count_from_the_next_connection_on(
    serve: Start, connect: Start, certificates: Certificates, other_certificates: Certificates, tmp_path: Path
) -> None:
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    shutil.copy(certificates.server, certificate)
    shutil.copy(certificates.server_key, key)
    server = await serve(HANDLERS, options=ServerOptions(tls_cert=certificate, tls_key=key))
    before = connect(server, ClientTLS(ca=certificates.ca))
    assert await ask(before) == b"nobody"
    shutil.copy(other_certificates.server, certificate)
    shutil.copy(other_certificates.server_key, key)
    assert await ask(connect(server, ClientTLS(ca=other_certificates.ca))) == b"nobody"
    await assert_refused(connect(server, ClientTLS(ca=certificates.ca)))
    # An open connection is not affected.
    assert await ask(before) == b"nobody"


async def test_a_client_goes_on_with_rotated_files(
    serve: Start, certificates: Certificates, other_certificates: Certificates, tmp_path: Path
) -> None:
    """CA, certificate and key of both ends are replaced, and one channel reconnects after that."""

    def put(files: Certificates) -> None:
        for source, name in (
            (files.ca, "ca.pem"),
            (files.server, "server.pem"),
            (files.server_key, "server.key"),
            (files.client, "client.pem"),
            (files.client_key, "client.key"),
        ):
            shutil.copy(source, tmp_path / name)

    put(certificates)
    ca, names = tmp_path / "ca.pem", ("server.pem", "server.key", "client.pem", "client.key")
    cert, key, client, client_key = (tmp_path / name for name in names)
    options = ServerOptions(tls_cert=cert, tls_key=key, tls_client_ca=ca)
    server = await serve(HANDLERS, options=options)
    port = int(server.address.rpartition(":")[2])
    async with open_channel(f"localhost:{port}", ClientTLS(ca, client, client_key)) as channel:
        assert await ask(channel) == b"first client"
        put(other_certificates)
        assert await ask(channel) == b"first client", "a connection that stands is not touched"
        await server.stop()
        await serve(HANDLERS, options=dataclasses.replace(options, port=port))
        await until(lambda: channel.get_state() is not grpc.ChannelConnectivity.READY, "the loss")
        assert await ask(channel) == b"second client"


async def test_half_written_files_leave_the_old_ones_in_force(
    serve: Start, connect: Start, certificates: Certificates, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    shutil.copy(certificates.server, certificate)
    shutil.copy(certificates.server_key, key)
    server = await serve(HANDLERS, options=ServerOptions(tls_cert=certificate, tls_key=key))
    certificate.write_text("-----BEGIN CERTIF")
    assert await ask(connect(server, ClientTLS(ca=certificates.ca))) == b"nobody"
    assert await ask(connect(server, ClientTLS(ca=certificates.ca))) == b"nobody"
    [record] = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert str(certificate) in record.getMessage()


def files_that_do_not_work(certificates: Certificates, folder: Path) -> dict[str, tuple[dict[str, Any], str]]:
    """Return options that must be refused, each with a text of its refusal."""
    junk, encrypted = folder / "junk", folder / "encrypted.key"
    junk.write_text("hello")
    subprocess.run(
        [
            "openssl",
            "pkey",
            "-in",
            certificates.server_key,
            "-aes256",
            "-passout",
            "pass:secret",
            "-out",
            encrypted,
        ],
        check=True,
    )
    cert, key, absent = certificates.server, certificates.server_key, folder / "absent.pem"
    return {
        "no certificate file": ({"tls_cert": absent, "tls_key": key}, f"--tls-cert {absent}: No such file"),
        "no key file": ({"tls_cert": cert, "tls_key": absent}, f"--tls-key {absent}: No such file"),
        "a folder": ({"tls_cert": folder, "tls_key": key}, f"--tls-cert {folder}: Is a directory"),
        "no certificate in it": ({"tls_cert": junk, "tls_key": key}, f"--tls-cert {junk} holds no PEM cert"),
        "a key for a certificate": ({"tls_cert": key, "tls_key": key}, f"--tls-cert {key} holds no PEM cert"),
        "no key in it": ({"tls_cert": cert, "tls_key": junk}, f"--tls-key {junk} holds no PEM private key"),
        "foreign key": (
            {"tls_cert": cert, "tls_key": certificates.client_key},
            f"--tls-key {certificates.client_key} is not the private key of --tls-cert {cert}",
        ),
        "encrypted key": ({"tls_cert": cert, "tls_key": encrypted}, f"--tls-key {encrypted} is encrypted"),
        "no authority file": (
            {"tls_cert": cert, "tls_key": key, "tls_client_ca": absent},
            f"--tls-client-ca {absent}: No such file",
        ),
        "no authority in it": (
            {"tls_cert": cert, "tls_key": key, "tls_client_ca": junk},
            f"--tls-client-ca {junk} holds no PEM certificate",
        ),
        "certificate alone": ({"tls_cert": cert}, "--tls-cert needs --tls-key"),
        "key alone": ({"tls_key": key}, "--tls-key needs --tls-cert"),
        "authority alone": ({"tls_client_ca": cert}, "needs --tls-cert and --tls-key"),
        "contradiction": ({"tls_cert": cert, "tls_key": key, "insecure": True}, "contradict each other"),
    }


async def test_files_that_do_not_work_are_named_in_one_line(
    certificates: Certificates, tmp_path: Path
) -> None:
    for what, (fields, complaint) in files_that_do_not_work(certificates, tmp_path).items():
        with pytest.raises(ServiceStartError) as caught:
            await Server(ServerOptions(**fields), services=[]).start()
        assert complaint in str(caught.value), what
        assert "\n" not in str(caught.value), what


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
async def test_a_file_without_read_permission_is_named(certificates: Certificates, tmp_path: Path) -> None:
    secret = tmp_path / "secret.key"
    shutil.copy(certificates.server_key, secret)
    secret.chmod(0)
    with pytest.raises(ServiceStartError, match="Permission denied"):
        await Server(ServerOptions(tls_cert=certificates.server, tls_key=secret), services=[]).start()


async def test_a_clients_files_are_checked_too(certificates: Certificates, tmp_path: Path) -> None:
    absent = tmp_path / "absent.pem"
    with pytest.raises(TLSFileError, match=f"--tls-ca {absent}: No such file"):
        open_channel("localhost:1", ClientTLS(ca=absent))
    with pytest.raises(TLSFileError, match="--tls-cert needs --tls-key"):
        open_channel("localhost:1", ClientTLS(ca=certificates.ca, certificate=certificates.client))
    with pytest.raises(TLSFileError, match="is not the private key"):
        open_channel("localhost:1", ClientTLS(certificates.ca, certificates.client, certificates.server_key))


async def test_files_are_called_as_they_were_given(certificates: Certificates, tmp_path: Path) -> None:
    """A user who did not give them by our flags does not know these flags."""
    junk = tmp_path / "junk"
    junk.write_text("hello")
    cert, key = certificates.client, certificates.client_key
    for tls, told in (
        (
            ClientTLS(None, cert, certificates.server_key),
            f"K {certificates.server_key} is not the private key of C {cert}",
        ),
        (ClientTLS(None, junk, key), f"C {junk} holds no PEM certificate"),
        (ClientTLS(None, cert, junk), f"K {junk} holds no PEM private key"),
        (ClientTLS(None, cert), "C needs K"),
        (ClientTLS(junk, cert, key), f"A {junk} holds no PEM certificate"),
    ):
        with pytest.raises(TLSFileError) as caught:
            open_channel("localhost:1", dataclasses.replace(tls, names=FileNames("C", "K", "A")))
        assert str(caught.value).startswith(told)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "somewhere.example"])  # noqa: S104
async def test_plaintext_is_refused_where_others_can_reach_it(host: str) -> None:
    with pytest.raises(ServiceStartError) as caught:
        await Server(ServerOptions(host=host, port=29400), services=[]).start()
    assert "refusing to serve plaintext" in str(caught.value)
    assert "--tls-cert" in str(caught.value)
    assert "--insecure" in str(caught.value)


async def test_plaintext_is_served_there_when_asked_for(serve: Start, connect: Start) -> None:
    server = await serve(HANDLERS, options=ServerOptions(host="0.0.0.0", insecure=True))  # noqa: S104
    channel = open_channel(server.address.replace("0.0.0.0", "127.0.0.1"), Plaintext())  # noqa: S104
    assert await ask(channel) == b"nobody"
    await channel.close()


def test_the_transport_has_a_name(certificates: Certificates) -> None:
    here, socket = parse_endpoint("127.0.0.1:1"), parse_endpoint("unix:/run/s")
    assert transport(ServerOptions(), here) == "secret of this user"
    assert transport(ServerOptions(run_secret=RunSecret("x" * 16)), here) == "run secret"
    assert transport(ServerOptions(insecure=True), here) == "plaintext"
    assert transport(ServerOptions(), socket) == "Unix socket"
    assert transport(options_for(certificates), here) == "TLS"
    assert transport(options_for(certificates, tls_client_ca=certificates.ca), here) == "mutual TLS"
