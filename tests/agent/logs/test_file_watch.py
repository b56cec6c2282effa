"""A watch calls back exactly those who wait for the file that has grown."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from io import FileIO
from pathlib import Path

import pytest

from rallypoint.agent.logs.watch import FileWatch
from support.waiting import PATIENCE, until


def _opened(path: Path) -> FileIO:
    return open(path, "wb", buffering=0)


@pytest.fixture
async def watch() -> AsyncIterator[FileWatch]:
    watch = FileWatch()
    yield watch
    watch.close()


async def test_all_watchers_of_a_file_are_woken_once(tmp_path: Path, watch: FileWatch) -> None:
    """Several readers may watch one file: the console, a filter, and log streams."""
    woken: list[str] = []
    first, second = (lambda: woken.append("first")), (lambda: woken.append("second"))
    with _opened(tmp_path / "log") as file:
        assert watch.arm(file.fileno(), first)
        assert watch.arm(file.fileno(), second)
        assert watch.arm(file.fileno(), first)
        file.write(b"x")
        await until(lambda: len(woken) == 2, "both")
        file.write(b"y")
        for _ in range(100):
            await asyncio.sleep(0)
        assert sorted(woken) == ["first", "second"]


async def test_a_disarmed_watcher_is_not_woken(tmp_path: Path, watch: FileWatch) -> None:
    """The others still are."""
    woken: list[str] = []
    first, second = (lambda: woken.append("first")), (lambda: woken.append("second"))
    with _opened(tmp_path / "log") as file:
        watch.arm(file.fileno(), first)
        watch.arm(file.fileno(), second)
        watch.disarm(first)
        file.write(b"x")
        await until(lambda: bool(woken), "the other")
        assert woken == ["second"]


async def test_a_rotation_wakes(tmp_path: Path, watch: FileWatch) -> None:
    """A reader at the end of a file must open the next one, after a rename as well as after a link."""
    log = tmp_path / "log"
    for rotate in (lambda: log.rename(tmp_path / "old"), lambda: os.link(log, tmp_path / "other")):
        woken = asyncio.Event()
        with _opened(log) as file:
            watch.arm(file.fileno(), woken.set)
            rotate()
            await asyncio.wait_for(woken.wait(), PATIENCE)
