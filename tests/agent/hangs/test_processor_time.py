"""Processor time is that of the whole process, whose name may have any characters; an ended process has none."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from rallypoint.agent.hangs.kernel_stacks import processor_time_in, processor_time_of


def test_the_fields_are_found_behind_any_name() -> None:
    """A command may have spaces and parentheses in its name; a line without the fields counts as 0."""
    ticks = os.sysconf("SC_CLK_TCK")
    line = f"7 (a) b (c) S 1 7 7 0 -1 0 0 0 0 0 {3 * ticks} {ticks} 0 0 20 0 1 0 5"
    assert processor_time_in(line) == pytest.approx(4.0)
    assert processor_time_in("") == 0.0


def test_the_time_is_the_kernels_figure() -> None:
    """The kernel counts it for this process; a reaped process has none."""
    before = time.process_time()
    told = processor_time_of(os.getpid())
    assert told is not None
    assert before - 0.1 <= told <= time.process_time() + 0.1
    process = subprocess.Popen(["true"])
    process.wait()
    assert processor_time_of(process.pid) is None
