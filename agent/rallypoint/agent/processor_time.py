"""Processor time, as /proc tells it: read when a timer begins and when it has run out, and so in one way."""

from __future__ import annotations

import os

_TICKS = os.sysconf("SC_CLK_TCK")


def processor_time_of(pid: int) -> float | None:
    """Seconds that all threads of a process have had, in user and kernel mode; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return processor_time_in(stat.read())
    except OSError:
        return None


def processor_time_in(line: str) -> float:
    """The same of a line of /proc/PID/stat, or of a thread's; 0 if there is none in it."""
    # utime and stime; the command name, in parentheses, may hold anything: count from its end.
    fields = line[line.rfind(")") + 2 :].split(None, 13)
    return (int(fields[11]) + int(fields[12])) / _TICKS if len(fields) > 12 else 0.0
