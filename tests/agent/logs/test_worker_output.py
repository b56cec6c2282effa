"""Each stream of each worker is copied exactly to the places that the options select."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rallypoint.agent.logs.files import rotated_files
from rallypoint.agent.logs.follower import Console
from rallypoint.agent.logs.output import WorkerOutput
from rallypoint.agent.logs.plan import Attempt, LogDirectory
from rallypoint.agent.logs.streams import LogError, OutputOptions, Redirect, Streams


class Shown:
    """A console, and the text that it has received."""

    def __init__(self) -> None:
        """Make two pipes, and a thread that reads each."""
        self.text = {Streams.STDOUT: b"", Streams.STDERR: b""}
        self._threads = []
        self._ends = {}
        for stream in self.text:
            read, self._ends[stream] = os.pipe()
            thread = threading.Thread(target=self._read, args=(stream, read))
            thread.start()
            self._threads.append(thread)
        self.console = Console(self._ends[Streams.STDOUT], self._ends[Streams.STDERR])

    def _read(self, stream: Streams, fd: int) -> None:
        while data := os.read(fd, 1 << 16):
            self.text[stream] += data
        os.close(fd)

    async def close(self) -> None:
        """Close the console; `text` is complete then."""
        await self.console.close(20.0)
        while self._ends:
            os.close(self._ends.popitem()[1])
        for thread in self._threads:
            thread.join()

    @property
    def lines(self) -> list[bytes]:
        """The lines of standard output, sorted, because workers have no common order."""
        return sorted(self.text[Streams.STDOUT].splitlines())

    @property
    def error_lines(self) -> list[bytes]:
        """The lines of standard error, sorted."""
        return sorted(self.text[Streams.STDERR].splitlines())


@pytest.fixture
async def shown() -> AsyncIterator[Shown]:
    """The console of a test."""
    shown = Shown()
    yield shown
    await shown.close()


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """An attempt of four workers with the ranks 4 to 7."""
    return LogDirectory.create(tmp_path / "logs", "run").new_attempt(range(4), base_rank=4)


OPTIONS = OutputOptions(role="trainer")
_Run = Callable[..., Awaitable[None]]


def _append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


@pytest.fixture
def run(shown: Shown, attempt: Attempt, tmp_path: Path) -> _Run:
    """A function that runs four workers with output options; each prints two lines to each stream."""

    async def run(**options: Any) -> None:
        output = WorkerOutput(replace(OPTIONS, **options), attempt, shown.console, tmp_path)
        output.open()
        output.start()
        for local_rank in range(4):
            for stream, name in ((Streams.STDOUT, "out"), (Streams.STDERR, "err")):
                text = f"{name} {local_rank} pear\n{name} {local_rank} apple\n"
                _append(output.target(local_rank, stream), text.encode())
        assert await output.finish(20.0)
        await shown.close()

    return run


def _printed(name: str, *local_ranks: int, prefix: str = "") -> list[bytes]:
    return sorted(
        f"{prefix.replace('#', str(rank)).replace('%', str(rank + 4))}{name} {rank} {fruit}".encode()
        for rank in local_ranks
        for fruit in ("apple", "pear")
    )


async def test_by_default_the_console_shows_all_as_it_is(run: _Run, shown: Shown, attempt: Attempt) -> None:
    """The files have the same."""
    await run()
    assert shown.lines == _printed("out", 0, 1, 2, 3)
    assert shown.error_lines == _printed("err", 0, 1, 2, 3)
    assert attempt.workers[2].stderr.read_text() == "err 2 pear\nerr 2 apple\n"
    assert sorted(os.listdir(attempt.folder)) == ["0", "1", "2", "3", "ranks"]


async def test_redirected_streams_are_not_shown_and_teed_have_a_prefix(
    run: _Run, shown: Shown, attempt: Attempt
) -> None:
    """A stream that is both is teed; all files have everything."""
    await run(redirects=Redirect.parse("1:1,2:3", "-r"), tee=Redirect.parse("2:1,3:2", "-t"))
    teed = _printed("out", 2, prefix="[trainer#]:")
    assert shown.lines == sorted(_printed("out", 0, 3) + teed)
    assert shown.error_lines == sorted(_printed("err", 0, 1) + _printed("err", 3, prefix="[trainer#]:"))
    assert attempt.workers[1].stdout.read_text() == "out 1 pear\nout 1 apple\n"


async def test_only_the_local_ranks_of_the_filter_are_shown(
    run: _Run, shown: Shown, attempt: Attempt
) -> None:
    """This applies to teed and other streams; the files have everything."""
    await run(
        local_ranks_filter=frozenset({0, 2}), tee=Redirect.parse("2:3,3:3", "-t"), line_prefix="<${rank}>"
    )
    assert shown.lines == sorted(_printed("out", 0) + _printed("out", 2, prefix="<%>"))
    assert attempt.workers[3].stdout.read_text() == "out 3 pear\nout 3 apple\n"


async def test_lines_of_teed_streams_are_filtered_into_a_file(
    run: _Run, shown: Shown, attempt: Attempt
) -> None:
    """The lines have prefixes as in torchrun, and only those of shown ranks are copied."""
    await run(
        tee=Redirect.parse("0:1,1:3,2:3", "-t"),
        local_ranks_filter=frozenset({0, 1, 3}),
        duplicate_stdout_filters=("apple", "0 p"),
        duplicate_stderr_filters=("apple",),
    )
    filtered = (attempt.folder / "filtered_stdout.log").read_bytes().splitlines()
    assert sorted(filtered) == [
        b"[trainer0]:out 0 apple",
        b"[trainer0]:out 0 pear",
        b"[trainer1]:out 1 apple",
    ]
    assert (attempt.folder / "filtered_stderr.log").read_bytes() == b"[trainer1]:err 1 apple\n"


async def test_where_nothing_is_teed_all_streams_are_filtered(
    run: _Run, shown: Shown, attempt: Attempt
) -> None:
    """torchrun's file would be empty, which is of no use; it includes streams that are not shown."""
    await run(redirects=Redirect(Streams.BOTH), duplicate_stderr_filters=("apple",))
    filtered = (attempt.folder / "filtered_stderr.log").read_bytes().splitlines()
    assert sorted(filtered) == [f"[trainer{rank}]:err {rank} apple".encode() for rank in range(4)]
    assert not (attempt.folder / "filtered_stdout.log").exists()
    assert shown.lines == []


async def test_rotation_changes_nothing_of_all_that(run: _Run, shown: Shown, attempt: Attempt) -> None:
    """Workers write to pipes then, which are removed at the end."""
    await run(tee=Redirect(Streams.BOTH), log_max_bytes=4096, duplicate_stdout_filters=("apple",))
    assert shown.lines == _printed("out", 0, 1, 2, 3, prefix="[trainer#]:")
    assert attempt.workers[2].stderr.read_text() == "err 2 pear\nerr 2 apple\n"
    assert rotated_files(attempt.workers[2].stderr) == []
    assert len((attempt.folder / "filtered_stdout.log").read_bytes().splitlines()) == 4
    assert os.listdir(attempt.folder.parents[2]) == ["logs"]


async def test_a_file_that_can_not_be_made_is_one_clear_line(
    shown: Shown, attempt: Attempt, tmp_path: Path
) -> None:
    """finish removes the files that were made before the error."""
    (attempt.folder / "filtered_stdout.log").mkdir()
    options = replace(OPTIONS, duplicate_stdout_filters=("apple",))
    output = WorkerOutput(options, attempt, shown.console, tmp_path)
    with pytest.raises(LogError, match=r"^cannot make .*/filtered_stdout.log: Is a directory$"):
        output.open()
    assert await output.finish(20.0)
    output = WorkerOutput(replace(OPTIONS, log_max_bytes=4096), attempt, shown.console, tmp_path / "nowhere")
    with pytest.raises(LogError, match=r"^can't rotate the log files of workers: No such file or directory$"):
        output.open()
    assert await output.finish(20.0)
