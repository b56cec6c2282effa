"""Real worker processes and the agent's end of their timers: the agent knows exactly the timers that they hold."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from rallypoint.agent.hangs.hung_worker import HungWorker
from rallypoint.agent.sockets.timer_tables import TimerLimits
from rallypoint.agent.sockets.timers import TimerSocketError
from rallypoint.timer.client.client import ExpiredTimer
from rallypoint.timer.worker import wire
from rallypoint.worker.store import PREFIX
from support.timer_host import TimerHost, answer, asked, finished

pytestmark = pytest.mark.integration


class Host(TimerHost):
    """A host with a reaper of the test, and with the SOCK_STREAM socket too."""

    def __init__(self, path: Path, limits: TimerLimits | None = None) -> None:
        self.stream_path = path.with_name("stream")
        super().__init__(path, 40, stream_path=self.stream_path, limits=limits)
        self.reaper: Callable[[str], Awaitable[bool | None]] | None = None

    async def reap(self, hang: HungWorker) -> bool | None:
        self.expired.append(hang)
        return await self.reaper(hang.worker_id) if self.reaper else None

    def connect_stream(self) -> socket.socket:
        """Connect as `connect` does, to the SOCK_STREAM socket."""
        self.pids[os.getpid()] = "0@1"
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(str(self.stream_path))
        return connection


def frame(message: bytes) -> bytes:
    return encode_prefix(len(message)) + message


def encode_prefix(size: int, body: int = 0) -> bytes:
    return PREFIX.pack(size, body)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    host = Host(tmp_path / "s")
    async with host.listening():
        yield host


async def test_a_block_is_known_while_it_lasts(host: Host) -> None:
    """Its duration and start are known, and so are nested blocks."""
    began = time.monotonic()
    worker = await host.start(
        "with expires(60, 'outer'):\n    with expires(5, 'inner'):\n        ask()\n    ask()\nask()\n"
    )
    await asked(worker)
    await host.timers.until(lambda: host.timers.scopes() == ["inner", "outer"])
    _, after, since = host.timers.held["0@1", "outer"]
    assert after == 60
    assert began <= since <= time.monotonic()
    await answer(worker)
    await asked(worker)
    await host.timers.until(lambda: host.timers.scopes() == ["outer"])
    await answer(worker)
    await asked(worker)
    await host.timers.until(lambda: host.timers.scopes() == [])
    await answer(worker)
    await finished(worker)


async def test_equal_scopes_are_timers_of_their_own(host: Host) -> None:
    """This holds in threads, tasks and nested blocks; the end of one does not end another."""
    worker = await host.start(
        "async def task(go):\n"
        "    with expires(60, 's'):\n"
        "        await go.wait()\n"
        "async def tasks():\n"
        "    go = asyncio.Event()\n"
        "    running = [asyncio.create_task(task(go)) for _ in range(2)]\n"
        "    await asyncio.get_running_loop().run_in_executor(None, ask)\n"
        "    go.set()\n"
        "    await asyncio.gather(*running)\n"
        "def thread():\n"
        "    with expires(60, 's'):\n"
        "        gate.wait()\n"
        "gate = threading.Event()\n"
        "threads = [threading.Thread(target=thread) for _ in range(3)]\n"
        "for t in threads: t.start()\n"
        "with expires(60, 's'):\n"
        "    asyncio.run(tasks())\n"
        "    gate.set()\n"
        "    for t in threads: t.join()\n"
        "    ask('last')\n"
    )
    await asked(worker)
    await host.timers.until(lambda: len(host.timers.scopes()) == 6)
    assert host.timers.scopes() == ["s", "s~2", "s~3", "s~4", "s~5", "s~6"]
    await answer(worker)
    await asked(worker)
    await host.timers.until(lambda: len(host.timers.scopes()) == 1)
    await answer(worker)
    await finished(worker)
    await host.timers.until(lambda: host.timers.scopes() == [])


async def test_the_end_of_a_process_ends_its_timers(host: Host) -> None:
    """A worker that is killed inside a block leaves no timer that could expire."""
    worker = await host.start("with expires(60, 's'):\n    ask()\n")
    await asked(worker)
    await host.timers.until(lambda: host.timers.scopes() == ["s"])
    worker.kill()
    await host.timers.until(lambda: host.timers.scopes() == [])


async def test_a_worker_goes_on_when_its_agent_is_gone(host: Host) -> None:
    """It neither raises nor waits, and connects to an agent that comes back."""
    worker = await host.start(
        "with expires(60, 'before'):\n"
        "    ask()\n"
        "    began = time.monotonic()\n"
        "    for _ in range(10000):\n"
        "        with expires(60): pass\n"
        "    assert time.monotonic() - began < 60\n"
        "    ask()\n"
        "    for delay in range(1000):\n"
        "        with expires(60, 'after'):\n"
        "            time.sleep(0.01)\n"
    )
    await asked(worker)
    await host.timers.until(lambda: host.timers.scopes() == ["before"])
    await host.socket.stop()
    await answer(worker)
    await asked(worker)
    await host.socket.start()
    await answer(worker)
    await host.timers.until(lambda: {"before", "after"} <= set(host.timers.scopes()))


async def test_a_paused_agent_does_not_reap_a_worker_that_released(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The expiry arrives before the release was read: the agent reads the socket before it decides."""
    worker = await host.start("with expires(60, 's'):\n    ask()\nask('left')\n")
    await asked(worker)
    await host.timers.until(lambda: host.timers.scopes() == ["s"])
    sequence, after, _ = host.timers.held["0@1", "s"]
    # The agent gets no message of the worker while its event loop does not read.
    assert worker.stdin is not None
    assert worker.stdout is not None
    monkeypatch.setattr(host.socket, "_read", lambda _: None)
    for connection in host.socket._connections["0@1"]:
        asyncio.get_running_loop().remove_reader(connection.socket)
    await answer(worker)
    assert await asked(worker) == "left"
    assert host.timers.scopes() == ["s"]
    assert await host.timers.tell(ExpiredTimer("0@1", "s", after, 20.0, sequence)) is None
    assert host.expired == []
    assert host.timers.scopes() == []


async def test_a_worker_with_two_timers_run_out_is_reaped_once(host: Host) -> None:
    """The second expiry is checked after the first: the worker is dead by then, and its timers have ended."""
    worker = await host.start("with expires(1, 'a'), expires(1, 'b'):\n    ask()\n")
    await asked(worker)
    await host.timers.until(lambda: host.timers.scopes() == ["a", "b"])

    async def reap(worker_id: str) -> bool | None:
        worker.kill()
        await worker.wait()
        return None

    host.reaper = reap
    await asyncio.gather(host.timers.expire("0@1", "a"), host.timers.expire("0@1", "b"))
    assert [hang.scope for hang in host.expired] == ["a"]


async def test_a_failed_reaping_is_reported(host: Host) -> None:
    """So the service tries again."""

    async def fail(worker_id: str) -> bool | None:
        return False

    host.reaper = fail
    with host.connect() as connection:
        connection.send(wire.acquire(1, 0, 60.0, b"s"))
        await host.timers.until(lambda: host.timers.scopes() == ["s"])
        assert await host.timers.expire("0@1", "s") is False


async def test_a_hang_is_reported_with_all_known_data(host: Host) -> None:
    """The report has its process, the signal of its timer, and the scope in the worker's own words."""
    with host.connect() as connection:
        connection.send(wire.acquire(1, 0, 60.0, b"s"))
        connection.send(wire.acquire(2, 0, 60.0, b"s", signal.SIGUSR1))
        connection.send(wire.acquire(3, 0, 60.0, b"s", wire.NO_SIGNAL))
        await host.timers.until(lambda: host.timers.scopes() == ["s", "s~2", "s~3"])
        for scope in host.timers.scopes():
            await host.timers.expire("0@1", scope)
        told = ExpiredTimer("0@1", "s~2", 7.5, 0.25, host.timers.held["0@1", "s~2"][0], learned_from=30)
        await host.timers.tell(told)
    assert [(hang.scope, hang.pid, hang.signal) for hang in host.expired] == [
        ("s", os.getpid(), 0),
        ("s", os.getpid(), signal.SIGUSR1),
        ("s", os.getpid(), None),
        ("s", os.getpid(), signal.SIGUSR1),
    ]
    hang = host.expired[-1]
    assert (hang.worker_id, hang.after, hang.late_by, hang.learned_from) == ("0@1", 7.5, 0.25, 30)
    assert hang.cpu_seconds is not None
    assert 0 < hang.cpu_seconds <= time.process_time()


async def test_how_long_a_scope_takes_is_learned_from_releases(host: Host) -> None:
    """Released timers count, under their own name; timers that were dropped do not."""
    with host.connect() as connection:
        for token in (1, 2):
            connection.send(wire.acquire(token, 0, 0.0, b"s"))
        connection.send(wire.acquire(3, 0, 60.0, b"given"))
        await host.timers.until(lambda: host.timers.scopes() == ["given", "s", "s~2"])
        assert host.timers.learned_as == {("0@1", "s"): "s", ("0@1", "s~2"): "s", ("0@1", "given"): ""}
        connection.send(wire.release(2))
        await host.timers.until(lambda: host.timers.scopes() == ["given", "s"])
        connection.send(bytes([3, 1]) + bytes(6))
        await host.timers.until(lambda: host.timers.scopes() == [])
    assert host.timers.completed == [("0@1", "s~2")]


async def test_a_busy_worker_is_followed(host: Host) -> None:
    """Two threads run at full speed: the agent sees no timer that did not exist, reports each completion in the
    table once, and no timer is left at the end."""
    worker = await host.start(
        "def work(scope):\n"
        "    for _ in range(5000):\n"
        "        with expires('auto', scope), expires(60, 'inner'):\n"
        "            pass\n"
        "threads = [threading.Thread(target=work, args=(scope,)) for scope in ('a', 'b')]\n"
        "with expires(60, 'outer'):\n"
        "    ask()\n"
        "    for t in threads: t.start()\n"
        "    for t in threads: t.join()\n"
        "    ask()\n"
        "ask()\n"
    )
    for _ in range(2):
        await asked(worker)
        await host.timers.until(lambda: host.timers.scopes() == ["outer"])
        await answer(worker)
    await asked(worker)
    await host.timers.until(lambda: host.timers.scopes() == [])
    assert {scope for _, scope in host.timers.acquired} <= {"outer", "a", "b", "inner", "inner~2"}
    assert host.timers.acquired.count(("0@1", "outer")) == 1
    (table,) = host.socket._tables._open
    seen = {each.scope.decode(): each for each in table._reader.observations()}
    for scope in ("a", "b"):
        told = [(count, longest) for name, count, longest in host.timers.observed if name == scope]
        assert 0 < sum(count for count, _ in told) == seen[scope].completions <= 5000
        assert max(longest for _, longest in told) == pytest.approx(seen[scope].longest / 1e9)
    await answer(worker)
    await finished(worker)


async def test_progress_is_reported_under_the_workers_global_rank(host: Host) -> None:
    """The report has the time of the step, from any process of the worker."""
    began = time.monotonic()
    with host.connect() as connection:
        connection.send(wire.progress(7, 0))
        connection.send(wire.progress(8, int(began * 1e9)))
        await host.timers.until(lambda: len(host.timers.steps) == 2)
    first, second = host.timers.steps
    assert first[:3] == ("0@1", 40, 7)
    assert first[3] >= began
    assert second[:3] == ("0@1", 40, 8)
    assert second[3] == pytest.approx(began, abs=1e-6)


async def test_unexpected_descriptors_are_closed(host: Host) -> None:
    """A worker that sends them with another message costs the agent none."""
    with host.connect() as connection:
        reading, writing = os.pipe()
        socket.send_fds(connection, [wire.acquire(1, 0, 60.0, b"s")], [writing] * 3)
        os.close(writing)
        await host.timers.until(lambda: host.timers.scopes() == ["s"])
        # The agent's copies were the last.
        assert os.read(reading, 1) == b""
        os.close(reading)


async def test_an_unknown_process_is_refused(host: Host) -> None:
    """The kernel identifies the process, so its messages do not matter."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(host.path))
    connection.setblocking(False)
    connection.send(wire.acquire(1, 0, 60.0, b"s"))
    await readable(connection)
    with pytest.raises(OSError, match="reset"):
        connection.recv(1)
    assert host.timers.acquired == []
    connection.close()


async def test_a_worker_that_connects_before_it_is_known_is_guarded_once_it_is(host: Host) -> None:
    """On a busy host a worker can connect before the agent has processed its start."""
    connection = host.connect()
    host.pids.clear()
    connection.send(wire.acquire(1, time.monotonic_ns(), 60.0, b"early"))
    await asyncio.sleep(0)
    assert host.timers.scopes() == []
    host.pids[os.getpid()] = "0@1"
    host.socket.introduce()
    await host.timers.until(lambda: host.timers.scopes() == ["early"])
    connection.close()


async def test_a_process_that_cannot_be_looked_up_is_refused(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the look-up closes that connection, and the agent accepts the next one."""

    def fail(pid: int) -> str | None:
        monkeypatch.undo()
        raise ProcessLookupError(pid)

    monkeypatch.setattr(host, "worker_of", fail)
    with host.connect() as connection, host.connect() as another:
        connection.setblocking(False)
        await readable(connection)
        assert connection.recv(1) == b""
        another.send(wire.acquire(1, 0, 60.0, b"s"))
        await host.timers.until(lambda: host.timers.scopes() == ["s"])


async def readable(connection: socket.socket) -> None:
    loop, seen = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, seen.set)
    await seen.wait()
    loop.remove_reader(connection)


async def test_reacquiring_a_token_replaces_its_timer(host: Host) -> None:
    """The same scope keeps the name at the service, another scope gets a new one."""
    with host.connect() as connection:
        connection.send(wire.acquire(1, 0, 60.0, b"s"))
        connection.send(wire.acquire(1, 0, 5.0, b"s"))
        await host.timers.until(lambda: len(host.timers.acquired) == 2)
        assert host.timers.held["0@1", "s"][1] == 5.0
        connection.send(wire.acquire(1, 0, 5.0, b"t"))
        await host.timers.until(lambda: host.timers.scopes() == ["t"])
        connection.send(wire.release(7))
        connection.send(bytes([3, 1]) + bytes(6))
        await host.timers.until(lambda: host.timers.scopes() == [])


async def test_a_beginning_in_the_future_is_now(host: Host) -> None:
    """A worker can't get more time than its timeout."""
    with host.connect() as connection:
        connection.send(wire.acquire(1, 2**63, 60.0, b"s"))
        await host.timers.until(lambda: host.timers.scopes() == ["s"])
        assert host.timers.held["0@1", "s"][2] <= time.monotonic()


@pytest.mark.parametrize("message", [b"x", b"\x01\x01" + bytes(400), wire.acquire(1, 0, 60.0, b"x" * 257)])
async def test_a_malformed_message_ends_the_connection_and_its_timers(host: Host, message: bytes) -> None:
    """The messages after it can't be trusted."""
    with host.connect() as connection:
        connection.send(wire.acquire(1, 0, 60.0, b"s"))
        await host.timers.until(lambda: host.timers.scopes() == ["s"])
        connection.send(message)
        await host.timers.until(lambda: host.timers.scopes() == [])


async def test_bounds_of_a_worker(tmp_path: Path) -> None:
    """Timers and connections above the limits are not guarded and cost nothing; the end of one makes room."""
    host = Host(tmp_path / "s", TimerLimits(timers=2, connections=2))
    await host.socket.start()
    with host.connect() as first, host.connect() as second, host.connect() as third:
        first.send(wire.acquire(1, 0, 60.0, b"a"))
        await host.timers.until(lambda: len(host.timers.acquired) == 1)
        second.send(wire.acquire(1, 0, 60.0, b"b"))
        await host.timers.until(lambda: len(host.timers.acquired) == 2)
        second.send(wire.acquire(2, 0, 60.0, b"c"))
        second.send(wire.release(1))
        second.send(wire.acquire(3, 0, 60.0, b"d"))
        await host.timers.until(lambda: host.timers.scopes() == ["a", "d"])
        third.setblocking(False)
        await readable(third)
        assert third.recv(1) == b""
    await host.timers.until(lambda: host.timers.scopes() == [])
    await host.socket.stop()


async def test_a_worker_that_is_cleared_is_cut_off(host: Host) -> None:
    """Its timers end at the service too, with those that it acquired there itself."""
    connection = host.connect()
    connection.send(wire.acquire(1, 0, 60.0, b"s"))
    await host.timers.until(lambda: host.timers.scopes() == ["s"])
    host.socket.clear("0@1")
    assert host.timers.scopes() == []
    assert host.timers.cleared == ["0@1"]
    assert connection.recv(1) == b""
    connection.close()


async def test_a_stream_carries_the_same_messages(host: Host) -> None:
    """They may arrive in pieces, several at once, and beside a connection of the other form."""
    with host.connect_stream() as stream, host.connect() as other:
        other.send(wire.acquire(1, 0, 60.0, b"packet"))
        for byte in frame(wire.acquire(1, 0, 60.0, b"pieces")):
            stream.send(bytes([byte]))
            await asyncio.sleep(0)
        await host.timers.until(lambda: host.timers.scopes() == ["packet", "pieces"])
        two, three = wire.acquire(2, 0, 5.0, b"two"), wire.acquire(3, 0, 5.0, b"three")
        stream.send(b"".join(map(frame, (wire.release(1), two, three, wire.progress(7, 1)))))
        await host.timers.until(lambda: host.timers.scopes() == ["packet", "three", "two"])
        await host.timers.until(lambda: [step[:3] for step in host.timers.steps] == [("0@1", 40, 7)])
    await host.timers.until(lambda: host.timers.scopes() == [])


async def test_a_part_of_a_frame_delays_no_other_timer(host: Host) -> None:
    """It does not delay the check of an expired timer either. At the end of the connection it is dropped."""
    with host.connect_stream() as stream, host.connect_stream() as other:
        half = frame(wire.acquire(1, 0, 60.0, b"half"))[:-1]
        stream.send(frame(wire.acquire(2, 0, 60.0, b"whole")) + half)
        other.sendall(b"".join(frame(wire.acquire(n % 7 + 1, 0, 60.0, b"%d" % (n % 7))) for n in range(700)))
        await host.timers.until(lambda: len(host.timers.scopes()) == 8)
        expired = host.timers.expired("0@1", "whole")
        assert await host.timers.tell(expired) is None
        assert [hang.scope for hang in host.expired] == ["whole"]
        stream.close()
        await host.timers.until(lambda: "whole" not in host.timers.scopes())
    assert "half" not in {scope for _, scope in host.timers.acquired}


async def test_a_release_that_waits_in_a_stream_is_read_before_the_decision(host: Host) -> None:
    """It may be behind as many messages as the kernel's queue can hold."""
    with host.connect_stream() as stream:
        stream.send(frame(wire.acquire(1, 0, 60.0, b"s")))
        await host.timers.until(lambda: host.timers.scopes() == ["s"])
        clear = frame(bytes([9, 1]) + bytes(6))
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**30)
        stream.setblocking(False)
        sent = stream.send(clear * 26_000)
        assert sent > 100_000
        stream.setblocking(True)
        stream.send(clear[-(-sent % len(clear)) :] if sent % len(clear) else b"")
        stream.send(frame(wire.release(1)))
        assert await host.timers.tell(host.timers.expired("0@1", "s")) is None
        assert host.expired == []


@pytest.mark.parametrize(
    "sent",
    [
        encode_prefix(0),
        encode_prefix(289),
        encode_prefix(2**32 - 1),
        encode_prefix(16, 1) + wire.release(7) + b"x",
        encode_prefix(7) + wire.release(1)[:7],
        frame(wire.TABLE),
    ],
)
async def test_a_malformed_frame_ends_its_connection_and_no_other(host: Host, sent: bytes) -> None:
    with host.connect_stream() as stream, host.connect_stream() as other:
        other.send(frame(wire.acquire(1, 0, 60.0, b"other")))
        stream.send(frame(wire.acquire(1, 0, 60.0, b"s")))
        await host.timers.until(lambda: host.timers.scopes() == ["other", "s"])
        stream.send(sent)
        await host.timers.until(lambda: host.timers.scopes() == ["other"])


async def test_streams_have_the_same_checks_and_limits(tmp_path: Path) -> None:
    """An unknown process is refused; connections of both forms count together."""
    host = Host(tmp_path / "s", TimerLimits(connections=2, introduction=0.1))
    await host.socket.start()
    with host.connect_stream() as stranger:
        host.pids.clear()
        stranger.setblocking(False)
        await readable(stranger)
        assert stranger.recv(1) == b""
    with host.connect_stream() as first, host.connect() as second:
        first.send(frame(wire.acquire(1, 0, 60.0, b"a")))
        second.send(wire.acquire(1, 0, 60.0, b"b"))
        await host.timers.until(lambda: host.timers.scopes() == ["a", "b"])
        with host.connect_stream() as third:
            third.setblocking(False)
            await readable(third)
            assert third.recv(1) == b""
    await host.socket.stop()
    assert os.listdir(tmp_path) == []


async def test_a_path_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """The error has one line, and is raised before any worker is started."""
    host = Host(tmp_path / "no" / "s")
    with pytest.raises(TimerSocketError, match="No such file") as caught:
        await host.socket.start()
    assert "\n" not in str(caught.value)
