"""A memory cgroup that is soon full, and a program that fills it."""

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
    """A memory cgroup of so many bytes, version 1 or 2; a process is in it that writes 0 to its `cgroup.procs`.

    Afterwards nobody may be in it. Skips the test where none can be made.
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
    """Set the limit; whether that was possible."""
    try:
        # Not to be made by opening it: in a folder that is no cgroup there is no such file.
        with open(file, "r+", encoding="utf-8") as opened:
            opened.write(str(limit))
        with contextlib.suppress(OSError):  # swap would only make it slow
            file.with_name("memory.swap.max").write_text("0")
    except OSError:
        return False
    return True
