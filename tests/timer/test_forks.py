"""A worker forks inside its blocks, as data loaders do: nothing crashes, and its agent sees the held timers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.marks import slow
from support.timer_host import TimerHost, answer, asked, finished
from support.waiting import until

pytestmark = pytest.mark.integration

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


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[TimerHost]:
    host = TimerHost(tmp_path / "s")
    async with host.listening():
        yield host
    assert host.expired == []


@pytest.mark.parametrize("forks", [36, slow(180)])
async def test_many_forks_inside_a_block(host: TimerHost, forks: int) -> None:
    """Children that exit inside the block, that leave the block they never entered, that have blocks and
    children of their own, that outlive the block, and loaders of multiprocessing; threads go on meanwhile."""
    timers = host.timers
    worker = await host.start(f"FORKS = {forks}\n{FORKS}")
    assert await asked(worker) == "forked"
    outliving = sorted(f"outliving {number}" for number in range(2, forks, 3))
    await host.shows("outer", *outliving)
    await answer(worker)
    assert await asked(worker) == "left"
    await host.shows(*outliving)
    await answer(worker)
    assert await asked(worker) == "reaped"
    await host.shows()
    once = [scope for _, scope in timers.acquired if scope.startswith("out")]
    assert sorted(once) == sorted(["outer", *outliving]), "a timer was lost for a while, or there were two"
    await answer(worker)
    await finished(worker)


async def test_writes_of_a_child_do_not_change_the_parents_timers(host: TimerHost) -> None:
    """It ends its own blocks and uses its own slots; neither touches the parent's timer."""
    worker = await host.start("""
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
    assert await asked(worker) == "in both"
    await host.shows("child", "more", "parent")
    await answer(worker)
    assert await asked(worker) == "in one"
    await until(lambda: "later" in host.timers.scopes())
    assert host.timers.scopes() == ["later", "parent"]
    assert [scope for _, scope in host.timers.acquired].count("parent") == 1
    await answer(worker)
    await finished(worker)


async def test_a_forked_child_can_use_the_parents_client(host: TimerHost) -> None:
    """The child may use it too: it ends none of the parent's timers, and starts its own."""
    worker = await host.start("""
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
    assert await asked(worker) == "in both"
    await host.shows("child", "parent")
    await answer(worker)
    assert await asked(worker) == "in one"
    await host.shows("later", "parent")
    await answer(worker)
    assert await asked(worker) == "in none"
    await host.shows()
    await answer(worker)
    await finished(worker)


async def test_a_parents_timers_end_with_it_though_a_child_lives(host: TimerHost) -> None:
    """The child holds neither the parent's connection nor its table."""
    worker = await host.start("""
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
    assert await asked(worker) == "held"
    await host.shows("parent")
    await answer(worker)
    assert await worker.wait() == 0
    await host.shows()
    assert worker.stdin is not None
    worker.stdin.close()


async def test_a_fork_in_a_thread_while_others_are_in_blocks(host: TimerHost) -> None:
    """Other threads may be at any point: the child has its own locks, and waits for no thread that it does not have."""
    worker = await host.start("""
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
    assert await asked(worker) == "forked"
    await host.shows()
    await answer(worker)
    await finished(worker)
