"""A client that waits on a stream detects in time that the server is paused with its connections open."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from cli.cli_process import RALLYPOINT, clean_environment
from rallypoint.rpc.channel import open_channel
from support.mortal import mortal
from support.refusals import refusal

# Our keep-alive must be shorter than gRPC's own timeout of 60 s, which begins after the 10 s until the ping.
TOO_LATE = 50.0


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of a service, and its address."""
    command = mortal(str(RALLYPOINT), "serve", "timer", "--port", "0", "--log-format", "json")
    environment = clean_environment(RALLYPOINT_LEARNED="none")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("{") and (record := json.loads(line))["event"] == "ready":
                yield process, record["address"]
                break
        process.kill()


@pytest.mark.slow
@pytest.mark.integration
async def test_a_stream_to_a_paused_server_ends(server: tuple[subprocess.Popen[str], str]) -> None:
    """The ping comes after 10 s and waits 5 s for its reply; later, the node would lose its lease at the next owner."""
    process, address = server
    async with open_channel(address) as channel:
        stream = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await stream.read()
        process.send_signal(signal.SIGSTOP)
        assert (await refusal(asyncio.wait_for(stream.read(), TOO_LATE))).code is grpc.StatusCode.UNAVAILABLE
