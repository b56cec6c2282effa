"""torch's own file timer is guarded like any other timer, in a worker that uses no other client."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rallypoint.agent.sockets.timer_tables import LONGEST, Holders, TimerLimits
from rallypoint.agent.sockets.torch_timers import MalformedRequest, TimerFifo, TimerRequest, parse
from rallypoint.agent.spawner.spawner import descendants
from rallypoint.timer.worker.wire import NO_SIGNAL
from support.host_workers import HostWorkers
from support.remembered_timers import RememberedTimers
from support.timer_host import TimerHost
from support.waiting import until

WALL = 1_700_000_000.0


def line(**changes: Any) -> bytes:
    """A request as torch 2.13 writes it."""
    request = {
        "version": 1,
        "pid": os.getpid(),
        "scope_id": "train.py#12",
        "expiration_time": WALL + 60,
        "signal": 9,
    }
    return json.dumps({**request, **changes}).encode()


def test_a_line_of_torchs_client_is_understood() -> None:
    """An invalid signal number means that no process is killed; of a long scope, the end is kept."""
    assert parse(line()) == TimerRequest(os.getpid(), "train.py#12", WALL + 60, 9)
    assert parse(line(expiration_time=-1, signal=0)) == TimerRequest(
        os.getpid(), "train.py#12", -1, NO_SIGNAL
    )
    assert parse(line(signal=-5)).signal == NO_SIGNAL
    assert parse(line(scope_id="x" * 300 + "train.py#12")).scope == "x" * 245 + "train.py#12"
    assert parse(line(scope_id="")).scope == "?"
    assert parse(line(scope_id="\ud800")).scope == "?"
    assert parse(line(scope_id="\u20ac" * 100)).scope == "\u20ac" * 85


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "JSON object"),
        (b"{", "JSON object"),
        (b"\xff", "JSON object"),
        (b"[" * 100_000, "JSON object"),
        (b"[1]", "not list"),
        (line(pid="1"), "pid"),
        (line(pid=True), "pid"),
        (line(scope_id=None), "scope_id"),
        (line(expiration_time="soon"), "expiration_time"),
        (line(expiration_time=float("nan")), "expiration_time"),
        (line(expiration_time=10**400), "expiration_time"),
        (line(signal=9.5), "signal"),
        (line(signal=65), "signal"),
    ],
    ids=map(str, itertools.count()),
)
def test_an_invalid_request_names_the_field(text: bytes, says: str) -> None:
    """The error names the field and the expected type."""
    with pytest.raises(MalformedRequest, match=says):
        parse(text)


class Host(HostWorkers):
    """An agent's pipe, with clocks of the test."""

    def __init__(self, path: Path) -> None:
        """Build a host; this process is its worker, and so are its children."""
        super().__init__({os.getpid(): "0@1"})
        self.path = path
        self.now, self.wall = 1000.0, WALL
        self.timers = RememberedTimers()
        limits = TimerLimits(introduction=0.05)
        self.holders = Holders(
            self.timers, rank_of=lambda worker: None, limits=limits, clock=lambda: self.now
        )
        self.fifo = TimerFifo(path, self.holders, self, 0, wall_clock=lambda: self.wall)

    def write(self, *lines: bytes) -> None:
        """Write requests as torch's client does: it opens the pipe, writes and closes it for each."""
        for each in lines:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
            os.write(descriptor, each + b"\n")
            os.close(descriptor)

    def release(self, **changes: Any) -> bytes:
        """The end of a timer."""
        return line(**{"expiration_time": -1, "signal": 0, **changes})


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    """A pipe that is read."""
    host = Host(tmp_path / "torch")
    host.fifo.start()
    yield host
    host.fifo.stop()


async def test_the_pipe_is_the_agents_alone(host: Host) -> None:
    """No other user can write to it; it has a large buffer, and is removed with its agent."""
    status = os.stat(host.path)
    assert stat.S_ISFIFO(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert fcntl.fcntl(host.fifo._pipe, fcntl.F_GETPIPE_SZ) >= 65536
    host.fifo.stop()
    host.fifo.stop()
    assert list(host.path.parent.iterdir()) == []


async def test_a_timer_lasts_from_when_it_is_read(host: Host) -> None:
    """It lasts for the rest of the time that torch named; another start replaces it, a release ends it."""
    host.write(line())
    await host.timers.until(lambda: host.timers.scopes() == ["train.py#12"])
    assert host.timers.held["0@1", "train.py#12"] == (1, 60.0, 1000.0)
    host.wall, host.now = WALL + 1, 1001.0
    host.write(line(expiration_time=WALL + 6), host.release(scope_id="never"))
    await host.timers.until(lambda: len(host.timers.acquired) == 2)
    assert host.timers.held == {("0@1", "train.py#12"): (2, 5.0, 1001.0)}
    # It has expired before; its timeout is the shortest.
    host.write(line(expiration_time=WALL - 100))
    await host.timers.until(lambda: len(host.timers.acquired) == 3)
    assert host.timers.held["0@1", "train.py#12"][1] == 0.01
    host.write(line(expiration_time=1e300))
    await host.timers.until(lambda: len(host.timers.acquired) == 4)
    assert host.timers.held["0@1", "train.py#12"][1] == LONGEST
    host.write(host.release())
    await host.timers.until(lambda: host.timers.scopes() == [])


async def test_an_invalid_request_is_skipped(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    """The lines around it are read, and the log is not flooded."""
    os.write(host.fifo._pipe, b"x" * 5000)
    host.fifo._drain()
    host.write(b"rest of it", *[b"{}"] * 50, line(), line(pid=1, scope_id="stranger's"))
    await host.timers.until(lambda: host.timers.scopes() == ["train.py#12"])
    assert "more than 4096 bytes" in caplog.text
    assert caplog.text.count("skipped a line of torch's timer file") == 10
    assert caplog.text.count("will not be logged") == 1


async def test_a_line_may_come_in_pieces(host: Host) -> None:
    """A read may end anywhere."""
    whole = line() + b"\n"
    os.write(host.fifo._pipe, whole[:20])
    host.fifo._drain()
    os.write(host.fifo._pipe, whole[20:] + whole[:7])
    host.fifo._drain()
    assert host.timers.scopes() == ["train.py#12"]


async def test_a_process_that_is_not_known_yet_is_guarded_once_it_is(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    """Its lines are processed in sequence; those of a process that stays unknown are dropped."""
    known, host.pids = host.pids, {}
    host.write(line(), line(scope_id="b"), host.release(), line(pid=1))
    await until(lambda: len(host.fifo._waiting) == 4)
    host.pids = known
    host.fifo.introduce()
    assert host.timers.scopes() == ["b"]
    host.now += 1
    await until(lambda: host.fifo._waiting == [])
    assert caplog.text.count("neither this worker nor a descendant of it") == 1


async def test_requests_written_before_a_process_was_known_come_first(host: Host) -> None:
    """Otherwise the start of a timer would be processed after its end, and kill a worker that is done."""
    known, host.pids = host.pids, {}
    host.write(line())
    await until(lambda: len(host.fifo._waiting) == 1)
    host.pids = known
    host.write(host.release(), line(scope_id="b"))
    host.fifo.read_requests()
    host.fifo.introduce()
    assert host.timers.scopes() == ["b"]


async def test_only_the_worker_and_its_descendants_are_believed(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    """A line that names another worker's process would have that one killed. The log reports some of them."""
    mine, other = [
        await asyncio.create_subprocess_exec("sh", "-c", "cat; exit", stdin=subprocess.PIPE) for _ in range(2)
    ]
    host.pids = {mine.pid: "0@1"}
    (grandchild,) = await _children(mine.pid)
    host.write(line(scope_id="a", pid=mine.pid), line(scope_id="b", pid=grandchild))
    host.write(*[line(pid=pid) for pid in (other.pid, os.getpid(), 1, 0, -1, 2**40) for _ in range(5)])
    await until(lambda: len(host.fifo._waiting) == 30)
    assert host.timers.scopes() == ["a", "b"]
    host.now += 1
    host.fifo.introduce()
    assert host.timers.scopes() == ["a", "b"]
    assert caplog.text.count("neither this worker nor a descendant of it") == 10
    for each in (mine, other):
        assert each.stdin is not None
        each.stdin.close()
        await each.wait()


async def _children(pid: int) -> list[int]:
    await until(lambda: bool(descendants(pid)))
    return [process.pid for process in descendants(pid)]


NAMESPACE = """
import json, os, sys
if os.fork() == 0:
    request = json.loads(sys.argv[1])
    assert os.getpid() == 2
    with open(sys.argv[2], "wb", buffering=0) as pipe:
        pipe.write(json.dumps({**request, "pid": os.getpid()}).encode() + b"\\n")
    sys.stdin.read()
    os._exit(0)
os.wait()
"""


def _unshare(*program: str) -> list[str]:
    return ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", *program]


needs_namespaces = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(_unshare("true"), check=False).returncode != 0,
    reason="this machine gives no pid namespace",
)


@needs_namespaces
async def test_a_process_in_a_pid_namespace_of_its_own_is_guarded(host: Host) -> None:
    """Its own PID differs from the one that the agent sees, and may be that of another worker's process here."""
    program = _unshare(sys.executable, "-c", NAMESPACE, line().decode(), str(host.path))
    process = await asyncio.create_subprocess_exec(*program, stdin=subprocess.PIPE)
    host.pids = {process.pid: "0@1"}
    await host.timers.until(lambda: host.timers.scopes() == ["train.py#12"])
    (held,) = [known.holder.pid for known in host.fifo._processes.values()]
    assert held != 2
    assert [each.pid for each in descendants(process.pid)][-1] == held
    host.write(host.release(pid=2, scope_id="another"), line(pid=2, scope_id="b"))
    await host.timers.until(lambda: host.timers.scopes() == ["b", "train.py#12"])
    os.kill(held, signal.SIGKILL)
    await host.timers.until(lambda: host.timers.scopes() == [])
    await process.wait()


@needs_namespaces
async def test_of_two_namespaces_with_the_same_number_none_is_believed(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    """Its timers would end with the wrong process, and the wrong one would be examined."""
    script = " ".join(_unshare("sleep", "60"))
    process = await asyncio.create_subprocess_exec("sh", "-c", f"{script} & {script}")
    host.pids = {process.pid: "0@1"}
    await until(lambda: _sleeping(process.pid) == 2)
    host.write(line(pid=1))
    await until(lambda: len(host.fifo._waiting) == 1)
    host.now += 1
    host.fifo.introduce()
    assert host.timers.scopes() == []
    assert "neither this worker nor a descendant of it" in caplog.text
    for each in descendants(process.pid):
        with suppress(ProcessLookupError):
            os.kill(each.pid, signal.SIGKILL)
    await process.wait()


def _sleeping(root: int) -> int:
    commands = [Path(f"/proc/{each.pid}/cmdline").read_bytes() for each in descendants(root)]
    return sum(command.startswith(b"sleep") for command in commands)


async def test_a_process_of_a_worker_has_timers_of_its_own(host: Host) -> None:
    """So they have with equal scopes; they end with the process, or with its worker."""
    child = await asyncio.create_subprocess_exec("cat", stdin=subprocess.PIPE)
    host.write(line(), line(pid=child.pid))
    await host.timers.until(lambda: host.timers.scopes() == ["train.py#12", "train.py#12~2"])
    child.kill()
    await host.timers.until(lambda: host.timers.scopes() == ["train.py#12"])
    await child.wait()
    host.fifo.clear("1@1")
    assert host.timers.scopes() == ["train.py#12"]
    host.fifo.clear("0@1")
    assert host.timers.scopes() == []


@pytest.mark.parametrize("watched", [True, False])
async def test_a_read_drops_ended_timers_and_processes(
    host: Host, monkeypatch: pytest.MonkeyPatch, watched: bool
) -> None:
    """Then the timers of an ended process are dropped, with or without a pidfd."""
    child = await asyncio.create_subprocess_exec("cat", stdin=subprocess.PIPE)
    if not watched:
        monkeypatch.setattr(os, "pidfd_open", _fail)
    host.write(line(scope_id="a"), line(scope_id="b"), line(pid=child.pid))
    host.fifo.read_requests()
    assert host.timers.scopes() == ["a", "b", "train.py#12"]
    host.write(host.release(scope_id="a"))
    child.kill()
    await child.wait()
    host.fifo.read_requests()
    assert host.timers.scopes() == ["b"]


def _fail(pid: int) -> int:
    raise OSError("no pidfd")


async def test_processes_with_timers_are_bounded(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """So are those with connections: each costs the agent a descriptor."""
    monkeypatch.setattr(host.holders, "limits", TimerLimits(connections=1, introduction=0.0))
    child = await asyncio.create_subprocess_exec("cat", stdin=subprocess.PIPE)
    host.write(line(), line(pid=child.pid))
    host.fifo.read_requests()
    assert host.timers.scopes() == ["train.py#12"]
    child.kill()
    await child.wait()


class Agent(TimerHost):
    """A whole timer socket with a pipe beside it."""

    def __init__(self, folder: Path) -> None:
        self.pipe = folder / "torch"
        super().__init__(folder / "s", fifos=[self.pipe])


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Agent]:
    """An agent that listens."""
    agent = Agent(tmp_path)
    async with agent.listening():
        yield agent
    assert os.listdir(tmp_path) == []


async def test_a_hang_has_the_signal_that_torchs_client_requested(agent: Agent) -> None:
    """SIGKILL comes in any case, so no signal is sent before it; without a signal no process is killed."""
    agent.pids = {os.getpid(): "0@1"}
    numbers = {"a": signal.SIGKILL, "b": signal.SIGUSR1, "c": 0, "gone": signal.SIGKILL}
    with agent.pipe.open("wb", buffering=0) as pipe:
        for scope, number in numbers.items():
            pipe.write(line(scope_id=scope, signal=number, expiration_time=time.time() + 60) + b"\n")
        await agent.timers.until(lambda: agent.timers.scopes() == ["a", "b", "c", "gone"])
        told = [agent.timers.expired("0@1", scope) for scope in numbers]
        pipe.write(line(scope_id="gone", expiration_time=-1) + b"\n")
        for each in told:
            await agent.timers.tell(each)
    assert [(hang.scope, hang.pid, hang.signal) for hang in agent.expired] == [
        ("a", os.getpid(), 0),
        ("b", os.getpid(), signal.SIGUSR1),
        ("c", os.getpid(), None),
    ]


TORCH = """
import os, sys, threading
from torch.distributed.elastic import timer
def ask(text):
    print(text, flush=True)
    sys.stdin.readline()
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with timer.expires(after=60):
    with timer.expires(after=30, scope="inner"):
        ask("both")
    ask("outer")
for _ in range(20):
    with timer.expires(after=60, scope="again"):
        pass
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"], signal=0))
with timer.expires(after=60, scope="told only"):
    ask("told only")
ask("none")
"""


@pytest.mark.torch
@pytest.mark.integration
@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=needs_namespaces)])
async def test_torchs_own_client_works_unchanged(agent: Agent, apart: bool) -> None:
    """torch's client: nested, with and without a scope, with a chosen signal; also as process 1 of a PID namespace."""
    pytest.importorskip("torch")
    program = [sys.executable, "-c", TORCH]
    process = await asyncio.create_subprocess_exec(
        *(_unshare(*program) if apart else program),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TORCHELASTIC_TIMER_FILE": str(agent.pipe)},
    )
    agent.pids = {process.pid: "0@1"}
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        default = ""
        for says in ("both", "outer", "told only", "none"):
            assert (await process.stdout.readline()).decode().strip() == says
            if says == "both":
                await agent.timers.until(lambda: len(agent.timers.scopes()) == 2)
                (default,) = set(agent.timers.scopes()) - {"inner"}
            held = {"both": [default, "inner"], "outer": [default], "none": []}.get(says, [says])
            await agent.timers.until(lambda held=held: agent.timers.scopes() == held)  # type: ignore[misc]
            for scope in held:
                await agent.timers.expire("0@1", scope)
            process.stdin.write(b"\n")
        assert await process.wait() == 0
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.communicate()
    assert [(hang.scope, hang.signal) for hang in agent.expired] == [
        (default, 0),
        ("inner", 0),
        (default, 0),
        ("told only", None),
    ]
    assert 20 < agent.expired[1].after <= 30
