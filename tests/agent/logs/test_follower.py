"""A growing file is copied to the byte, in whole lines, also when it is rotated or truncated meanwhile."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.agent.logs import follower as module
from rallypoint.agent.logs.files import rotated_name
from rallypoint.agent.logs.follower import Follower, cut
from rallypoint.agent.logs.lines import LineFilter
from rallypoint.agent.logs.watch import FileWatch
from support.replacing import instead_of
from support.waiting import until


class Collected:
    """An output that keeps its input, and can block its writer."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.open = asyncio.Event()
        self.open.set()
        self.turn = nullcontext()

    async def write(self, data: bytes) -> None:
        await self.open.wait()
        self.pieces.append(data)
        await asyncio.sleep(0)

    @property
    def text(self) -> bytes:
        return b"".join(self.pieces)


@pytest.fixture
async def watch() -> AsyncIterator[FileWatch]:
    watch = FileWatch()
    yield watch
    watch.close()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "stdout.log"
    path.touch()
    return path


def follow(log: Path, output: Collected, watch: FileWatch, prefix: bytes = b"", chunk: int = 64) -> Follower:
    follower = Follower(log, output, watch, prefix, chunk=chunk)
    follower.start()
    return follower


def append(path: Path, data: bytes) -> None:
    with open(path, "ab", buffering=0) as file:
        file.write(data)


async def test_a_growing_file_is_copied_to_the_byte(log: Path, watch: FileWatch) -> None:
    """Data before and after the start, bytes that are not UTF-8, lines of every length, an unfinished last line."""
    output = Collected()
    append(log, b"early\n")
    follower = follow(log, output, watch)
    await until(lambda: output.text == b"early\n", "what was there")
    written = b"early\n"
    for length in (0, 1, 63, 64, 65, 500):
        line = bytes((at * 7 + length) % 256 for at in range(length)) + b"\n"
        written += line
        append(log, line)
        await until(lambda: output.text == written, f"the line of {length}")  # noqa: B023
    append(log, b"\xff no end")
    assert await follower.finish(5.0)
    assert output.text == written + b"\xff no end"


async def test_prefixes_are_put_before_whole_lines(log: Path, watch: FileWatch) -> None:
    """A line written in parts has one prefix; the last, unfinished one gets a prefix and a line end."""
    output = Collected()
    follower = follow(log, output, watch, b"[r0]:")
    append(log, b"one\ntw")
    await until(lambda: bool(output.text), "the first line")
    assert output.text == b"[r0]:one\n"
    append(log, b"o\n\nthr")
    await until(lambda: output.text.count(b"\n") == 3, "the second line")
    append(log, b"ee")
    assert await follower.finish(5.0)
    assert output.text == b"[r0]:one\n[r0]:two\n[r0]:\n[r0]:three\n"


async def test_a_progress_bar_shows_before_its_line_ends(log: Path, watch: FileWatch) -> None:
    """Without a prefix an unfinished line is copied after a short delay."""
    output = Collected()
    follower = follow(log, output, watch)
    append(log, b"\r 10 %")
    await until(lambda: output.text == b"\r 10 %", "the bar")
    append(log, b"\r 20 %\n")
    assert await follower.finish(5.0)
    assert output.text == b"\r 10 %\r 20 %\n"


async def test_a_truncated_file_is_read_from_its_new_beginning(log: Path, watch: FileWatch) -> None:
    """A worker that empties its log is still followed."""
    output = Collected()
    follower = follow(log, output, watch)
    append(log, b"a long first line\n")
    await until(lambda: bool(output.text), "the first line")
    os.truncate(log, 0)
    append(log, b"new\n")
    assert await follower.finish(5.0)
    assert output.text == b"a long first line\nnew\n"


async def test_an_idle_follower_does_not_read_its_file(
    log: Path, watch: FileWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle follower sleeps: it doesn't read its file until the kernel reports that it has grown."""
    looks = 0

    @instead_of(monkeypatch, os, "pread")
    def counted(pread: Any, fd: int, size: int, offset: int) -> Any:
        nonlocal looks
        looks += 1
        return pread(fd, size, offset)

    monkeypatch.setattr(module, "GATHER", 0.0)
    monkeypatch.setattr(module, "FALLBACK_INTERVAL", 0.0)
    output = Collected()
    follower = follow(log, output, watch)
    await until(lambda: looks == 1, "the first look")
    for _ in range(100):
        await asyncio.sleep(0)
    assert looks == 1
    append(log, b"x\n")
    await until(lambda: output.text == b"x\n", "the line")
    await follower.finish(5.0)


async def test_a_write_during_a_read_is_not_missed(
    log: Path, watch: FileWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write just after the read that found nothing still wakes the follower."""
    news = iter([b"one\n", b"two\n"])

    @instead_of(monkeypatch, os, "pread")
    def late(pread: Any, fd: int, size: int, offset: int) -> Any:
        data = pread(fd, size, offset)
        if not data:
            append(log, next(news, b""))
        return data

    output = Collected()
    follower = follow(log, output, watch)
    await until(lambda: output.text == b"one\ntwo\n", "both lines")
    await follower.finish(5.0)


async def test_files_are_followed_without_inotify(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the user's inotify instances are used up, nothing is lost: the file is polled."""
    monkeypatch.setattr(module, "FALLBACK_INTERVAL", 0.01)
    blind = FileWatch()
    blind.close()
    output = Collected()
    follower = follow(log, output, blind)
    append(log, b"seen\n")
    await until(lambda: output.text == b"seen\n", "the line")
    append(log, b"again\n")
    await until(lambda: output.text == b"seen\nagain\n", "the second line")
    assert await follower.finish(5.0)


async def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path, watch: FileWatch) -> None:
    """If there is no file, finish returns False, and the error is kept and not raised."""
    follower = follow(tmp_path / "nothing", Collected(), watch)
    assert not await follower.finish(5.0)
    assert isinstance(follower.error, FileNotFoundError)


async def test_a_flood_leaves_the_loop_responsive(log: Path, watch: FileWatch) -> None:
    """The loop runs at least once for each chunk of a large file; nothing is lost or kept in memory."""
    line = b"x" * 99 + b"\n"
    append(log, line * 100_000)
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    output = Collected()
    follower = follow(log, output, watch, chunk=64 * 1024)
    assert await follower.finish(30.0)
    turning.cancel()
    assert output.text == line * 100_000
    assert max(map(len, output.pieces)) <= 2 * 64 * 1024
    assert turns >= len(output.pieces)


async def test_a_slow_output_delays_finish_only_so_long(log: Path, watch: FileWatch) -> None:
    """finish returns at its timeout, and the copy still continues to the end."""
    output = Collected()
    output.open.clear()
    append(log, b"line\n" * 100)
    follower = follow(log, output, watch)
    assert not await follower.finish(0.05)
    output.open.set()
    assert await follower.finish(5.0)
    assert output.text == b"line\n" * 100


@given(
    st.lists(st.binary(max_size=30).map(lambda data: data.replace(b"\r", b"\n")), max_size=8),
    st.integers(1, 40),
)
def test_cutting_loses_nothing(pieces: list[bytes], longest: int) -> None:
    """For any division into reads, the output is the stream with each line prefixed once."""
    for prefix in (b"", b">>"):
        out, pending, in_line = b"", b"", False
        for piece in pieces:
            whole, pending, in_line = cut(pending + piece, prefix, in_line, longest)
            assert len(pending) < longest
            out += whole
        if pending:
            out += (b"" if in_line else prefix) + pending
        assert out == b"".join(prefix + line for line in _lines(b"".join(pieces)))


def _lines(data: bytes) -> list[bytes]:
    lines = [line + b"\n" for line in data.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    return [line for line in lines if line]


def rotate(path: Path, begin: int, *, fresh: bytes = b"") -> None:
    """Rotate a file as the log copier does."""
    os.link(path, rotated_name(path, begin))
    path.with_name("fresh").write_bytes(fresh)
    path.with_name("fresh").rename(path)


async def test_rotation_does_not_change_the_copied_output(log: Path, watch: FileWatch) -> None:
    """A line that ends in the next file is one line; the follower wakes up when the next file grows."""
    output = Collected()
    follower = follow(log, output, watch, b">")
    append(log, b"one\ntw")
    await until(lambda: output.text == b">one\n", "the first line")
    rotate(log, 0)
    append(log, b"o\n")
    await until(lambda: output.text == b">one\n>two\n", "the line over two files")
    rotate(log, 6, fresh=b"")
    rotate(log, 8, fresh=b"three\n")
    await until(lambda: output.text.endswith(b">three\n"), "the line after an empty file")
    assert await follower.finish(5.0)
    assert output.text == b">one\n>two\n>three\n"
    assert follower.behind() == 0


async def test_after_a_rotation_the_new_file_is_watched(
    log: Path, watch: FileWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds also if the new file is still empty when the follower opens it."""
    monkeypatch.setattr(module, "GATHER", 0.0)
    output = Collected()
    follower = follow(log, output, watch)
    append(log, b"old\n")
    await until(lambda: output.text == b"old\n", "the old file's line")
    rotate(log, 0)
    for _ in range(200):
        await asyncio.sleep(0)
    append(log, b"new\n")
    await until(lambda: output.text == b"old\nnew\n", "the new file's line")
    assert await follower.finish(5.0)


async def test_bytes_rotated_away_before_they_were_read_are_counted(log: Path, watch: FileWatch) -> None:
    """A console that was too slow for the kept files has lost bytes, and reports their number."""
    output = Collected()
    output.open.clear()
    append(log, b"first\n")
    follower = follow(log, output, watch)
    await until(lambda: watch._armed != {}, "the first read")
    rotate(log, 0, fresh=b"second\n")
    rotate(log, 6, fresh=b"third\n")
    rotated_name(log, 6).unlink()
    rotate(log, 13, fresh=b"fourth\n")
    output.open.set()
    assert await follower.finish(5.0)
    assert output.text == b"first\nthird\nfourth\n"
    assert follower.behind() == len(b"second\n")


async def test_a_slow_follower_counts_the_bytes_it_is_behind(log: Path, watch: FileWatch) -> None:
    """Pieces that were read and not written count too."""
    output = Collected()
    output.open.clear()
    append(log, b"line\n" * 100)
    follower = follow(log, output, watch)
    assert not await follower.finish(0.05)
    assert follower.behind() == 500
    await follower.abandon()
    assert follower.behind() == 500


async def test_chosen_lines_only(log: Path, watch: FileWatch) -> None:
    """The filter gets whole lines, without their prefix, and an unfinished one at the end."""
    output = Collected()
    follower = Follower(log, output, watch, b"[w]:", choose=LineFilter(["apple", "]:"]))
    follower.start()
    append(log, b"an app")
    append(log, b"le\na pear\nlast apple")
    assert await follower.finish(5.0)
    assert output.text == b"[w]:an apple\n[w]:last apple\n"
