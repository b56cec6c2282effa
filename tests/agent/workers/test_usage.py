"""The usage of a worker is that of its whole process tree, in all its sessions; the worker has no part in it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.agent.spawner.spawner import SPAWN_MARK, ProcessStat
from rallypoint.agent.workers.usage import UsageMeter, _owner, trees_of
from support.mortal import mortal
from support.waiting import until, wait_until

MEBIBYTE = 1024 * 1024

# A worker with memory, a thread, and a child in a session of its own, which creates a file and waits.
WORKER = """
import os, subprocess, sys, threading, time
memory = bytearray(64 * 1024 * 1024)
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
subprocess.Popen(["sh", "-c", ": > $0; exec sleep 600", sys.argv[1]], start_new_session=True)
time.sleep(600)
"""
# A worker that uses several ticks of the kernel's processor clock before it creates a file, on any machine.
BUSY = """
import pathlib, sys, time
while time.process_time() < 0.1: pass
pathlib.Path(sys.argv[1]).touch()
while True: pass
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that is a child of this process, in place of a spawner."""
    sign = tmp_path / "started"
    command = mortal(sys.executable, "-c", WORKER, str(sign))
    environment = {**os.environ, SPAWN_MARK: "7.1"}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        wait_until(sign.exists, "the child")
        yield process
    finally:
        for pid in trees_of(os.getpid(), frozenset({process.pid})).get(process.pid, [])[::-1]:
            os.kill(pid, 9)
        process.wait()


async def test_a_tree_counts_as_one(started: subprocess.Popen[bytes]) -> None:
    """The sums of memory, threads and processes of the worker and its descendants."""
    usage = (await UsageMeter().measure(os.getpid(), [started.pid]))[started.pid]
    assert (usage.processes, usage.threads) == (2, 3)
    assert 64 * MEBIBYTE < usage.memory_bytes < 256 * MEBIBYTE
    assert 0 < usage.processor_seconds < 60


def test_an_orphan_is_found_by_its_mark(tmp_path: Path) -> None:
    """A daemon that a worker left behind belongs to it, in any session; one with another mark does not."""
    worker = subprocess.Popen(mortal("sleep", "600"), env={**os.environ, SPAWN_MARK: "7.1"})
    orphan = subprocess.Popen(
        mortal("sleep", "600"), env={**os.environ, SPAWN_MARK: "7.1"}, start_new_session=True
    )
    stranger = subprocess.Popen(
        mortal("sleep", "600"), env={**os.environ, SPAWN_MARK: "7.2"}, start_new_session=True
    )
    try:
        wait_until(
            lambda: trees_of(os.getpid(), frozenset({worker.pid})) == {worker.pid: [worker.pid, orphan.pid]},
            "both, and nobody else",
        )
    finally:
        for process in (worker, orphan, stranger):
            process.kill()
            process.wait()


def test_an_orphan_is_found_by_its_session() -> None:
    """Changes to its environment do not matter."""
    orphan = ProcessStat(pid=2**22 + 3, state="S", parent=2**22 + 1, group=2**22 + 3, session=2**22 + 2)
    assert _owner(orphan, 2**22 + 1, frozenset({2**22 + 2}), {}) == 2**22 + 2
    assert _owner(orphan, 2**22 + 1, frozenset({2**22 + 9}), {}) is None


async def test_the_load_is_measured_between_two_samples(tmp_path: Path) -> None:
    """The load is that between two samples, not of the whole life; a sample soon after another uses an older one."""
    now = [time.monotonic()]
    meter = UsageMeter(lambda: now[0])
    process = _start(sys.executable, "-c", BUSY, str(tmp_path / "started"))
    try:
        await until((tmp_path / "started").exists, "the worker")
        first = (await meter.measure(os.getpid(), [process.pid]))[process.pid]
        assert first.processors > 0
        spent = first.processor_seconds
        later = first
        # Measured in processor time, so a slow machine does not matter.
        while later.processor_seconds < spent + 0.5:
            later = (await meter.measure(os.getpid(), [process.pid]))[process.pid]
        now[0] += 10.0
        usage = (await meter.measure(os.getpid(), [process.pid]))[process.pid]
        assert usage.processors == pytest.approx((usage.processor_seconds - spent) / 10.0)
        process.send_signal(19)  # stopped
        await until(lambda: _state(process.pid) == "T", "its stop")
        now[0] += 10.0
        idle = (await meter.measure(os.getpid(), [process.pid]))[process.pid]
        now[0] += 10.0
        idle = (await meter.measure(os.getpid(), [process.pid]))[process.pid]
        assert idle.processors == 0.0
        now[0] += 0.1
        again = (await meter.measure(os.getpid(), [process.pid]))[process.pid]
        assert again.processors == 0.0
    finally:
        process.kill()
        process.wait()


def _start(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(mortal(*command))


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_an_ended_process_is_left_out() -> None:
    """It ended between the request and the sample."""
    process = _start("true")
    process.wait()
    assert await UsageMeter().measure(os.getpid(), [process.pid]) == {}
