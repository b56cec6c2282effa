"""A server describes itself: the same to clients as in its log, with the limits that it enforces, without secrets."""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict

from house.source import ROOT
from rallypoint.rpc.durations import to_seconds
from rallypoint.rpc.endpoint import AccessFiles, ServerOptions
from rallypoint.server.v1 import server_service_pb2 as pb
from rallypoint.serving.info import PROTOCOL_VERSION, SERVICE_NAME, VERSION, Capability, limits_of
from rallypoint.serving.server import Registration, Server
from serving.conftest import SERVICE, tiny
from support.log_events import log_events
from support.refusals import refusal
from support.server_info import info_at, server_info

Start = Callable[..., Awaitable[Server]]
Connect = Callable[..., grpc.aio.Channel]
PROTO = ROOT / "protos/rallypoint/server/v1/server_service.proto"


async def echo(request: bytes, _context: Any) -> bytes:
    return request


ECHO: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}


@pytest.fixture
async def describe() -> AsyncIterator[Callable[..., Awaitable[pb.GetServerInfoResponse]]]:
    """Start a server with these options and services; return its description."""
    servers: list[Server] = []

    async def start(options: ServerOptions, *services: Registration, **more: Any) -> pb.GetServerInfoResponse:
        server = Server(options, services=[*services, tiny(ECHO)], **more)
        await server.start()
        servers.append(server)
        return await info_at(server.address)

    yield start
    for server in servers:
        await server.stop()


Describe = Callable[..., Awaitable[pb.GetServerInfoResponse]]


async def test_a_server_has_its_version_and_the_name_of_its_process(describe: Describe) -> None:
    """The version is that of the installed package; the process is this one, started a moment ago."""
    began = time.time()
    info = await describe(ServerOptions())
    assert info.version == VERSION == version("rallypoint")
    assert info.protocol_version == PROTOCOL_VERSION == 1
    assert [*info.services] == [SERVICE, SERVICE_NAME]
    assert (info.host_name, info.pid) == (socket.gethostname(), os.getpid())
    assert info.transport == "secret of this user"
    assert began - 1 <= to_seconds(info.started) <= time.time() + 1


async def test_a_process_has_one_name_and_a_replica_one_of_its_own(describe: Describe) -> None:
    first, second = await describe(ServerOptions()), await describe(ServerOptions())
    replica = await describe(ServerOptions(), instance="a replica")
    assert first.instance == second.instance
    assert re.fullmatch("[0-9a-f]{16}", first.instance)
    assert replica.instance == "a replica"


async def test_the_ready_line_has_the_same_values(
    serve: Start, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = await serve(ECHO, options=ServerOptions(health=False))
    info = await server_info(connect(server))
    [ready] = [event.fields for event in log_events(caplog.records) if event.name == "ready"]
    assert ready == {
        "services": [*info.services],
        "address": server.address,
        "transport": info.transport,
        "version": info.version,
        "protocol_version": info.protocol_version,
        "instance": info.instance,
        "capabilities": [*info.capabilities],
        "limits": MessageToDict(info.limits, preserving_proto_field_name=True),
    }
    assert ready["capabilities"] == ["reflection"]


async def test_the_limits_are_those_of_the_options_and_of_each_service(describe: Describe) -> None:
    """The limits that gRPC enforces are included; a service that is not there has no limits."""
    options = ServerOptions(request_rate=7.5, request_burst=9, request_byte_rate=11, max_watches_per_client=3)
    limits = pb.ServerLimits(timer=pb.TimerLimits(timers=5))
    other = Registration("tiny.v1.Other", lambda server: None, limits=limits)
    info = await describe(options, other)
    calls = info.limits.calls
    assert (calls.request_rate, calls.request_burst, calls.watches_per_client) == (7.5, 9, 3)
    assert (calls.message_bytes, calls.request_byte_rate) == (4 * 1024 * 1024, 11)
    seconds = [calls.first_message_timeout, calls.write_timeout, calls.ping_interval]
    assert [*map(to_seconds, seconds)] == [10.0, 10.0, 5.0]
    assert info.limits.timer == limits.timer
    assert not info.limits.HasField("rendezvous")


async def test_the_rate_in_the_description_is_enforced(serve: Start, connect: Connect) -> None:
    """GetServerInfo counts as a call, like any other."""
    channel = connect(await serve(ECHO, options=ServerOptions(request_rate=1e-3, request_burst=4)))
    burst = (await server_info(channel)).limits.calls.request_burst
    for _ in range(burst - 1):
        await server_info(channel)
    assert (await refusal(server_info(channel))).reason == "TOO_MANY_REQUESTS"


def test_a_field_of_limits_has_a_value_or_is_an_error() -> None:
    """A renamed option does not become a limit of 0, and a value without a field is not lost."""
    options = ServerOptions()
    with pytest.raises(AttributeError):
        limits_of(pb.CallLimits, options)
    with pytest.raises(ValueError, match="pings"):
        limits_of(pb.SupervisorLimits, options, jobs=1, ended_jobs=1, streams=1, pings=1)


async def test_capabilities_of_options_and_services_are_sorted(describe: Describe) -> None:
    replicas = Registration("tiny.v1.Other", lambda server: None, capabilities=[Capability.REPLICAS])
    assert [*(await describe(ServerOptions(), replicas)).capabilities] == ["health", "reflection", "replicas"]
    assert [*(await describe(ServerOptions(health=False, reflection=False))).capabilities] == []


async def test_a_description_has_no_path(describe: Describe, tmp_path: Path) -> None:
    """The path of the socket that the client knows is left out as well."""
    access = AccessFiles(audit_log=tmp_path / "audit")
    info = await describe(ServerOptions(host=f"unix:{tmp_path}/s", access=access))
    assert info.transport == "Unix socket"
    assert str(tmp_path) not in str(info)


def test_each_capability_is_in_the_contract() -> None:
    """They are in the comment of the field, sorted, and no others."""
    comment = PROTO.read_text().partition("repeated string capabilities")[0].rpartition("// Capabilities")[2]
    assert re.findall(r"^  //   ([a-z-]+) +\S", comment, re.MULTILINE) == [*Capability] == sorted(Capability)
