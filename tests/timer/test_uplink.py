"""The worker's connection never raises and never waits for long, and loses no release."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.timer import uplink, wire
from rallypoint.timer.uplink import Uplink

# Far more than a call may take that doesn't wait for the agent, far less than one that waits for ever.
SOON = 20.0


class Agent:
    """The other end, as far as a worker can tell."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(self.path)
        self.listener.listen()
        self.listener.settimeout(SOON)
        self.connections: list[socket.socket] = []

    def accept(self) -> socket.socket:
        connection, _ = self.listener.accept()
        connection.settimeout(SOON)
        self.connections.append(connection)
        return connection

    def close(self) -> None:
        for each in (*self.connections, self.listener):
            each.close()


def receive(connection: socket.socket) -> object:
    """The next message; None at the end."""
    message = connection.recv(1000)
    return wire.decode(message) if message else None


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    agent = Agent(tmp_path / "s")
    yield agent
    agent.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The uplink's clock, in the test's hand."""
    now = [1000.0]
    monkeypatch.setattr("rallypoint.timer.uplink.time.monotonic", lambda: now[0])
    return iter([now])


def test_tells_what_is_acquired_and_released(agent: Agent) -> None:
    """In order, with CLOCK_MONOTONIC's word for the beginning."""
    up = Uplink(agent.path, 1.0)
    before = time.monotonic()
    token = up.acquire(60.0, b"s")
    up.release(token)
    connection = agent.accept()
    acquired = receive(connection)
    assert isinstance(acquired, wire.Acquire)
    assert before - 1e-6 <= acquired.since <= time.monotonic()
    assert (acquired.token, acquired.after, acquired.scope) == (token, 60.0, "s")
    assert receive(connection) == wire.Release(token)
    up.close()
    assert receive(connection) is None


def test_without_an_agent_nothing_happens(tmp_path: Path) -> None:
    """No exception, and after the first failures no system call either until the back-off is over."""
    up = Uplink(str(tmp_path / "nobody"), 1.0)
    for _ in range(1000):
        up.release(up.acquire(1.0, b"s"))
    assert up._retry_at > time.monotonic() - 1
    assert up._held == {}


@pytest.mark.parametrize("path", ["", "x" * 200, "zero\0byte"])
def test_a_path_that_nobody_can_listen_on_is_like_no_agent(path: str) -> None:
    """Bad settings surface where they are made, not in the middle of training."""
    up = Uplink(path, 1.0)
    up.release(up.acquire(1.0, b"s"))


def test_out_of_descriptors_is_like_no_agent(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has used up its files goes on."""

    def refuse(*_: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("rallypoint.timer.uplink.socket.socket", refuse)
    up = Uplink(agent.path, 1.0)
    up.release(up.acquire(1.0, b"s"))


def test_back_off_doubles_to_its_maximum(tmp_path: Path, clock: Iterator[list[float]]) -> None:
    """0.1 s, 0.2 s … 5 s; meanwhile nobody tries."""
    now = next(clock)
    up = Uplink(str(tmp_path / "nobody"), 1.0)
    waits = []
    for _ in range(8):
        up.acquire(1.0, b"s")
        waits.append(round(up._retry_at - now[0], 3))
        tried = up._retry_at
        up.acquire(1.0, b"s")
        assert up._retry_at == tried
        now[0] = tried
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_a_new_connection_is_told_all_that_is_held(agent: Agent, clock: Iterator[list[float]]) -> None:
    """With the original beginning; what ended while there was no connection is not told."""
    now = next(clock)
    up = Uplink(agent.path, 1.0)
    first, second = up.acquire(60.0, b"first"), up.acquire(60.0, b"second")
    connection = agent.accept()
    told = [receive(connection), receive(connection)]
    now[0] += 10
    connection.close()
    up.release(second)
    third = up.acquire(60.0, b"third")
    again = agent.accept()
    renewed = [receive(again), receive(again)]
    assert renewed[0] == told[0]
    assert [each.token for each in renewed if isinstance(each, wire.Acquire)] == [first, third]
    up.close()
    assert receive(again) is None


def test_an_agent_that_does_not_read_costs_the_patience_once(agent: Agent) -> None:
    """Its queue fills up, one call waits, then the connection is given up and the agent sees all timers end."""
    up = Uplink(agent.path, 0.05)
    outer = up.acquire(60.0, b"outer")
    began = time.monotonic()
    for _ in range(3000):
        up.release(up.acquire(60.0, b"s"))
    assert time.monotonic() - began < 3000 * 0.05 / 5, "each back-off may end in one wait, not each call"
    connection = agent.accept()
    while receive(connection) is not None:
        pass
    up.release(outer)
    up.close()


def test_a_connection_is_closed_only_when_no_thread_can_send_on_it(agent: Agent) -> None:
    """A descriptor number that is free too early belongs to another file by the time a thread sends on it."""
    up = Uplink(agent.path, 1.0)
    up.acquire(60.0, b"s")
    link = up._link
    assert link is not None
    descriptor = link._socket.fileno()
    up.close()
    assert up._link is None
    assert os.fstat(descriptor)
    assert isinstance(receive(agent.accept()), wire.Acquire)
    del link
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(descriptor)


def test_a_release_while_another_thread_connects_is_told(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds no link yet, and the timer is on its way to the agent already: who connects must tell."""
    up = Uplink(agent.path, 1.0)
    up._retry_at = float("inf")
    outer = up.acquire(60.0, b"outer")
    up._retry_at = 0.0
    connect = uplink._connect

    def connect_slowly(path: str, patience: float) -> uplink._Link:
        link = connect(path, patience)
        send = link.send

        def send_and_release(message: bytes, flags: int) -> int:
            sent = send(message, flags)
            releasing = threading.Thread(target=up.release, args=(outer,))
            releasing.start()
            releasing.join()
            return sent

        link.send = send_and_release
        return link

    monkeypatch.setattr(uplink, "_connect", connect_slowly)
    up.acquire(60.0, b"inner")
    up.close()
    connection = agent.accept()
    seen = []
    while (message := receive(connection)) is not None:
        seen.append(message)
    assert wire.Release(outer) in seen


def test_threads_lose_no_release_while_the_connection_breaks(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the agent still believes to be held at the end is held."""
    monkeypatch.setattr(uplink, "_LIVED", 0.0)
    up = Uplink(agent.path, 1.0)
    stop = threading.Event()
    believed: set[int] = set()

    def serve() -> None:
        """Takes messages of one connection after another, and cuts each after 50; the last one is kept."""
        while True:
            connection = agent.accept()
            believed.clear()
            taken = 0
            while stop.is_set() or taken < 50:
                message = receive(connection)
                if message is None:
                    break
                taken += 1
                if isinstance(message, wire.Acquire):
                    if message.scope == "end":
                        return
                    believed.add(message.token)
                elif isinstance(message, wire.Release):
                    believed.discard(message.token)
            connection.close()

    def work() -> None:
        for _ in range(1500):
            up.release(up.acquire(60.0, b"s"))

    serving = threading.Thread(target=serve)
    serving.start()
    kept = up.acquire(60.0, b"kept")
    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    stop.set()
    while serving.is_alive():
        up.acquire(60.0, b"end")
        serving.join(0.05)
    assert believed <= {kept, *up._held}
    assert len(agent.connections) > 5, "the connection hardly broke: this shows nothing"
    up.close()


def test_a_signal_handler_that_raises_leaves_no_timer_behind(agent: Agent) -> None:
    """Whether it strikes while acquiring or while releasing: rather no timer than one that nobody ends."""
    up = Uplink(agent.path, 1.0)
    kept = up.acquire(60.0, b"kept")
    link = up._link
    assert link is not None
    send = link.send
    struck: list[bytes] = []

    def strike(message: bytes, flags: int) -> int:
        if not struck:
            struck.append(message)
            raise KeyboardInterrupt
        return send(message, flags)

    link.send = strike
    with pytest.raises(KeyboardInterrupt):
        up.acquire(60.0, b"s")
    assert list(up._held) == [kept]
    struck.clear()
    with pytest.raises(KeyboardInterrupt):
        up.release(kept)
    assert up._held == {}
    connection = agent.accept()
    while receive(connection) is not None:
        pass
