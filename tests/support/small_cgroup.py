"""A small memory cgroup, and a program that fills it."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

GLUTTON = """
hoard = []
while True:
    hoard.append(bytearray(b"x") * (1 << 20))
"""
"""A Python program that takes ever more memory."""


@contextlib.contextmanager
def small_cgroup(limit: int) -> Iterator[Path]:
    """Create a memory cgroup of `limit` bytes, version 1 or 2; a process enters it by writing 0 to its `cgroup.procs`.

    At the end no process may be left in it. Skips the test if the machine allows no memory cgroup.
    """
    name = f"rallypoint-test-{uuid.uuid4().hex[:8]}"
    for top, file in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        folder = top / name
        with contextlib.suppress(OSError):
            folder.mkdir()
            if _is_limited(folder / file, limit):
                break
            folder.rmdir()
    else:
        pytest.skip("this machine lets nobody make a memory cgroup")
    try:
        yield folder
    finally:
        folder.rmdir()


def _is_limited(file: Path, limit: int) -> bool:
    """Set the limit; return True if that was possible."""
    try:
        # Must not create the file: a folder that is no cgroup has no such file.
        with open(file, "r+", encoding="utf-8") as opened:
            opened.write(str(limit))
        with contextlib.suppress(OSError):  # swap would only make it slow
            file.with_name("memory.swap.max").write_text("0")
    except OSError:
        return False
    return True
