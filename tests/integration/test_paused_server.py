"""A server that stands still with its connections open is noticed by whoever waits on a stream to it, in time."""

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

# gRPC's own patience, which our keep-alive is to be shorter than: 60 s beside the 10 s until it asks.
TOO_LATE = 50.0


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A service in a process of its own, and its address."""
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
    """It takes 10 s to ask and 5 s for an answer; a node that hears later has lost its lease with the next owner."""
    process, address = server
    async with open_channel(address) as channel:
        stream = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await stream.read()
        process.send_signal(signal.SIGSTOP)
        assert (await refusal(asyncio.wait_for(stream.read(), TOO_LATE))).code is grpc.StatusCode.UNAVAILABLE
