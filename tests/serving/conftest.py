"""A tiny generic service, real servers and channels that end with their test, and real certificates."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ClientTLS, ServerOptions
from rallypoint.rpc.errors import ServiceError
from rallypoint.serving.server import Registration, Server

SERVICE = "tiny.v1.TinyService"

Handlers = Mapping[str, Any]


def tiny(handlers: Handlers, on_drain: Callable[[], Awaitable[None]] | None = None) -> Registration:
    """Return the registration of a service whose messages are bytes."""
    generic = grpc.method_handlers_generic_handler(SERVICE, dict(handlers))
    return Registration(SERVICE, lambda server: server.add_generic_rpc_handlers((generic,)), on_drain)


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[Server]]]:
    """Start servers of the tiny service; they end with the test."""
    servers: list[Server] = []

    async def start(
        handlers: Handlers,
        *,
        options: ServerOptions | None = None,
        on_drain: Callable[[], Awaitable[None]] | None = None,
        translate: Callable[[Exception], ServiceError | None] = lambda error: None,
    ) -> Server:
        server = Server(options or ServerOptions(), services=[tiny(handlers, on_drain)], translate=translate)
        await server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        await server.stop()


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., grpc.aio.Channel]]:
    """Open channels to a server; they are closed with the test."""
    channels: list[grpc.aio.Channel] = []

    def open_one(server: Server, tls: ClientTLS | None = None) -> grpc.aio.Channel:
        channels.append(open_channel(server.address, tls))
        return channels[-1]

    yield open_one
    for channel in channels:
        await channel.close()


@dataclass(frozen=True)
class Certificates:
    """A CA and its certificates: for a server at 127.0.0.1 and localhost, and for a client."""

    ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def make_certificates(folder: Path, name: str) -> Certificates:
    """Create a CA of that name and its certificates, valid for a day."""
    folder.mkdir(parents=True, exist_ok=True)
    ca, _ = _certificate(folder / "ca", f"{name} ca")
    places = ("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost")
    server = _certificate(folder / "server", f"{name} server", *_signed_by(ca), *places)
    return Certificates(ca, *server, *_certificate(folder / "client", f"{name} client", *_signed_by(ca)))


def client_certificate(certificates: Certificates, name: str) -> ClientTLS:
    """Create the files of a client whose certificate has this subject alternative name, such as `DNS:worker`."""
    ca = certificates.ca
    stem = ca.with_name(re.sub(r"\W", "-", name))
    return ClientTLS(ca, *_certificate(stem, "client", *_signed_by(ca), "-addext", f"subjectAltName={name}"))


def _signed_by(ca: Path) -> tuple[str, ...]:
    return ("-CA", str(ca), "-CAkey", str(ca.with_suffix(".key")), "-addext", "basicConstraints=CA:FALSE")


def _certificate(stem: Path, common_name: str, *extra: str) -> tuple[Path, Path]:
    certificate, key = stem.with_suffix(".pem"), stem.with_suffix(".key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-days", "1", "-subj", f"/CN={common_name}"]
    files = ("-out", str(certificate), "-keyout", str(key))
    subprocess.run([*command, *files, *extra], check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Certificates of one CA."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command (apt install openssl)")
    return make_certificates(tmp_path_factory.mktemp("tls"), "first")


@pytest.fixture
def other_certificates(certificates: Certificates, tmp_path: Path) -> Certificates:
    """Certificates of a CA that the first one's clients do not know."""
    return make_certificates(tmp_path / "other", "second")


@pytest.fixture
def logging_restored() -> Iterator[None]:
    """Let a test configure logging, and restore it."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], level = before
    root.setLevel(level)
    logging.captureWarnings(False)
    for name in ("asyncio", "grpc"):
        logging.getLogger(name).setLevel(logging.NOTSET)
