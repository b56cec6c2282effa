"""A simulated process behaves like a real one: it has its own clock, can be stopped, and runs nothing once killed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from simulation.clockwork import Clockwork, Process, Stuck
from simulation.network import Connection, Item, Link, Network


def never() -> bool:
    return False


def nothing() -> None:
    """Check nothing: there is no referee."""


class Stage:
    """A clockwork, and the errors of its processes."""

    def __init__(self) -> None:
        self.clockwork = Clockwork(random.Random(1))
        self.errors: list[str] = []

    def process(self, rate: float = 1.0, offset: float = 0.0) -> Process:
        return Process(self.clockwork, "process", self.errors.append, rate=rate, offset=offset)

    def run(self, until: float, done: Callable[[], bool] = never) -> bool:
        return self.clockwork.run(until, done, nothing)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_a_process_sleeps_by_its_own_clock(stage: Stage) -> None:
    """With a clock twice as fast, a sleep of ten seconds takes five, and never ends early."""
    woken: list[tuple[float, float]] = []
    process = stage.process(rate=2.0, offset=1e6)

    async def sleep() -> None:
        begun = asyncio.get_running_loop().time()
        await asyncio.sleep(10.0)
        woken.append((stage.clockwork.now, asyncio.get_running_loop().time() - begun))

    process.create_task(sleep())
    stage.run(100.0)
    ((at, slept),) = woken
    assert at == pytest.approx(5.0)
    assert slept >= 10.0


def test_a_resumed_process_runs_the_callbacks_it_missed(stage: Stage) -> None:
    """Callbacks that become due while a process is stopped run when it continues, and its clock has gone on."""
    process, seen = stage.process(), list[float]()
    process.call_later(1.0, lambda: seen.append(process.time()))
    process.pause()
    stage.run(5.0)
    assert not seen
    process.resume()
    stage.run(6.0)
    assert seen == [pytest.approx(5.0)]


def test_a_killed_process_runs_nothing_any_more(stage: Stage) -> None:
    """After a kill, none of its callbacks and no `finally` runs, as with SIGKILL."""
    process, seen = stage.process(), list[str]()

    async def work() -> None:
        try:
            await asyncio.sleep(2.0)
        finally:
            seen.append("finally")

    process.create_task(work())
    stage.run(1.0)
    process.kill()
    process.call_soon(seen.append, "callback")
    stage.run(10.0)
    assert not seen


def test_an_uncaught_exception_is_reported(stage: Stage) -> None:
    """An exception in a callback is reported with its process, and other callbacks still run."""
    process, seen = stage.process(), list[str]()

    def fail() -> None:
        raise ValueError("broken")

    process.call_soon(fail)
    process.call_soon(seen.append, "next")
    stage.run(1.0)
    assert seen == ["next"]
    assert stage.errors == ["process: a callback failed: ValueError('broken')"]


def test_a_cluster_that_goes_round_in_circles_is_stopped(stage: Stage) -> None:
    """Code that never waits ends the simulation with an error instead of never."""
    process = stage.process()

    async def spin() -> None:
        while True:  # noqa: ASYNC110 (the test needs a busy loop)
            await asyncio.sleep(0)

    process.create_task(spin())
    with pytest.raises(Stuck, match="whoever waits, waits"):
        stage.run(1.0)
    process.kill()
    process.dispose()


def test_time_stops_where_something_is_done(stage: Stage) -> None:
    """`run` returns as soon as `done` is True, and not before."""
    seen: list[str] = []
    stage.clockwork.at(3.0, seen.append, "event")
    assert stage.run(10.0, lambda: bool(seen))
    assert stage.clockwork.now == 3.0
    assert not stage.run(10.0)
    assert stage.clockwork.now == 10.0


def test_a_suspended_host_sends_nothing_again(stage: Stage) -> None:
    """A message lost on a link before its host was suspended arrives after both are back, not when the link is."""
    network, link = Network(stage.clockwork, random.Random(1)), Link("host", 0.01)
    client, server, heard = stage.process(), stage.process(), list[Item]()

    class End:
        def receive(self, item: Item) -> None:
            heard.append(item)

    connection = Connection(network, link, client, server, End(), lambda *_: End(), 10, server_end=End())
    network.connections[id(connection)] = connection
    network.block(link, up=True, down=True)
    connection.up.send(("message", "a heartbeat"))
    stage.run(1.0)
    client.pause(suspended=True)
    network.heal(link)
    stage.run(2.0)
    assert heard == []
    client.resume()
    network.resumed(client)
    stage.run(3.0)
    assert heard == [("message", "a heartbeat")]
