"""Scenarios of a worker's timers and progress."""

from __future__ import annotations

import asyncio
import time

from rallypoint.conformance.checks import HOLD, NotOffered
from rallypoint.conformance.scripted_sockets import ObservedConnection
from rallypoint.conformance.worker_scene import WorkerScene, worker_scenario
from rallypoint.timer.worker import wire

_LARGE_STEP = 2**53 + 1  # no double
_STORM = 4.0  # seconds for which each connection is closed
_MOST_CONNECTIONS = 40
_CHANGES = 2_000  # more than fit into the queue of a socket
_DELAYED = 10.0  # seconds that they may take: if each waited for 50 ms, 100 s
_LIVED = 1.2  # seconds of a connection after which its end is no failure


def _check_time(scene: WorkerScene, since: float, begun: float) -> None:
    now = time.monotonic()
    seen = f"{since:.3f} s, while CLOCK_MONOTONIC has {now:.3f} s"
    scene.check("T05", since == 0 or begun - 0.001 <= since <= now, "0, or the time of the step", seen)


@worker_scenario("T01", "T02", "T03", "T05", "T07")
async def timers(scene: WorkerScene) -> None:
    """Timers begin and end, some of one scope at once."""
    begun = time.monotonic()
    await scene.step("T03", "acquire", 1, 60.5, "train.py#12")
    await scene.step("T03", "acquire", 2, 7, "save")
    save, train = await scene.holds("T03", "save", "train.py#12")
    count = len(scene.sockets.timers)
    scene.check("T01", count == 1, "one connection", f"{count} connections")
    seen = f"timeouts of {train.after} and {save.after} s, signals {train.signal} and {save.signal}"
    right = (
        abs(train.after - 60.5) < 1e-6 and abs(save.after - 7) < 1e-6 and not train.signal and not save.signal
    )
    scene.check("T03", right, "timeouts of 60.5 and 7 s, without signals", seen)
    _check_time(scene, train.since, begun)
    await scene.step("T07", "acquire", 3, 60, "save")
    await scene.holds("T07", "save", "save", "train.py#12")
    await scene.step("T07", "release", 2)
    (left, _) = await scene.holds("T07", "save", "train.py#12")
    scene.check(
        "T07", abs(left.after - 60) < 1e-6, "the timer of 60 s goes on", f"the one of {left.after} s does"
    )
    await scene.step("T07", "release", 1)
    await scene.step("T07", "release", 3)
    await scene.holds("T07")


@worker_scenario("T04", "T02")
async def learned(scene: WorkerScene) -> None:
    """A timer of which the timeout is learned."""
    await scene.step("T04", "acquire", 1, 0, "learned")
    (timer,) = await scene.holds("T04", "learned")
    scene.check("T04", timer.after == 0, "a timeout of 0", f"{timer.after} s")


@worker_scenario("T06", "T02")
async def scopes(scene: WorkerScene) -> None:
    """Scopes of two bytes a character, of 256 bytes and of more."""
    fits, too_long = "é" * 128, "é" * 100 + "€" * 100
    await scene.step("T06", "acquire", 1, 60, fits)
    await scene.holds("T06", fits)
    await scene.step("T06", "release", 1)
    await scene.step("T06", "acquire", 2, 60, too_long)
    await scene.until("T06", lambda: len(scene.checked_timers()) == 1, "a timer with a part of the scope")
    scope = scene.checked_timers()[0].scope
    seen = f"{len(scope.encode())} bytes: {scope[:5]}…{scope[-5:]}"
    right = len(scope) >= 80 and (too_long.startswith(scope) or too_long.endswith(scope))
    scene.check("T06", right, "a part of the scope, of whole characters", seen)


@worker_scenario("T08", "T05")
async def progress(scene: WorkerScene) -> None:
    """Progress, also of a step that needs more than 53 bits."""
    for step in (1, _LARGE_STEP):
        begun = time.monotonic()
        await scene.step("T08", "progress", step)
        expected = f"progress of step {step}"
        await scene.until("T08", lambda step=step: _reported(scene, step) is not None, expected)  # type: ignore[misc]
        _check_time(scene, _reported(scene, step) or 0.0, begun)


def _reported(scene: WorkerScene, step: int) -> float | None:
    """Return the time of reaching a step, in seconds, if it is the last one of a connection; None if it is not."""
    scene.checked_timers()
    for connection in scene.sockets.timers:
        found = [each for each in connection.messages if isinstance(each, wire.Progress)]
        if found and found[-1].step == step:
            return found[-1].when
        if connection.table is not None and (slot := connection.table.step()) and slot.step == step:
            return slot.when / 1e9
    return None


@worker_scenario("T09", "T10", "T11")
async def no_agent(scene: WorkerScene) -> None:
    """No agent listens at first."""
    await scene.sockets.stop()
    for token, scope in enumerate(("first", "second", "third"), 1):
        await scene.step("T09", "acquire", token, 60, scope)
    await scene.step("T09", "release", 2)
    scene.sockets.start()
    await scene.reconnected("T10", None)
    await scene.holds("T11", "first", "third")


@worker_scenario("T09", "T10", "T11")
async def agent_restarts(scene: WorkerScene) -> None:
    """The agent closes the connection, twice, and the worker holds timers."""
    begun = time.monotonic()
    await scene.step("T03", "acquire", 1, 60, "held")
    await scene.step("T03", "acquire", 2, 60, "ended")
    _, held = await scene.holds("T03", "ended", "held")
    given = held.since or begun
    await asyncio.sleep(_LIVED)
    for _ in range(2):
        former = scene.connection()
        former.close()
        await scene.step("T09", "release", 2)
        await scene.reconnected("T10", former)
        (held,) = await scene.holds("T11", "held")
        seen = f"{held.since:.3f} s, instead of {given:.3f} s"
        scene.check("T11", abs(held.since - given) < HOLD, "the time at which the timer began", seen)
    await scene.step("T09", "release", 1)
    await scene.holds("T11")


@worker_scenario("T12", "T09")
async def connection_storm(scene: WorkerScene) -> None:
    """Each connection is closed at once, while the worker begins and ends timers."""
    scene.sockets.refusing = True
    end = scene.now + _STORM
    token = 0
    while scene.now < end:
        token += 1
        await scene.step("T09", "acquire", token, 60, "s")
        await scene.step("T09", "release", token)
        await asyncio.sleep(0.002)
    count = len(scene.sockets.timers)
    scene.check("T12", count <= _MOST_CONNECTIONS, f"at most {_MOST_CONNECTIONS} connections", f"{count}")


@worker_scenario("T13", "T14", "T02")
async def full_queue(scene: WorkerScene) -> None:
    """The agent reads nothing for a while."""
    await scene.step("T03", "acquire", 1, 60, "kept")
    await scene.step("T03", "acquire", 9_999, 60, "ended")
    await scene.holds("T03", "ended", "kept")
    former = scene.connection()
    former.pause()
    begun = scene.now
    for token in range(2, 2 + _CHANGES // 2):
        scene.do("acquire", token, 60, f"changing {token % 7}")
        scene.do("release", token)
    scene.do("release", 9_999)
    await scene.results("T13")
    took = scene.now - begun
    scene.check("T13", took < _DELAYED, f"{_CHANGES} changes in {_DELAYED:g} s", f"{took:.1f} s")
    former.resume()
    await scene.step("T14", "acquire", 2, 60, "last")
    end = scene.now + scene.timeout
    while sorted(each.scope for each in scene.checked_timers()) != ["kept", "last"]:
        await scene.step("T09", "progress", 1)
        known = sorted({each.scope for each in scene.checked_timers()})
        scene.check("T14", scene.now < end, "timers ['kept', 'last']", f"{known}; {scene.state()}")
        await asyncio.sleep(0.05)
    scene.check("T14", True, "", "")


async def _with_table(scene: WorkerScene) -> ObservedConnection:
    """Have a timer begun; return the connection, if it has a table."""
    await scene.step("T03", "acquire", 1, 60, "first")
    await scene.until("T03", lambda: scene.sockets.timers and scene.connection().messages, "a message")
    scene.checked_timers()
    connection = scene.connection()
    if connection.table is None:
        raise NotOffered("the worker uses no table")
    scene.check("T15", True, "", "")
    return connection


def _looks(connection: ObservedConnection) -> int:
    return sum(isinstance(each, wire.Look) for each in connection.messages)


@worker_scenario("T15", "T16", "T17")
async def table(scene: WorkerScene) -> None:
    """The worker keeps its timers in a table: an agent that does not poll, that polls, and that does not read."""
    connection = await _with_table(scene)
    await scene.step("T16", "acquire", 2, 60, "second")
    await scene.holds("T16", "first", "second")
    connection.pause()
    for token in range(10, 210):
        scene.do("acquire", token, 60, "changing")
        scene.do("release", token)
    await scene.results("T17")
    before = _looks(connection)
    connection.resume()
    await scene.step("T16", "release", 2)
    await scene.holds("T16", "first")
    seen = _looks(connection) - before
    scene.check("T17", seen <= 3, "no Look while another one is unread", f"{seen} after 401 changes")
    assert connection.table is not None
    connection.table.listen_until(time.monotonic_ns() + 600 * 10**9)
    before = _looks(connection)
    await scene.step("T17", "acquire", 3, 60, "third")
    await scene.hold("T17", lambda: _looks(connection) == before, "no Look while the agent polls")
    connection.read_table()
    await scene.holds("T17", "first", "third")


@worker_scenario("T15", "T11")
async def table_again(scene: WorkerScene) -> None:
    """The agent polls the table, and closes the connection: another connection gets the table, with 0 in word 1."""
    connection = await _with_table(scene)
    assert connection.table is not None
    connection.table.listen_until(time.monotonic_ns() + 10**9)
    await asyncio.sleep(_LIVED)
    connection.close()
    again = await scene.reconnected("T10", connection)
    await scene.until("T15", lambda: again.messages, "a message")
    scene.checked_timers()
    scene.check("T15", again.table is not None, "the table", str(again.messages[:1]))
    await scene.holds("T11", "first")
