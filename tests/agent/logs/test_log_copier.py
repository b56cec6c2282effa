"""The copier loses nothing that it can write, ends files at line ends, and never blocks a worker."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.agent.logs import copier as program
from rallypoint.agent.logs.copier import bytes_to_move
from rallypoint.agent.logs.files import LogFile, rotated_files, rotated_name
from support.mortal import mortal
from support.waiting import PATIENCE, wait_until


@pytest.mark.parametrize(
    ("ahead", "room", "in_line", "over", "expected"),
    [
        (b"one\ntwo\nthree\n", 9, False, 10, 8),  # as many whole lines as there is room for
        (b"one\ntwo\nthree\n", 8, False, 10, 8),
        (b"one\ntwo\nthree\n", 3, False, 10, 0),  # the next line goes to the next file
        (b"one\ntwo\nthree\n", 3, True, 10, 4),  # a line that began in this file ends in it
        (b"one\n", -5, True, 10, 4),
        (b"endless", 3, True, 10, 7),  # it continues: all of it, and no rotation yet
        (b"endless", -7, True, 10, 3),  # up to the limit
        (b"endless", -10, True, 10, 0),
        (b"endless", 3, False, 10, 0),
    ],
)
def test_files_end_with_lines(ahead: bytes, room: int, in_line: bool, over: int, expected: int) -> None:
    """They do so where possible, within limits."""
    assert bytes_to_move(ahead, room, in_line, over) == expected


@given(
    st.binary(min_size=1, max_size=12).map(lambda data: data.replace(b"a", b"\n")),
    st.integers(-9, 11),
    st.booleans(),
)
def test_only_available_bytes_are_moved(ahead: bytes, room: int, in_line: bool) -> None:
    """A file with content is rotated, or continued: the loop always ends."""
    count = bytes_to_move(ahead, room, in_line, 4)
    assert 0 <= count <= len(ahead)
    if count == len(ahead):
        assert in_line or ahead.endswith(b"\n")
    if count:
        assert count <= max(0, room) or in_line


class News(program._AgentNotifier):
    """A notifier that keeps its messages."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []

    def notify(self, **news: Any) -> None:
        """Keep a message to the agent."""
        self.said.append(news)


class Bench:
    """One pipe and its file, in this process."""

    def __init__(self, folder: Path, max_bytes: int = 100, keep_files: int = 1000) -> None:
        self.file = folder / "stdout.log"
        self.read, self.write = os.pipe2(os.O_NONBLOCK)
        self.news = News()
        self._sizes = max_bytes, keep_files
        self.stream = self.begin()

    def begin(self) -> program._PipeCopy:
        """Make the state of a copier that has just started."""
        max_bytes, keep_files = self._sizes
        path = str(self.file)
        return program._PipeCopy(0, self.read, path, self.news, max_bytes=max_bytes, keep_files=keep_files)

    def put(self, data: bytes) -> None:
        """Write as a worker does, and move it to the file."""
        assert os.write(self.write, data) == len(data)
        moved = 0
        while moved < len(data):
            moved += self.stream.move(1 << 20)
        assert self.stream.move(1 << 20) == 0

    @property
    def text(self) -> bytes:
        """The content of all files."""
        with LogFile(self.file) as file:
            begin, end = file.extent()
            data = b""
            while begin < end:
                piece = file.read(begin, end)
                data, begin = data + piece.data, piece.end
            return data

    @property
    def files(self) -> list[bytes]:
        """The content of each file, the oldest first."""
        paths = [segment.path for segment in rotated_files(self.file)] + [self.file]
        return [path.read_bytes() for path in paths]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A bench with files of 100 bytes."""
    return Bench(tmp_path)


def test_a_file_is_rotated_at_its_size(bench: Bench) -> None:
    """Its name has its first offset; every byte is there once."""
    lines = [b"%05d" % number + b"." * (number % 40) + b"\n" for number in range(300)]
    for line in lines:
        bench.put(line)
    assert b"".join(bench.files) == b"".join(lines)
    assert all(file.endswith(b"\n") and len(file) <= 100 for file in bench.files)
    assert all(len(file) > 50 for file in bench.files[:-1])
    begin = 0
    for segment in rotated_files(bench.file):
        assert segment.begin == begin
        begin += segment.path.stat().st_size


def test_a_flood_is_cut_into_files(bench: Bench) -> None:
    """One read fills many files."""
    data = b"a line that is rather long\n" * 1000
    bench.put(data)
    assert b"".join(bench.files) == data
    assert {len(file) for file in bench.files[:-1]} == {81}


def test_long_lines_stay_whole_within_bounds(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line without an end is cut."""
    monkeypatch.setattr(program, "LONGEST_LINE", 300)
    bench.put(b"short\n" + b"x" * 250 + b"\n" + b"y" * 1000 + b"\nend\n")
    assert b"".join(bench.files) == b"short\n" + b"x" * 250 + b"\n" + b"y" * 1000 + b"\nend\n"
    assert bench.files[:2] == [b"short\n", b"x" * 250 + b"\n"]
    assert all(len(file) <= 400 for file in bench.files)


def test_the_oldest_files_go(tmp_path: Path) -> None:
    """The current file is never removed, nor is any other file."""
    stranger = tmp_path / "stdout.log.backup"
    stranger.touch()
    bench = Bench(tmp_path, keep_files=2)
    for number in range(50):
        bench.put(b"%039d\n" % number)
    assert [len(file) for file in bench.files] == [80, 80, 80]
    assert bench.text.splitlines()[-1] == b"%039d" % 49
    assert [segment.begin for segment in rotated_files(bench.file)] == [1760, 1840]
    assert stranger.exists()


def test_another_copier_goes_on_where_the_first_was(bench: Bench) -> None:
    """It does so also after a rotation that was not completed."""
    bench.put(b"x" * 79 + b"\n")
    os.link(bench.file, rotated_name(bench.file, 0))
    bench.stream = bench.begin()
    bench.put(b"y" * 79 + b"\n" + b"z\n")
    assert bench.files == [b"x" * 79 + b"\n", b"y" * 79 + b"\nz\n"]
    bench.stream = bench.begin()
    bench.put(b"w" * 79 + b"\n")
    assert [segment.begin for segment in rotated_files(bench.file)] == [0, 80]


def test_a_file_system_without_splice_and_links(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copier writes to it too."""

    def refuse(*_: Any, **__: Any) -> int:
        raise OSError(errno.EINVAL, "no such thing here")

    monkeypatch.setattr(os, "splice", refuse)
    monkeypatch.setattr(os, "link", refuse)
    data = b"a line that is rather long\n" * 100
    bench.put(data)
    assert b"".join(bench.files) == data
    assert len(bench.files) == 34


def test_output_without_room_is_dropped_and_reported(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent gets a report when the loss begins; the file and the agent get one when there is room again."""
    splice, pwrite = os.splice, os.pwrite

    def full(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, "no space")

    bench.put(b"kept\nhalf a li")
    monkeypatch.setattr(os, "splice", full)
    monkeypatch.setattr(os, "pwrite", full)
    bench.put(b"ne\n")
    bench.put(b"lost\n")
    assert bench.text == b"kept\nhalf a li"
    assert bench.news.said == [{"stream": 0, "lost": 3, "error": "No space left on device"}]
    monkeypatch.setattr(os, "splice", splice)
    monkeypatch.setattr(os, "pwrite", pwrite)
    bench.put(b"again\n")
    note = b"\n[rallypoint: 8 bytes are missing here: they could not be written]\n"
    assert bench.text == b"kept\nhalf a li" + note + b"again\n"
    assert bench.news.said[1:] == [{"stream": 0, "lost": 8, "error": ""}]


def test_a_file_that_was_emptied_has_no_hole(bench: Bench) -> None:
    """It is written from its new start."""
    bench.put(b"old and long\n")
    os.truncate(bench.file, 0)
    bench.put(b"new\n")
    assert bench.file.read_bytes() == b"new\n"


class Process:
    """A copier process with two pipes."""

    def __init__(self, folder: Path, *, before: str = "", max_bytes: int = 1 << 20) -> None:
        self.files = [folder / name for name in ("stdout.log", "stderr.log")]
        pipes = [os.pipe2(os.O_NONBLOCK) for _ in self.files]
        self.writers = [write for _, write in pipes]
        for write in self.writers:
            os.set_blocking(write, True)
        readers = [read for read, _ in pipes]
        self.popen = subprocess.Popen(
            mortal("sh", "-c", f'{before} exec "$@"', "sh", sys.executable, "-I", "-S", program.__file__),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=readers,
        )
        streams = [{"fd": read, "path": str(file)} for read, file in zip(readers, self.files, strict=True)]
        self.say(max_bytes=max_bytes, keep_files=5, streams=streams)
        for read in readers:
            os.close(read)

    def say(self, **request: Any) -> None:
        """Send a request as the agent does."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(request).encode() + b"\n")
        self.popen.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Return its next message."""
        assert self.popen.stdout is not None
        news: dict[str, Any] = json.loads(self.popen.stdout.readline())
        return news

    def close(self) -> None:
        """Kill it if it is alive."""
        self.popen.kill()
        self.popen.communicate()
        while self.writers:
            os.close(self.writers.pop())


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """A function that starts the process of a test."""
    started: list[Process] = []

    def begin(**options: Any) -> Process:
        started.append(Process(tmp_path, **options))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def test_the_copier_ends_when_no_writer_is_left(start: Any) -> None:
    """A killed agent's workers die too; their last output is in the files before the copier ends."""
    process = start()
    os.write(process.writers[0], b"first words\n")
    wait_until(lambda: process.files[0].exists() and process.files[0].stat().st_size > 0, "the first words")
    process.popen.stdin.close()  # as at the death of the agent
    process.popen.stdin = None
    os.write(process.writers[0], b"last words\n")
    os.write(process.writers[1], b"x" * 60_000)
    while process.writers:
        os.close(process.writers.pop())
    assert process.popen.wait(PATIENCE) == 0
    assert process.files[0].read_bytes() == b"first words\nlast words\n"
    assert process.files[1].read_bytes() == b"x" * 60_000


def test_it_waits_for_an_agent_that_may_start_more(start: Any) -> None:
    """The end of a worker closes its pipe only; the copier goes on."""
    process = start()
    os.write(process.writers[0], b"bye\n")
    os.close(process.writers.pop(0))
    wait_until(lambda: process.files[0].exists() and process.files[0].read_bytes() == b"bye\n", "the words")
    process.say(flush=1, stream=0)
    assert process.hear() == {"flushed": 1}
    process.say(flush=2, stream=1)
    assert process.hear() == {"flushed": 2}
    assert process.popen.poll() is None


def test_a_flush_is_answered_when_all_is_in_the_file(start: Any) -> None:
    """It includes all that was in the pipe at the time of the request."""
    process = start()
    for number in range(20):
        os.write(process.writers[0], b"%08d\n" % number * 1000)
        process.say(flush=number, stream=0)
        assert process.hear() == {"flushed": number}
        assert process.files[0].stat().st_size == 9000 * (number + 1)


def test_a_flush_counts_what_goes_into_several_files(start: Any) -> None:
    """The reply comes after the last of them, not after the first."""
    process = start(max_bytes=4096)
    for number in range(1, 20):
        os.write(process.writers[0], b"%08d\n" % number * 7000)
        process.say(flush=number, stream=0)
        assert process.hear() == {"flushed": number}
        with LogFile(process.files[0]) as file:
            assert file.extent()[1] == 63_000 * number


def test_signals_of_a_terminal_do_not_end_it(start: Any) -> None:
    """The agent handles Ctrl-C; the last output of the workers comes after it."""
    process = start()
    process.say(flush=1, stream=0)
    assert process.hear() == {"flushed": 1}
    for number in (1, 2, 3, 15):
        os.kill(process.popen.pid, number)
    os.write(process.writers[0], b"still there\n")
    process.say(flush=2, stream=0)
    assert process.hear() == {"flushed": 2}
    assert process.files[0].read_bytes() == b"still there\n"


def test_a_worker_does_not_stand_still_for_want_of_room(start: Any) -> None:
    """If a file may not grow, new output is dropped, and the first loss is reported."""
    process = start(before="ulimit -f 32;")  # blocks of 512 bytes
    for _ in range(100):
        os.write(process.writers[0], b"x" * 99 + b"\n" + b"y" * 9899 + b"\n")
    os.close(process.writers.pop(0))
    process.say(flush=1, stream=0)
    first = process.hear()
    assert (first["stream"], first["error"]) == (0, "File too large")
    said = [first]
    while "flushed" not in said[-1]:
        said.append(process.hear())
    assert process.files[0].stat().st_size == 16384
    assert sum(1 for news in said if news.get("error")) == 1
