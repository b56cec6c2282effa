"""A worker forks inside of its blocks, as data loaders do: nothing crashes, and its agent sees what is held."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from rallypoint.agent.hangs.hung_worker import HungWorker
from rallypoint.agent.sockets.timers import TimerSocket
from support.host_workers import HostWorkers
from support.marks import slow
from support.remembered_timers import RememberedTimers
from support.waiting import until

pytestmark = pytest.mark.integration

PRELUDE = """
import multiprocessing, os, sys, threading
from rallypoint.timer import expires

def ask(text):
    print(text, flush=True)
    sys.stdin.readline()

def reap(*children):
    for child in children:
        _, status = os.waitpid(child, 0)
        assert status == 0, f"a child ended with {status:#x}"
"""

FORKS = """
stop = threading.Event()
def churn():
    while not stop.is_set():
        with expires(60, "churn"), expires(60, "churn"):
            pass
churning = [threading.Thread(target=churn) for _ in range(2)]
for thread in churning:
    thread.start()

def load(number):
    for _ in range(20):
        with expires(60, "load"):
            pass
        with expires("auto", "learned"):
            pass

ready, tell_ready = os.pipe()
go, tell_go = os.pipe()
outliving, child = [], None
with expires(60, "outer"):
    for number in range(FORKS):
        child = os.fork()
        if child == 0:
            break
        if number % 3 == 2:
            outliving.append(child)
        else:
            reap(child)
    else:
        loaders = [multiprocessing.get_context("fork").Process(target=load, args=(n,)) for n in range(FORKS // 9)]
        for loader in loaders:
            loader.start()
        for loader in loaders:
            loader.join()
            assert loader.exitcode == 0, loader.exitcode
    if child == 0 and number % 3 == 0:
        os._exit(0)
    if child == 0 and number % 3 == 1:
        with expires(60, "own"):
            grandchild = os.fork()
            if grandchild == 0:
                with expires(60, "grandchild"):
                    os._exit(0)
            reap(grandchild)
    if child:
        stop.set()
        for thread in churning:
            thread.join()
        for _ in outliving:
            os.read(ready, 1)
        ask("forked")
if child == 0:
    if number % 3 == 2:
        os.close(tell_go)
        with expires(60, f"outliving {number}"):
            os.write(tell_ready, b".")
            os.read(go, 1)
    os._exit(0)
ask("left")
os.close(tell_go)
reap(*outliving)
ask("reaped")
"""


class Host(HostWorkers):
    """An agent's socket, and one worker, which may have children."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.timers = RememberedTimers()
        self.worker: asyncio.subprocess.Process
        self.socket = TimerSocket(path, self.timers, self)

    async def reap(self, hang: HungWorker) -> bool | None:
        raise AssertionError(f"{hang} has not expired")

    async def run(self, script: str) -> None:
        self.worker = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            PRELUDE + script,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "RALLYPOINT_TIMER_SOCKET": str(self.path)},
            start_new_session=True,
        )
        self.pids[self.worker.pid] = "0@1"
        self.socket.introduce()

    async def asked(self, text: str) -> None:
        assert self.worker.stdout is not None
        assert (await self.worker.stdout.readline()).decode() == f"{text}\n"

    def answer(self) -> None:
        assert self.worker.stdin is not None
        self.worker.stdin.write(b"\n")

    async def done(self) -> None:
        assert self.worker.stdin is not None
        self.worker.stdin.close()
        assert await self.worker.wait() == 0

    async def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.worker.pid, 9)
        await self.worker.communicate()
        await self.socket.stop()


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    host = Host(tmp_path / "s")
    await host.socket.start()
    yield host
    await host.close()


@pytest.mark.parametrize("forks", [36, slow(180)])
async def test_many_forks_inside_a_block(host: Host, forks: int) -> None:
    """Children that exit in the middle, that leave the block that they never entered, that have blocks and
    children of their own, that outlive the block, and loaders of multiprocessing; threads go on meanwhile."""
    timers = host.timers
    await host.run(f"FORKS = {forks}\n{FORKS}")
    await host.asked("forked")
    outliving = sorted(f"outliving {number}" for number in range(2, forks, 3))
    await until(lambda: timers.scopes() == ["outer", *outliving])
    host.answer()
    await host.asked("left")
    await until(lambda: timers.scopes() == outliving)
    host.answer()
    await host.asked("reaped")
    await until(lambda: timers.scopes() == [])
    once = [scope for _, scope in timers.acquired if scope.startswith("out")]
    assert sorted(once) == sorted(["outer", *outliving]), "a timer was lost for a while, or there were two"
    host.answer()
    await host.done()


async def test_what_a_child_writes_is_not_the_parents(host: Host) -> None:
    """It ends its own blocks and takes slots of its own; the parent's timer is untouched by either."""
    await host.run("""
with expires(60, "parent"):
    child = os.fork()
    if child == 0:
        with expires(60, "child"), expires("auto", "more"):
            ask("in both")
    else:
        reap(child)
        with expires(60, "later"):
            ask("in one")
if child == 0:
    os._exit(0)
""")
    await host.asked("in both")
    await until(lambda: host.timers.scopes() == ["child", "more", "parent"])
    host.answer()
    await host.asked("in one")
    await until(lambda: "later" in host.timers.scopes())
    assert host.timers.scopes() == ["later", "parent"]
    assert [scope for _, scope in host.timers.acquired].count("parent") == 1
    host.answer()
    await host.done()


async def test_a_client_of_its_own_is_the_parents_as_well(host: Host) -> None:
    """The child may go on with it: it ends none of the parent's timers, and starts its own."""
    await host.run("""
from rallypoint.timer import Client
client = Client()
client.acquire("parent", 60)
child = os.fork()
if child == 0:
    client.release("parent")
    client.acquire("child", 60)
    ask("in both")
    os._exit(0)
reap(child)
client.acquire("later", 60)
ask("in one")
client.release("parent")
client.release("later")
ask("in none")
""")
    await host.asked("in both")
    await until(lambda: host.timers.scopes() == ["child", "parent"])
    host.answer()
    await host.asked("in one")
    await until(lambda: host.timers.scopes() == ["later", "parent"])
    host.answer()
    await host.asked("in none")
    await until(lambda: host.timers.scopes() == [])
    host.answer()
    await host.done()


async def test_a_parents_timers_end_with_it_though_a_child_lives(host: Host) -> None:
    """The child holds neither its connection nor its table."""
    await host.run("""
ready, tell_ready = os.pipe()
with expires(60, "parent"):
    ask("held")
    if os.fork() == 0:
        os.close(1)
        os.write(tell_ready, b".")
        sys.stdin.readline()
        os._exit(0)
    os.read(ready, 1)
    os._exit(0)
""")
    await host.asked("held")
    await until(lambda: host.timers.scopes() == ["parent"])
    host.answer()
    assert await host.worker.wait() == 0
    await until(lambda: host.timers.scopes() == [])
    assert host.worker.stdin is not None
    host.worker.stdin.close()


async def test_a_fork_in_a_thread_while_others_are_in_blocks(host: Host) -> None:
    """Whatever those were about: the child has locks of its own, and nobody waits for a thread it has not."""
    await host.run("""
stop = threading.Event()
def churn():
    while not stop.is_set():
        with expires(0.09, "short"), expires("auto", "auto"):
            pass
churning = [threading.Thread(target=churn) for _ in range(3)]
for thread in churning:
    thread.start()
def fork():
    for _ in range(30):
        child = os.fork()
        if child == 0:
            for _ in range(5):
                with expires(0.09, "child's"), expires("auto", "child's too"):
                    pass
            os._exit(0)
        reap(child)
forking = threading.Thread(target=fork)
forking.start()
forking.join()
stop.set()
for thread in churning:
    thread.join()
ask("forked")
""")
    await host.asked("forked")
    await until(lambda: host.timers.scopes() == [])
    host.answer()
    await host.done()
