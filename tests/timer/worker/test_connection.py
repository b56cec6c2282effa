"""The worker's end never raises and never waits for long, and the agent sees exactly the timers that it holds."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rallypoint.timer.worker import connection as link
from rallypoint.timer.worker import connection as uplink
from rallypoint.timer.worker import wire
from rallypoint.timer.worker.connection import AgentConnection, AgentSocket
from rallypoint.timer.worker.table import SLOTS, TableWriter
from support.replacing import instead_of
from support.timer_agent import Agent, Connection
from support.waiting import PATIENCE

SECOND = 1_000_000_000


class Clock:
    """A CLOCK_MONOTONIC in nanoseconds that the test sets."""

    def __init__(self) -> None:
        self.now = 1000 * SECOND

    def __call__(self) -> int:
        return self.now


def acquire(up: AgentConnection, scope: bytes = b"s", after: float = 60.0) -> int:
    """Acquire a slot as a guard does, by the connection's clock."""
    table = up.table()
    nanoseconds = int(after * SECOND)
    kind = table.kind_of(scope, 0, not nanoseconds)
    slot = table.acquire(table.tick(), up._clock(), nanoseconds, scope, kind)
    ring(up, table)
    return slot


def release(up: AgentConnection, slot: int) -> None:
    table = up.table()
    table.release(slot)
    ring(up, table)


def ring(up: AgentConnection, table: TableWriter) -> None:
    if up._clock() > table.listening[0]:
        table.ring()


def test_the_table_is_sent_once_and_shows_what_is_held(agent: Agent) -> None:
    """It has the start time by CLOCK_MONOTONIC; closing it ends all timers."""
    up = AgentConnection(agent.path, 1.0)
    before = time.monotonic_ns()
    slot = acquire(up)
    connection = agent.welcome()
    (held,) = connection.table.slots()
    assert before <= held.since <= time.monotonic_ns()
    assert (held.after, held.scope) == (60 * SECOND, b"s")
    release(up, slot)
    assert connection.scopes() == []
    up.close()
    assert {type(message) for message in connection.waiting()} <= {wire.Look}
    assert connection.receive() is None


def test_the_size_of_a_table_can_not_be_changed(agent: Agent) -> None:
    """An agent that reads a shortened one would be killed."""
    up = AgentConnection(agent.path, 1.0)
    acquire(up)
    assert up._shared is not None
    for size in (0, 10_000_000):
        with pytest.raises(PermissionError):
            os.ftruncate(up._shared.descriptor, size)
    assert not os.get_inheritable(up._shared.descriptor)
    up.close()


def test_an_agent_that_listens_is_not_rung_for(agent: Agent) -> None:
    """No message is sent, for timers or their end. An agent that doesn't listen gets one."""
    up = AgentConnection(agent.path, 1.0)
    acquire(up)
    connection = agent.welcome()
    connection.table.listen_until(time.monotonic_ns() + 600 * SECOND)
    for _ in range(100):
        release(up, acquire(up))
    assert connection.waiting() == []
    connection.table.listen_until(0)
    acquire(up)
    assert connection.waiting() == [wire.Look()]
    up.close()


def test_an_agent_that_does_not_answer_finds_one_message(agent: Agent) -> None:
    """One message stands for any number of changes; after reading it the agent sees all of them."""
    up = AgentConnection(agent.path, 1.0)
    for _ in range(5000):
        release(up, acquire(up))
    acquire(up, b"last")
    connection = agent.welcome()
    assert connection.scopes() == ["last"]
    assert connection.waiting() == []
    for _ in range(5000):
        release(up, acquire(up))
    assert connection.waiting() == [wire.Look()]
    up.close()


def test_a_change_after_a_message_was_read_is_rung_for(agent: Agent) -> None:
    """This holds at any time: the look after the reading may be over already."""
    up = AgentConnection(agent.path, 1.0)
    acquire(up)
    connection = agent.welcome()
    for _ in range(50):
        slot = acquire(up)
        assert connection.waiting() == [wire.Look()]
        release(up, slot)
        assert connection.waiting() == [wire.Look()]
    up.close()


def test_a_short_timer_is_rung_for_but_not_all_the_time(agent: Agent) -> None:
    """An agent that listens looks anyway; it is asked to look sooner once in 10 ms."""
    clock = Clock()
    up = AgentConnection(agent.path, 1.0, clock)
    acquire(up)
    connection = agent.welcome()
    up.table().listening[0] = clock.now + 600 * SECOND
    for _ in range(3):
        clock.now += 10_000_000
        for _ in range(5):
            up.table().ring()
        assert connection.waiting() == [wire.Look()]
        clock.now += 9_999_999
        up.table().ring()
        assert connection.waiting() == []
    up.close()


def test_each_change_is_rung_for_if_unread_bytes_are_unknown(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message too many is better than one too few."""

    def refuse(*_: object) -> bytes:
        raise OSError(25, "Inappropriate ioctl for device")

    monkeypatch.setattr("rallypoint.timer.worker.connection.fcntl.ioctl", refuse)
    up = AgentConnection(agent.path, 1.0)
    for _ in range(3):
        acquire(up)
    assert agent.welcome().waiting() == [wire.Look()] * 2
    up.close()


def test_without_an_agent_nothing_happens(tmp_path: Path) -> None:
    """There is no exception, and no message until the back-off is over."""
    clock = Clock()
    up = AgentConnection(str(tmp_path / "nobody"), 1.0, clock)
    for _ in range(1000):
        release(up, acquire(up))
    assert up.table().listening[0] == up._retry_at == clock.now + SECOND // 10
    up.close()


@pytest.mark.parametrize("path", ["", "x" * 200, "zero\0byte"])
def test_an_unusable_path_is_like_no_agent(path: str) -> None:
    """Bad settings are reported when they are made, not during training."""
    up = AgentConnection(path, 1.0)
    release(up, acquire(up))
    assert up._link is None


def test_out_of_descriptors_is_like_no_agent(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker without free descriptors goes on."""

    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("rallypoint.timer.worker.connection.socket.socket", refuse)
    monkeypatch.setattr("rallypoint.timer.worker.table.os.memfd_create", refuse)
    up = AgentConnection(agent.path, 1.0)
    release(up, acquire(up))
    assert up._link is None


def test_back_off_doubles_to_its_maximum(tmp_path: Path) -> None:
    """It is 0.1 s, 0.2 s … 5 s; there is no attempt in between."""
    clock = Clock()
    up = AgentConnection(str(tmp_path / "nobody"), 1.0, clock)
    waits = []
    for _ in range(8):
        clock.now += 1
        acquire(up)
        waits.append((up._retry_at - clock.now) / SECOND)
        tried = up._retry_at
        up.table().ring()
        assert up._retry_at == tried
        clock.now = tried
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_a_new_connection_is_given_the_same_table(agent: Agent) -> None:
    """It has all held timers and their start times; an earlier agent's promise does not bind the new one."""
    clock = Clock()
    up = AgentConnection(agent.path, 1.0, clock)
    acquire(up, b"first")
    second = acquire(up, b"second")
    connection = agent.welcome()
    (began,) = [slot.since for slot in connection.table.slots() if slot.scope == b"first"]
    connection.table.listen_until(clock.now + 2 * SECOND)
    connection.close()
    release(up, second)
    clock.now += 3 * SECOND
    # The former agent has not noticed yet that its connection is gone.
    connection.table.listen_until(clock.now + 2 * SECOND)
    acquire(up, b"third")
    up.table().ring()
    again = agent.welcome()
    assert again.scopes() == ["first", "third"]
    assert began in [slot.since for slot in again.table.slots()]
    assert up.table().listening[0] == 0
    up.close()


def test_a_timer_that_finds_the_connection_broken_is_sent_on_the_next(agent: Agent) -> None:
    """It is sent at once: the block may be the one that hangs, and then no later message would come."""
    clock = Clock()
    up = AgentConnection(agent.path, 1.0, clock)
    release(up, acquire(up))
    agent.welcome().close()
    clock.now += 3 * SECOND
    acquire(up, b"hangs")
    assert agent.welcome().scopes() == ["hangs"]
    up.close()


def test_a_connection_is_closed_only_when_no_thread_can_send_on_it(agent: Agent) -> None:
    """A descriptor number that is free too early belongs to another file by the time a thread sends on it."""
    up = AgentConnection(agent.path, 1.0)
    acquire(up)
    held: AgentSocket | None = up._link
    assert held is not None
    descriptor = held._socket.fileno()
    up.close()
    assert up._link is None
    assert os.fstat(descriptor)
    del held
    gc.collect()
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(descriptor)


def test_a_closed_connection_stays_closed(agent: Agent) -> None:
    """Blocks that were entered before end without a message and without an error."""
    up = AgentConnection(agent.path, 1.0)
    slot = acquire(up)
    up.close()
    release(up, slot)
    up.table().ring()
    release(up, acquire(up))
    assert up._link is None


def test_a_ring_during_a_ring_is_not_lost(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread or a signal handler finds the lock taken: its holder rings once more."""
    up = AgentConnection(agent.path, 1.0)
    acquire(up)
    connection = agent.welcome()
    more = iter([True, False])

    @instead_of(monkeypatch, AgentSocket, "send")
    def send_and_write(send: Any, self: AgentSocket, message: bytes, descriptor: int = -1) -> None:
        send(self, message, descriptor)
        if next(more, False):
            # The agent reads at once, so that the last message does not stand for the next changes.
            assert connection.receive() == wire.Look()
            assert connection.scopes() == ["another", "s"]
            other = threading.Thread(target=acquire, args=(up, b"later"))
            other.start()
            other.join()

    acquire(up, b"another")
    assert connection.waiting() == [wire.Look()]
    assert connection.scopes() == ["another", "later", "s"]
    up.close()


def test_threads_lose_nothing_while_the_connection_breaks(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's last data is exactly the held timers."""
    monkeypatch.setattr(uplink, "_LIVED", 0)
    up = AgentConnection(agent.path, 1.0)
    acquire(up, b"kept")
    done = threading.Event()

    def serve() -> Connection:
        """Read messages of one connection after another, and cut each after a few."""
        connection = agent.welcome()
        taken = 0
        while not done.is_set():
            taken += len(connection.waiting())
            if taken > 5:
                connection.close()
                connection, taken = agent.welcome(), 0
        return connection

    def work() -> None:
        while not done.is_set():
            release(up, acquire(up))

    last: list[Connection] = []
    serving = threading.Thread(target=lambda: last.append(serve()))
    serving.start()
    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    while len(agent.connections) < 10:
        workers[0].join(0.01)
    done.set()
    for worker in workers:
        worker.join()
    while serving.is_alive():
        up.table().ring()
        serving.join(0.01)
    assert last[0].scopes() == ["kept"]
    up.close()


class TestWithoutSharedMemory:
    """With a kernel before 3.17, or a filter of system calls, timers are sent as messages."""

    @pytest.fixture(autouse=True)
    def no_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> int:
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr("rallypoint.timer.worker.table.os.memfd_create", refuse)

    def test_each_change_is_sent(self, agent: Agent) -> None:
        """Messages are sent for timers, their ends, timers that learn, and progress."""
        up = AgentConnection(agent.path, 1.0)
        since = time.monotonic()
        first = acquire(up, b"first", 60.5)
        acquire(up, b"auto", 0)
        release(up, first)
        up.table().progress(7, 5 * SECOND)
        up.table().ring()
        up.table().ring()
        one, two, *rest = agent.accept().waiting()
        assert isinstance(one, wire.Acquire)
        assert isinstance(two, wire.Acquire)
        assert (one.scope, one.after, two.scope, two.after) == ("first", 60.5, "auto", 0)
        assert since - 1e-3 <= one.since <= time.monotonic()
        assert rest == [wire.Release(one.token), wire.Progress(7, 5.0)]
        up.close()

    def test_a_new_connection_receives_all_held_timers(self, agent: Agent) -> None:
        """It gets no timer that ended while there was none."""
        clock = Clock()
        up = AgentConnection(agent.path, 1.0, clock)
        acquire(up, b"first")
        second = acquire(up, b"second")
        up.table().progress(3, 5 * SECOND)
        agent.accept().close()
        clock.now += 2 * SECOND
        release(up, second)
        acquire(up, b"third")
        told = agent.accept().waiting()
        assert [each.scope for each in told if isinstance(each, wire.Acquire)] == ["first", "third"]
        assert wire.Progress(3, 5.0) in told
        up.close()

    def test_an_agent_that_does_not_read_costs_one_write_timeout(self, agent: Agent) -> None:
        """Its queue fills up, one call waits, then the connection is closed and the agent sees timers end."""
        up = AgentConnection(agent.path, 0.05)
        acquire(up, b"outer")
        began = time.monotonic()
        for _ in range(3000):
            release(up, acquire(up))
        assert time.monotonic() - began < 3000 * 0.05 / 2, "each back-off may end in one wait, not each call"
        connection = agent.accept()
        while connection.receive() is not None:
            pass
        up.close()

    def test_a_signal_handler_that_raises_leaves_the_agent_no_timer_too_many(
        self, agent: Agent, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No later message would have the rest, so all is sent again."""
        up = AgentConnection(agent.path, 1.0)
        acquire(up, b"kept")
        slot = acquire(up, b"released")
        connection = agent.accept()
        assert len(connection.waiting()) == 2
        send, first_call = AgentSocket.send, iter([True])

        def strike(self: AgentSocket, message: bytes, descriptor: int = -1) -> None:
            if next(first_call, False):
                raise KeyboardInterrupt
            send(self, message, descriptor)

        monkeypatch.setattr(AgentSocket, "send", strike)
        with pytest.raises(KeyboardInterrupt):
            release(up, slot)
        assert connection.receive() is None
        up.table().ring()
        (told,) = agent.accept().waiting()
        assert isinstance(told, wire.Acquire)
        assert told.scope == "kept"
        up.close()


def test_more_timers_than_a_table_holds_are_counted(agent: Agent) -> None:
    """They are no error."""
    up = AgentConnection(agent.path, 1.0)
    for _ in range(SLOTS + 2):
        acquire(up)
    connection = agent.welcome()
    assert connection.table.dropped == 2
    assert len(connection.scopes()) == SLOTS
    up.close()


def test_the_wait_for_an_agent_that_does_not_accept_is_bounded(tmp_path: Path) -> None:
    """Its queue of connections is full, as when an agent is stopped."""
    agent = Agent(tmp_path / "s")
    agent.listener.listen(0)
    others = []
    for _ in range(3):
        try:
            others.append(link.AgentSocket(agent.path, 0.05, 0))
        except BlockingIOError:
            break
    up = AgentConnection(agent.path, 0.05)
    began = time.monotonic()
    release(up, acquire(up))
    assert time.monotonic() - began < PATIENCE
    assert up._link is None
    agent.close()
