"""An agent that was stopped, alone or with its host, kills no worker for time that it did not watch."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rallypoint.rpc.durations import to_duration, to_seconds
from rallypoint.timer.client.client import ClientSettings, ExpiredTimer, NodeTimers
from rallypoint.timer.v1 import timer_service_pb2 as pb
from support.clock import Clock
from support.waiting import until

from .conftest import Service
from .scripted import Scripted, listen, serving

pytestmark = pytest.mark.integration

AGENT = """
import asyncio, os, signal, sys
from rallypoint.agent.sockets.timers import TimerSocket
from rallypoint.rpc.channel import open_channel
from rallypoint.timer.client.client import NodeTimers

class Workers:
    worker_of, rank_of = staticmethod(str), staticmethod(lambda worker: 0)

    async def reap(self, hang):
        os.kill(hang.pid, signal.SIGKILL)
        print("reaped", hang.scope, flush=True)

async def main(address, path):
    async with open_channel(address) as channel:
        timers = NodeTimers(channel, run_id="run", node_id="a")
        socket = TimerSocket(path, timers, Workers())
        await socket.start()
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        await socket.stop()

asyncio.run(main(*sys.argv[1:]))
"""

WORKER = """
import socket, sys, time
from rallypoint.timer.worker import wire
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
connection.send(wire.acquire(1, time.monotonic_ns(), 5.0, sys.argv[2].encode()))
print("ready", flush=True)
sys.stdin.readline()
connection.send(wire.release(1))
print("released", flush=True)
sys.stdin.readline()
"""


async def start(*arguments: str) -> asyncio.subprocess.Process:
    """Start a Python process; return when it prints `ready`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"},
    )
    assert await line_of(process) == "ready"
    return process


async def line_of(process: asyncio.subprocess.Process) -> str:
    """Return its next line of output."""
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill the process in any state."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)
        process.kill()
    await process.communicate()


@pytest.mark.slow
async def test_a_host_that_was_paused_costs_no_worker_that_runs(service: Service, tmp_path: Path) -> None:
    """Agent and workers are stopped for longer than their timers, and the service is not: one worker goes on, releases
    right after, and lives. The other hangs, and is killed in the end."""
    path = str(tmp_path / "s")
    agent = await start(AGENT, service.address, path)
    good, bad = [await start(WORKER, path, scope) for scope in ("good", "bad")]
    timers = service.watchdog.table.timers
    try:
        await until(lambda: len(service.watchdog.table) == 2)
        for process in (agent, good, bad):
            process.send_signal(signal.SIGSTOP)
        await until(lambda: all(view.offers for view in timers(service.watchdog.now())))
        for process in (agent, good, bad):
            process.send_signal(signal.SIGCONT)
        # The agent has received both expiries, and does not act on them.
        await until(lambda: not any(view.offers for view in timers(service.watchdog.now())))
        assert good.stdin is not None
        good.stdin.write(b"\n")
        assert await line_of(good) == "released"
        assert await line_of(agent) == "reaped bad"
        assert await bad.wait() == -signal.SIGKILL
        await until(lambda: len(service.watchdog.table) == 0)
        assert good.returncode is None
    finally:
        for process in (agent, good, bad):
            await end(process)


@pytest.mark.parametrize("hangs", [False, True])
async def test_an_expiry_in_a_pause_is_acknowledged_and_the_timer_sent_again(
    tmp_path: Path, clock: Clock, hangs: bool
) -> None:
    """It is acknowledged, and the timer is sent again under another number, with the time that was watched."""

    def expired(acquire: pb.Acquire, expiry_id: int) -> pb.SuperviseEvent:
        told = pb.Expired(
            expiry_id=expiry_id,
            worker_id="0@1",
            scope="s",
            after=to_duration(60.0),
            sequence=acquire.sequence,
        )
        return pb.SuperviseEvent(expired=told)

    async def stream(script: Scripted, requests: Any, context: Any) -> AsyncIterator[pb.SuperviseEvent]:
        await listen(script, requests, 3)
        yield pb.SuperviseEvent(subscribed=pb.Subscribed())
        clock.now += 600.0
        yield expired(script.seen[0][1].acquire, 7)
        await listen(script, requests, 5)
        if hangs:
            # Time in which the pulse is on time is no pause.
            for _ in range(200):
                clock.now += 0.25
                client._watch.now()
                client._watch.stop()
                client._watch.start()
            yield expired(script.seen[0][4].acquire, 8)
            await listen(script, requests, 7)

    reaped: list[ExpiredTimer] = []

    async def reap(hang: ExpiredTimer) -> None:
        reaped.append(hang)

    script = Scripted(stream)
    async with serving(script, tmp_path) as channel:
        settings = ClientSettings(linger=0.001)
        client = NodeTimers(channel, run_id="run", node_id="a", settings=settings, clock=clock)
        client.start(reap)
        client.acquire("0@1", "s", 60.0, clock.now - 20)
        await until(lambda: len(script.seen) == 1 and len(script.seen[0]) == (7 if hangs else 5))
        _, first, _, acknowledged, second, *rest = script.seen[0]
        assert acknowledged.acknowledge.expiry_id == 7
        assert second.acquire.sequence > first.acquire.sequence
        assert 19.0 <= to_seconds(second.acquire.elapsed) <= 21.0
        assert len(reaped) == hangs
        assert [action.WhichOneof("action") for action in rest] == (
            ["acknowledge", "release"] if hangs else []
        )
        await client.close(grace=0)
