"""A program under `loop.run` and `serve_until_signal` ends as it should at Ctrl-C, SIGTERM, and a second signal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from rallypoint.rpc import loop
from rallypoint.rpc.channel import open_channel
from support.waiting import PATIENCE

pytestmark = pytest.mark.integration

SERVER = """
import asyncio, sys
import rallypoint.serving, grpc
from rallypoint.rpc import loop
from rallypoint.rpc.logs import configure_logs, get_logger
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.serving.server import Registration, Server

async def wait(request, context):
    yield b"in"
    await asyncio.Event().wait()

async def on_drain():
    get_logger("test").info("told")

def add(server):
    handlers = {"Wait": grpc.unary_stream_rpc_method_handler(wait)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tiny.v1.T", handlers),))

async def main():
    registration = Registration("tiny.v1.T", add, on_drain)
    await Server(ServerOptions(drain_grace=50), services=[registration]).serve_until_signal()
    get_logger("test").info("ended", loop=type(asyncio.get_running_loop()).__module__)

configure_logs(stream=sys.stdout)
loop.run(main())
"""

FIRST_THINGS_FIRST = """
import asyncio, sys
from rallypoint.rpc import loop
from rallypoint.rpc.logs import configure_logs, get_logger
from rallypoint.serving.server import Server
from rallypoint.rpc.endpoint import ServerOptions

async def first():
    get_logger("test").info("first")
    if "slow" in sys.argv:
        await asyncio.Event().wait()

async def main():
    await Server(ServerOptions(drain_grace=50), services=[]).serve_until_signal(before_drain=first)
    get_logger("test").info("ended")

configure_logs(stream=sys.stdout)
loop.run(main())
"""

PLAIN = """
import asyncio
from rallypoint.rpc import loop

async def main():
    print("ready", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("cleaned up", flush=True)

loop.run(main())
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a program that ends with the test at the latest."""
    programs: list[subprocess.Popen[str]] = []

    def begin(source: str, *arguments: str) -> subprocess.Popen[str]:
        programs.append(
            subprocess.Popen(
                [sys.executable, "-c", source, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        )
        return programs[-1]

    yield begin
    for program in programs:
        program.kill()
        program.communicate()


def event_of(program: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the next record of a program's log."""
    assert program.stdout is not None
    return dict(json.loads(program.stdout.readline()))


def ended(program: subprocess.Popen[str]) -> tuple[str, str]:
    """Return the rest of a program's output until its end, on stdout and stderr.

    `communicate` would lose the text that `readline` has buffered and not returned.
    """
    assert program.stdout is not None
    assert program.stderr is not None
    rest = program.stdout.read(), program.stderr.read()
    program.wait(PATIENCE)
    return rest


def test_main_returns_its_result() -> None:
    async def main() -> int:
        return 7

    assert loop.run(main()) == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_a_server_as_soon_as_it_looks_ready(start: Start, number: signal.Signals) -> None:
    program = start(SERVER)
    assert event_of(program)["event"] == "ready"
    program.send_signal(number)
    out, err = ended(program)
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["event"] for line in lines] == ["signal received", "draining", "told", "stopped", "ended"]
    assert lines[-1]["loop"] == "uvloop"
    assert (program.returncode, err) == (0, "")


async def test_a_second_signal_ends_a_drain_that_waits(start: Start) -> None:
    program = start(SERVER)
    channel = open_channel(event_of(program)["address"])
    wait: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/tiny.v1.T/Wait")
    stream = wait(b"", timeout=PATIENCE)
    assert await stream.read() == b"in"
    program.send_signal(signal.SIGTERM)
    assert [event_of(program)["event"] for _ in range(3)] == ["signal received", "draining", "told"]
    program.send_signal(signal.SIGTERM)
    assert event_of(program)["event"].startswith("second signal")
    assert await asyncio.to_thread(program.wait, 30) == 0
    with pytest.raises(grpc.aio.AioRpcError):
        await stream.read()
    await channel.close()


def test_ctrl_c_lets_main_clean_up_and_shows_no_traceback(start: Start) -> None:
    program = start(PLAIN)
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    program.send_signal(signal.SIGINT)
    out, err = ended(program)
    assert (program.returncode, out.strip(), err) == (130, "cleaned up", "")


@pytest.mark.parametrize("slow", [False, True])
def test_actions_before_the_drain_finish_first_or_are_cut_short(start: Start, slow: bool) -> None:
    """Meanwhile the server still answers; a second signal ends that wait."""
    program = start(FIRST_THINGS_FIRST, *["slow"] * slow)
    assert event_of(program)["event"] == "ready"
    program.send_signal(signal.SIGTERM)
    assert [event_of(program)["event"] for _ in range(2)] == ["signal received", "first"]
    if slow:
        program.send_signal(signal.SIGTERM)
    rest = [json.loads(line)["event"] for line in ended(program)[0].splitlines()]
    assert rest == (
        ["second signal: stopping at once", "ended"] if slow else ["draining", "stopped", "ended"]
    )
    assert program.returncode == 0
