"""Output of workers goes through pipes into bounded files, to the byte, also if the copier process fails."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clients.flooding import lines
from rallypoint.agent.logs import copier
from rallypoint.agent.logs import rotation as module
from rallypoint.agent.logs.files import LogFile, rotated_files
from rallypoint.agent.logs.plan import Attempt, LogDirectory
from rallypoint.agent.logs.rotation import Rotation
from rallypoint.agent.logs.streams import LogError, Streams
from support.mortal import mortal
from support.waiting import PATIENCE, until

_PRINT = """
import os, sys
from benchmarks.clients.flooding import lines
rank, count = int(sys.argv[1]), int(sys.argv[2])
for first in range(0, count, 100):
    rest = memoryview(lines(rank, first, 100))
    while rest:
        rest = rest[os.write(1, rest) :]
"""
_TESTS = str(Path(__file__).parents[2])


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """An attempt of two workers."""
    return LogDirectory.create(tmp_path / "logs", "run").new_attempt(range(2))


@pytest.fixture
async def rotate(attempt: Attempt, tmp_path: Path) -> AsyncIterator[Callable[..., Rotation]]:
    """A function that begins to rotate; the copier ends with the test."""
    async with AsyncExitStack() as stack:

        def begin(max_bytes: int = 100_000, keep_files: int = 1000) -> Rotation:
            rotation = Rotation(attempt.workers, tmp_path, max_bytes=max_bytes, keep_files=keep_files)
            stack.push_async_callback(rotation.finish, PATIENCE)
            return rotation

        yield begin


def start(rotation: Rotation, local_rank: int, count: int) -> subprocess.Popen[bytes]:
    """Start a worker that prints."""
    targets = [rotation.target(local_rank, stream) for stream in (Streams.STDOUT, Streams.STDERR)]
    with open(targets[0], "ab") as out, open(targets[1], "ab") as err:
        command = mortal(sys.executable, "-c", _PRINT, str(local_rank), str(count))
        return subprocess.Popen(command, stdout=out, stderr=err, env=os.environ | {"PYTHONPATH": _TESTS})


async def ended(*processes: subprocess.Popen[bytes]) -> list[int]:
    """Wait for their ends; return the exit codes."""
    return [await asyncio.to_thread(process.wait, PATIENCE) for process in processes]


def files_of(attempt: Attempt, local_rank: int) -> list[bytes]:
    """Return the files of standard output, the oldest first."""
    log = attempt.workers[local_rank].stdout
    return [path.read_bytes() for path in (*(segment.path for segment in rotated_files(log)), log)]


async def test_files_are_complete_to_the_byte(rotate: Callable[..., Rotation], attempt: Attempt) -> None:
    """The files are bounded and end with lines; a reader that follows them sees the same bytes."""
    rotation = rotate()
    processes = [start(rotation, rank, 20_000) for rank in range(2)]
    followed, offset = b"", 0
    with LogFile(attempt.workers[0].stdout) as file:
        while (piece := file.read(offset, 1 << 16)).data or processes[0].poll() is None:
            followed, offset = followed + piece.data, piece.end
            await asyncio.sleep(0)
        assert await ended(*processes) == [0, 0]
        assert await rotation.finish(PATIENCE)
        while (piece := file.read(offset, 1 << 16)).data:
            followed, offset = followed + piece.data, piece.end
    for rank in range(2):
        files = files_of(attempt, rank)
        assert b"".join(files) == lines(rank, 0, 20_000)
        assert all(len(content) <= 100_000 and content.endswith(b"\n") for content in files[:-1])
        assert len(files) >= 11
    assert followed == lines(0, 0, 20_000)
    assert rotation.pid is None
    assert rotation.is_complete(0)


@pytest.mark.slow
async def test_a_copier_that_is_killed_loses_nothing(
    rotate: Callable[..., Rotation], attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be killed at any point: another one replaces it, and workers are not affected."""
    monkeypatch.setattr(module, "_KILLS", 1_000_000)
    rotation = rotate(max_bytes=10_000)
    processes = [start(rotation, rank, 60_000) for rank in range(2)]
    killed: set[int] = set()
    while any(process.poll() is None for process in processes):
        pid = rotation.pid
        assert pid is not None
        size = sum(segment.begin for segment in rotated_files(attempt.workers[0].stdout)[-1:])
        if pid not in killed and len(killed) < 20 and size > 50_000 * len(killed):
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.001)
    assert await ended(*processes) == [0, 0]
    assert killed
    assert await rotation.flush(0, PATIENCE)
    assert await rotation.finish(PATIENCE)
    for rank in range(2):
        assert b"".join(files_of(attempt, rank)) == lines(rank, 0, 60_000)


async def test_flush_means_that_all_is_in_the_file(rotate: Callable[..., Rotation], attempt: Attempt) -> None:
    """This holds also if the copier is killed meanwhile; flush returns at its timeout if the copier doesn't reply."""
    rotation = rotate()
    with open(rotation.target(1, Streams.STDOUT), "ab", buffering=0) as pipe:  # noqa: ASYNC230  # it has a reader
        pipe.write(b"one\n")
        assert await rotation.flush(1, PATIENCE)
        assert files_of(attempt, 1) == [b"one\n"]
        pid = rotation.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        pipe.write(b"two\n")
        assert not await rotation.flush(1, 0.05)
        flushing = asyncio.create_task(rotation.flush(1, PATIENCE))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        assert await flushing
        assert files_of(attempt, 1) == [b"one\ntwo\n"]
        assert rotation.pid not in (pid, None)


def stopped_with_a_line(rotation: Rotation) -> int:
    """Stop the copier, and write a line that it has not read; return its process ID."""
    with open(rotation.target(1, Streams.STDOUT), "ab", buffering=0) as pipe:
        pid = rotation.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        pipe.write(b"late\n")
    return pid


async def test_a_copier_that_is_stuck_does_not_hold_up_the_end(
    rotate: Callable[..., Rotation], attempt: Attempt
) -> None:
    """The copier completes the copy by itself."""
    rotation = rotate()
    pid = stopped_with_a_line(rotation)
    assert not await rotation.finish(0.05)
    os.kill(pid, signal.SIGCONT)
    await until(lambda: files_of(attempt, 1) == [b"late\n"], "the line")
    await until(lambda: rotation.pid is None, "its end")


async def test_a_copier_that_is_killed_at_the_end_loses_nothing(
    rotate: Callable[..., Rotation], attempt: Attempt
) -> None:
    """The one that replaces it does not wait for ever either."""
    rotation = rotate()
    pid = stopped_with_a_line(rotation)
    finishing = asyncio.create_task(rotation.finish(PATIENCE))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    assert await finishing
    assert files_of(attempt, 1) == [b"late\n"]


async def test_a_copier_that_always_fails_is_given_up(
    rotate: Callable[..., Rotation], attempt: Attempt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Workers get a broken pipe; they are not blocked for ever."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text("raise SystemExit(1)")
    monkeypatch.setattr(copier, "__file__", str(wrong))
    rotation = rotate()
    process = start(rotation, 0, 100_000)
    assert (await ended(process))[0] != 0
    assert rotation.pid is None
    assert not await rotation.flush(0, 1.0)


async def test_no_pipe_and_no_process_is_left(
    rotate: Callable[..., Rotation], tmp_path: Path, attempt: Attempt
) -> None:
    """This holds also if no worker was started, and if an error occurs while the pipes are made."""
    before = len(os.listdir("/proc/self/fd"))
    rotation = rotate()
    pid = rotation.pid
    assert await rotation.finish(PATIENCE)
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    made = 0

    def no_more(path: Any, mode: int) -> None:
        nonlocal made
        made += 1
        if made > 2:
            raise OSError(28, "No space left on device")
        os.mknod(path, mode | 0o010000)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "mkfifo", no_more)
        with pytest.raises(LogError, match="can't rotate the log files of workers: No space left on device"):
            rotate()
    assert os.listdir(tmp_path) == ["logs"]
    assert len(os.listdir("/proc/self/fd")) == before
