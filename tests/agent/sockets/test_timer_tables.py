"""The agent reads timers from a process's table, although the process sends no message about a change."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import pytest

from rallypoint.agent.sockets import timer_tables
from rallypoint.agent.sockets.timer_tables import (
    LONGEST,
    Holder,
    Holders,
    OpenTable,
    TableRefused,
    Tables,
    TimerLimits,
)
from rallypoint.timer.client.client import ExpiredTimer
from rallypoint.timer.worker import wire
from rallypoint.timer.worker.table import SIZE, SLOTS, TableWriter
from support.clock import Clock
from support.remembered_timers import RememberedTimers
from support.timer_host import TimerHost
from support.waiting import until

ADD_SEALS, SHRINK, GROW = 1033, 0x2, 0x4
MILLISECOND = 1_000_000


def memory(size: int = SIZE, seals: int = SHRINK | GROW) -> int:
    """The descriptor of a memory as a worker makes it."""
    descriptor = os.memfd_create("table", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, ADD_SEALS, seals)
    return descriptor


class Process:
    """A worker process's end of its table, in this process."""

    def __init__(self) -> None:
        self.descriptor = memory()
        self.view = memoryview(mmap.mmap(self.descriptor, SIZE))
        self.table = TableWriter(self.view)
        self._tokens = 0

    def acquire(
        self,
        scope: bytes,
        after: float = 60.0,
        since: float = 999.0,
        *,
        signal: int = 0,
        learns: bool = False,
    ) -> int:
        """Start a timer; return its slot."""
        self._tokens += 1
        kind = self.table.kind_of(scope, signal, learns)
        return self.table.acquire(self._tokens, int(since * 1e9), int(after * 1e9), scope, kind)

    def leave(self, scope: bytes, seconds: float) -> None:
        """Record the duration of a scope."""
        self.table.observe(self.table.kind_of(scope, 0, True), int(seconds * 1e9))

    def listening(self) -> float:
        """The time until which the agent polls by itself, in monotonic seconds."""
        return float(self.table.listening[0]) / 1e9

    def close(self) -> None:
        """End the process."""
        os.close(self.descriptor)


class Host:
    """An agent's tables, with a clock of the test."""

    def __init__(self) -> None:
        """Build a host; one worker may have tables."""
        self.clock = Clock()
        self.timers = RememberedTimers()
        self.holders = Holders(
            self.timers, rank_of={"0@1": 4}.get, limits=TimerLimits(timers=2000), clock=self.clock
        )
        self.tables = Tables(self.clock)

    def holder(self) -> Holder:
        """Open a holder for one more process."""
        return self.holders.open("0@1", os.getpid())


@pytest.fixture
def process() -> Iterator[Process]:
    """A process with a table."""
    process = Process()
    yield process
    process.close()


@pytest.fixture
async def host() -> Host:
    """An agent."""
    return Host()


async def test_timers_in_the_table_are_held(host: Host, process: Process) -> None:
    """A timer counts from its start; removed ones end, new ones begin; a slot's second timer is another timer."""
    first = process.acquire(b"a", after=5.0, since=998.0)
    table = host.tables.open(host.holder(), process.descriptor)
    assert host.timers.held == {("0@1", "a"): (1, 5.0, 998.0)}
    process.table.release(first)
    process.acquire(b"a", after=6.0)
    process.acquire(b"b")
    assert table.read_changes()
    assert host.timers.scopes() == ["a", "b"]
    assert host.timers.held["0@1", "a"] == (2, 6.0, 999.0)
    assert not table.read_changes()
    table.close()
    assert host.timers.scopes() == []


async def test_equal_scopes_are_timers_of_their_own(host: Host, process: Process) -> None:
    """They have distinct names at the service; the end of one does not end another."""
    slots = [process.acquire(b"s") for _ in range(3)]
    table = host.tables.open(host.holder(), process.descriptor)
    assert host.timers.scopes() == ["s", "s~2", "s~3"]
    process.table.release(slots[0])
    table.read_changes()
    assert host.timers.scopes() == ["s~2", "s~3"]
    table.close()


async def test_a_process_whose_connection_ended_rings_again(host: Host, process: Process) -> None:
    """It rings with its next timer: its table is polled no longer, even within the announced time."""
    table = host.tables.open(host.holder(), process.descriptor)
    assert process.listening() > 0
    table.close()
    table.close()
    assert process.listening() == 0


async def test_a_process_that_connected_again_is_polled_as_announced(host: Host, process: Process) -> None:
    """The end of the former connection, which may be noticed later, does not change that."""
    former = host.tables.open(host.holder(), process.descriptor)
    again = host.tables.open(host.holder(), process.descriptor)
    former.close()
    assert process.listening() == pytest.approx(1002.0)
    assert again.poll()
    again.close()


async def test_the_agent_looks_by_itself_until_nothing_has_changed_for_a_while(
    host: Host, process: Process
) -> None:
    """Its last poll is after the time until which the process need not ring."""
    table = host.tables.open(host.holder(), process.descriptor)
    assert process.listening() == pytest.approx(1002.0)
    host.clock.now = 1001.5
    process.acquire(b"a")
    assert table.poll()
    assert process.listening() == pytest.approx(1003.5)
    # At this very time a process may have just read the clock, and not rung.
    host.clock.now = 1003.5
    assert table.poll()
    process.acquire(b"b")
    host.clock.now = 1003.6
    assert table.poll()
    assert host.timers.scopes() == ["a", "b"]
    assert process.listening() == pytest.approx(1005.6)
    host.clock.now = 1005.7
    assert not table.poll()
    assert process.listening() == 0, "who ends a timer now has to ring"
    host.clock.now = 1100.0
    table.wake()
    assert process.listening() == pytest.approx(1102.0)
    table.close()


async def test_all_tables_are_polled_without_a_request(host: Host, process: Process) -> None:
    """This holds until the announced time, and again after a ring."""
    other = Process()
    tables = [host.tables.open(host.holder(), each.descriptor) for each in (process, other)]
    process.acquire(b"a")
    other.acquire(b"b")
    await until(lambda: host.timers.scopes() == ["a", "b"])
    host.clock.now += 10
    await until(lambda: not host.tables._watched)
    process.acquire(b"c")
    tables[0].wake()
    process.acquire(b"d")
    await until(lambda: host.timers.scopes() == ["a", "b", "c", "d"])
    for table in tables:
        table.close()
    assert host.timers.scopes() == []
    other.close()


async def test_completions_are_reported_once(host: Host, process: Process) -> None:
    """This includes a process that sends the same table with its next connection."""
    process.acquire(b"s", learns=True)
    process.leave(b"s", 2.0)
    process.leave(b"s", 1.0)
    table = host.tables.open(host.holder(), process.descriptor)
    assert host.timers.learned_as == {("0@1", "s"): "s"}
    process.leave(b"s", 0.5)
    table.close()
    table = host.tables.open(host.holder(), process.descriptor)
    assert not table.read_changes()
    assert host.timers.observed == [("s", 2, 2.0), ("s", 1, 2.0)]
    table.close()


async def test_forgotten_durations_do_not_come_back(host: Host, process: Process) -> None:
    """The longest time is measured from the start again; earlier completions are reported before that."""
    process.leave(b"s", 9.0)
    process.leave(b"other", 8.0)
    table = host.tables.open(host.holder(), process.descriptor)
    process.leave(b"s", 7.0)
    host.tables.forget("s")
    assert host.timers.observed[-1] == ("s", 1, 9.0)
    process.leave(b"s", 1.0)
    process.leave(b"other", 1.0)
    table.read_changes()
    assert host.timers.observed[-2:] == [("s", 1, 1.0), ("other", 1, 8.0)]
    table.close()


async def test_progress_is_reported_when_it_changes(host: Host, process: Process) -> None:
    """The report has the worker's global rank."""
    table = host.tables.open(host.holder(), process.descriptor)
    process.table.progress(7, 999_000 * MILLISECOND)
    table.read_changes()
    process.acquire(b"s")
    table.read_changes()
    process.table.progress(8, 999_500 * MILLISECOND)
    table.read_changes()
    assert host.timers.steps == [("0@1", 4, 7, 999.0), ("0@1", 4, 8, 999.5)]
    table.close()


async def test_timers_without_a_slot_are_logged_once(
    host: Host, process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    """The log shows that these timers are not guarded."""
    for number in range(SLOTS + 2):
        process.acquire(b"s%d" % number)
    table = host.tables.open(host.holder(), process.descriptor)
    process.acquire(b"s")
    table.read_changes()
    assert len(host.timers.held) == SLOTS
    assert caplog.text.count("too many timers") == 1
    table.close()


async def test_bounds_of_a_worker_hold_for_its_tables(
    process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    """Timers above the limit are accepted as soon as there is room."""
    timers = RememberedTimers()
    holders = Holders(timers, rank_of={"0@1": 4}.get, limits=TimerLimits(timers=2), clock=Clock())
    first = process.acquire(b"a")
    for scope in (b"b", b"c"):
        process.acquire(scope)
    table = Tables(Clock()).open(holders.open("0@1", os.getpid()), process.descriptor)
    assert timers.scopes() == ["a", "b"]
    process.table.release(first)
    table.read_changes()
    assert timers.scopes() == ["b", "c"]
    assert caplog.text.count("too many timers") == 1
    table.close()


async def test_invalid_entries_are_not_taken_for_timers(host: Host, process: Process) -> None:
    """A table is the worker's memory; it may contain any bytes."""
    process.acquire(b"\xff\xfe")
    process.acquire(b"nothing", after=0.0)
    process.acquire(b"future", since=5000.0)
    process.acquire(b"signal", signal=200)
    process.leave(b"ages", 1e10)
    table = host.tables.open(host.holder(), process.descriptor)
    assert host.timers.scopes() == ["?", "future", "signal"]
    timer = host.holders.find("0@1", "signal")
    assert timer is not None
    assert timer.signal == 0
    assert host.timers.held["0@1", "future"][2] == 1000.0
    assert host.timers.observed == [("ages", 1, LONGEST)]
    process.view[16:SIZE] = b"\xff" * (SIZE - 16)
    table.read_changes()
    table.close()
    assert host.timers.scopes() == []


@pytest.mark.parametrize(
    ("size", "seals", "says"),
    [
        (SIZE, GROW, "seals"),
        (SIZE, SHRINK, "seals"),
        (SIZE - 1, SHRINK | GROW, f"{SIZE - 1} bytes"),
        (SIZE, 15, "map"),
    ],
)
async def test_a_memory_that_could_hurt_its_reader_is_refused(
    host: Host, size: int, seals: int, says: str
) -> None:
    """A memory that shrinks during a read kills its reader."""
    descriptor = memory(size, seals)
    with pytest.raises(TableRefused, match=says):
        host.tables.open(host.holder(), descriptor)
    os.close(descriptor)


async def test_a_descriptor_without_a_table_is_refused(host: Host) -> None:
    """Examples are a pipe, and memory with other first bytes."""
    descriptor = memory()
    with pytest.raises(TableRefused, match="does not begin with the magic number"):
        host.tables.open(host.holder(), descriptor)
    os.close(descriptor)
    reading, writing = os.pipe()
    with pytest.raises(TableRefused, match="memfd"):
        host.tables.open(host.holder(), reading)
    os.close(reading)
    os.close(writing)


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[TimerHost]:
    """An agent that listens."""
    agent = TimerHost(tmp_path / "s", base_rank=4)
    async with agent.listening():
        yield agent


@pytest.mark.integration
async def test_a_table_comes_with_a_message(agent: TimerHost, process: Process) -> None:
    """Its timers exist beside those of messages, and end with the connection; a second table replaces it."""
    other = Process()
    process.acquire(b"s", since=time.monotonic())
    other.acquire(b"t", since=time.monotonic())
    with agent.connect() as connection:
        socket.send_fds(connection, [wire.TABLE], [process.descriptor])
        connection.send(wire.acquire(1, 0, 60.0, b"s"))
        await agent.timers.until(lambda: agent.timers.scopes() == ["s", "s~2"])
        socket.send_fds(connection, [wire.TABLE], [other.descriptor])
        await agent.timers.until(lambda: agent.timers.scopes() == ["s~2", "t"])
    await agent.timers.until(lambda: agent.timers.scopes() == [])
    other.close()


@pytest.mark.integration
async def test_a_ring_causes_a_read_of_the_table(agent: TimerHost, process: Process) -> None:
    """The process wrote its timer after the agent had stopped polling."""
    with agent.connect() as connection:
        socket.send_fds(connection, [wire.TABLE], [process.descriptor])
        await until(lambda: process.table.listening[0] > 0)
        (table,) = agent.socket._tables._open
        agent.socket._tables._watched.clear()
        process.acquire(b"s", since=time.monotonic())
        connection.send(wire.LOOK)
        await agent.timers.until(lambda: agent.timers.scopes() == ["s"])
        assert list(agent.socket._tables._watched) == [table]


@pytest.mark.integration
async def test_the_table_is_read_before_an_expiry_counts(agent: TimerHost, process: Process) -> None:
    """The agent reads a worker's table before it decides on an expiry, with or without a ring."""
    slot = process.acquire(b"s", since=time.monotonic())
    with agent.connect() as connection:
        socket.send_fds(connection, [wire.TABLE], [process.descriptor])
        await agent.timers.until(lambda: agent.timers.scopes() == ["s"])
        # The agent's poll does not run while this task does not wait.
        expired = agent.timers.expired("0@1", "s")
        process.table.release(slot)
        process.acquire(b"s", since=time.monotonic())
        await agent.timers.tell(expired)
        assert agent.expired == []
        await agent.timers.tell(agent.timers.expired("0@1", "s"))
    assert [hang.scope for hang in agent.expired] == ["s"]


@pytest.mark.integration
async def test_an_unreadable_table_prevents_a_reaping(
    agent: TimerHost, process: Process, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the table can't be read, for any reason, the service has to report the expiry again."""
    process.acquire(b"s", since=time.monotonic())
    with agent.connect() as connection:
        socket.send_fds(connection, [wire.TABLE], [process.descriptor])
        await agent.timers.until(lambda: agent.timers.scopes() == ["s"])
        with monkeypatch.context() as blind:
            blind.setattr(OpenTable, "read_changes", Mock(side_effect=RuntimeError("a bug")))
            assert await agent.timers.tell(agent.timers.expired("0@1", "s")) is False
        assert agent.expired == []
        assert "a bug" in caplog.text
        await agent.timers.tell(agent.timers.expired("0@1", "s"))
    assert [hang.scope for hang in agent.expired] == ["s"]


def open_memory() -> int:
    """Count this process's descriptors of shared memory; earlier tests may have left other descriptors open."""
    names = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum("memfd:" in os.readlink(name) for name in names if os.path.islink(name))


@pytest.mark.integration
@pytest.mark.parametrize("descriptors", [0, 2])
async def test_a_table_without_its_memory_ends_the_connection(
    agent: TimerHost, process: Process, descriptors: int, caplog: pytest.LogCaptureFixture
) -> None:
    """So does one that can't be read; the log has the reason, and no descriptor is left open."""
    before = open_memory()
    with agent.connect() as connection:
        connection.setblocking(False)
        socket.send_fds(connection, [wire.TABLE], [process.descriptor] * descriptors)
        with contextlib.suppress(BlockingIOError):
            while connection.recv(1):
                pass
        await ended(connection)
    assert f"a table comes with one descriptor, not {descriptors}" in caplog.text
    assert open_memory() == before


@pytest.mark.integration
async def test_no_descriptor_outlives_a_connection(agent: TimerHost, process: Process) -> None:
    """This holds for valid and for refused tables."""
    unsafe = memory(seals=0)
    before = open_memory()
    for descriptor in (process.descriptor, unsafe):
        with agent.connect() as connection:
            socket.send_fds(connection, [wire.TABLE], [descriptor])
            connection.shutdown(socket.SHUT_WR)
            connection.setblocking(False)
            await ended(connection)
    await until(lambda: open_memory() == before)
    os.close(unsafe)


async def ended(connection: socket.socket) -> None:
    """Wait until the agent has closed a connection."""
    loop, seen = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, seen.set)
    await seen.wait()
    loop.remove_reader(connection)


@pytest.mark.integration
async def test_an_expiry_of_a_cleared_worker_is_ignored(agent: TimerHost, process: Process) -> None:
    """Its table is closed, and may be gone."""
    process.acquire(b"s", since=time.monotonic())
    with agent.connect() as connection:
        socket.send_fds(connection, [wire.TABLE], [process.descriptor])
        await agent.timers.until(lambda: agent.timers.scopes() == ["s"])
        expired = agent.timers.expired("0@1", "s")
        agent.socket.clear("0@1")
        await agent.timers.tell(ExpiredTimer("0@1", "s", 60.0, 1.0, expired.sequence))
    assert agent.expired == []


async def test_processor_time_is_read_once_per_look(
    host: Host, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read serves all timers that began since the previous poll; a hang report uses it."""
    reads = count(1)
    monkeypatch.setattr(timer_tables, "processor_time_of", lambda pid: float(next(reads)))
    process.acquire(b"a")
    process.acquire(b"b")
    table = host.tables.open(host.holder(), process.descriptor)
    table.read_changes()
    process.acquire(b"c")
    table.read_changes()
    timers = [host.holders.find("0@1", scope) for scope in ("a", "b", "c")]
    assert [timer.cpu_seconds for timer in timers if timer is not None] == [1.0, 1.0, 2.0]
    table.close()


async def test_the_processor_time_of_a_process_that_is_gone_is_not_known(
    host: Host, process: Process
) -> None:
    """There is no error."""
    process.acquire(b"s")
    table = host.tables.open(host.holders.open("0@1", 2**22 + 1), process.descriptor)
    timer = host.holders.find("0@1", "s")
    assert timer is not None
    assert timer.cpu_seconds is None
    table.close()
