"""Clocks of other processes that tests set."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ha.clocks import BootClock, Clock, WallClock, library
from support.mortal import mortal

pytestmark = pytest.mark.integration

# Prints the times of its clocks for each line that it reads.
_READER_PROGRAM = """#!/usr/bin/env python3
import sys, time
for _ in sys.stdin:
    print(time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME), flush=True)
"""
_SLACK = 30.0
"""Seconds that a busy machine may take to answer."""


class ClockReader:
    """A process that prints the times of its clocks."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def offsets(self) -> tuple[float, float, float]:
        """Return the seconds by which its clocks are ahead: wall, monotonic, and since boot."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        here = time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        there = [float(each) for each in self._process.stdout.readline().split()]
        wall, monotonic, boot = (theirs - ours for theirs, ours in zip(there, here, strict=True))
        return wall, monotonic, boot


@contextmanager
def _clock_reader(clock: Clock, folder: Path) -> Iterator[ClockReader]:
    program = folder / "teller"
    program.write_text(_READER_PROGRAM)
    program.chmod(0o755)
    command = mortal(*clock.wrapper, str(program))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield ClockReader(process)
        finally:
            process.kill()


@pytest.mark.skipif(library() is None, reason="libfaketime isn't installed (the package is called faketime)")
def test_a_wall_clock_jumps_both_ways(tmp_path: Path) -> None:
    """The wall clock moves by hours, forward and back; the other clocks of the process don't change."""
    clock = WallClock(tmp_path / "clock")
    with _clock_reader(clock, tmp_path) as reader:
        for jump, ahead in ((0.0, 0.0), (7_200.0, 7_200.0), (-18_000.0, -10_800.0), (10_800.0, 0.0)):
            clock.jump(jump)
            assert reader.offsets() == pytest.approx((ahead, 0.0, 0.0), abs=_SLACK)


def test_a_suspend_moves_only_the_boot_clock(tmp_path: Path) -> None:
    """The clock since boot is ahead then, and never goes back; the monotonic clock does not count that time."""
    clock = BootClock(tmp_path / "clock")
    with _clock_reader(clock, tmp_path) as reader:
        for jump, ahead in ((0.0, 0.0), (600.0, 600.0), (600.0, 1_200.0)):
            clock.jump(jump)
            assert reader.offsets() == pytest.approx((0.0, 0.0, ahead), abs=_SLACK)
    with pytest.raises(AssertionError, match="less than nothing"):
        clock.jump(-1.0)
