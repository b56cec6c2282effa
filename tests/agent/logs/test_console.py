"""The console gets whole lines of all workers, and a slow stream delays only its own writer."""

from __future__ import annotations

import asyncio
import os
import re
import select
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.agent.logs.follower import Console, OutputThread
from rallypoint.agent.logs.plan import ConsoleCopy
from rallypoint.agent.logs.streams import Streams
from support.waiting import PATIENCE, until


def _append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    os.close(write)
    os.close(read)


async def test_a_blocked_stream_does_not_block_the_loop(pipe: tuple[int, int]) -> None:
    """A full pipe delays its own writer only; once it is read, every byte arrives, and blocks are not mixed."""
    read, write = pipe
    output = OutputThread(write)
    blocks = [bytes([65 + at]) * 300_000 for at in range(3)]
    writing = [asyncio.create_task(output.write(block)) for block in blocks]
    done, _ = await asyncio.wait(writing, timeout=0.05)
    assert not done
    received = bytearray()

    def drain() -> None:
        while len(received) < 900_000:
            received.extend(os.read(read, 1 << 16))

    reader = threading.Thread(target=drain)
    reader.start()
    await asyncio.gather(*writing)
    await asyncio.to_thread(reader.join)
    assert bytes(received) == b"".join(blocks)
    await output.close(PATIENCE)


async def test_a_stream_whose_reader_is_gone_is_given_up() -> None:
    """A write to a closed pipe drops the bytes and returns."""
    read, write = os.pipe()
    os.close(read)
    output = OutputThread(write)
    await output.write(b"x" * 100_000)
    await output.write(b"y")
    await output.close(PATIENCE)
    os.close(write)


async def test_a_non_blocking_stream_loses_nothing(pipe: tuple[int, int]) -> None:
    """The writer waits for a stream that another program made non-blocking."""
    read, write = pipe
    os.set_blocking(write, False)
    output = OutputThread(write)
    writing = asyncio.create_task(output.write(b"z" * 300_000))
    received = b""
    while len(received) < 300_000:
        received += await asyncio.to_thread(os.read, read, 1 << 16)
    await writing
    await output.close(PATIENCE)


async def test_console_end_to_end(tmp_path: Path, pipe: tuple[int, int]) -> None:
    """Files of several workers to one stream: whole lines, each worker's in order; close waits for all."""
    read, write = pipe
    console = Console(stdout=write)
    logs = [tmp_path / f"{rank}.log" for rank in range(3)]
    for rank, log in enumerate(logs):
        log.touch()
        console.follow(ConsoleCopy(log, Streams.STDOUT, b"[w%d]:" % rank)).start()
    for number in range(50):
        for log in logs:
            _append(log, b"%d\n" % number)
        await asyncio.sleep(0)
    assert await console.close(PATIENCE)
    lines = os.read(read, 1 << 16).splitlines()
    assert len(lines) == 150
    for rank in range(3):
        mine = [line for line in lines if line.startswith(b"[w%d]:" % rank)]
        assert mine == [b"[w%d]:%d" % (rank, number) for number in range(50)]


async def test_closing_does_not_wait_for_ever(tmp_path: Path) -> None:
    """If the console is not read, close returns at its timeout and reports that bytes were left."""
    read, write = os.pipe()
    console = Console(stdout=write)
    log = tmp_path / "log"
    log.write_bytes(b"x" * 1_000_000)
    console.follow(ConsoleCopy(log, Streams.STDOUT)).start()
    assert not await asyncio.wait_for(console.close(0.1), PATIENCE)
    os.close(read)
    name = f"console-{write}"
    await until(lambda: all(thread.name != name for thread in threading.enumerate()), "the thread's end")
    os.close(write)


async def test_a_console_that_stands_still_holds_few_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any number of workers wait for their turn before they read."""
    pread, read_so_far = os.pread, 0

    def counted(fd: int, size: int, offset: int) -> bytes:
        nonlocal read_so_far
        data = pread(fd, size, offset)
        read_so_far += bool(data)
        return data

    monkeypatch.setattr(os, "pread", counted)
    read, write = os.pipe()
    console = Console(stdout=write)
    for rank in range(16):
        (tmp_path / f"{rank}.log").write_bytes(b"x\n" * 500_000)
        console.follow(ConsoleCopy(tmp_path / f"{rank}.log", Streams.STDOUT)).start()
    await until(lambda: bool(select.select([read], [], [], 0)[0]), "the first piece")
    for _ in range(200):
        await asyncio.sleep(0)
    assert 1 <= read_so_far <= 2
    os.close(read)  # bytes after this are dropped
    assert await console.close(20.0)
    os.close(write)


async def test_output_that_the_console_left_out_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning has the number of bytes, and the files that have them."""
    read, write = os.pipe()
    console = Console(stdout=write)
    log = tmp_path / "log"
    log.write_bytes(b"x\n" * 500_000)
    console.follow(ConsoleCopy(log, Streams.STDOUT)).start()
    assert not await console.close(0.1)
    os.close(read)
    said = re.search(r"too slow to show everything left_out_bytes=(\d+) files=(.*)", caplog.text)
    assert said is not None
    assert 0 < int(said[1]) <= 1_000_000
    assert said[2] == f"['{log}']"
    name = f"console-{write}"
    await until(lambda: all(thread.name != name for thread in threading.enumerate()), "the thread's end")
    os.close(write)
