"""Run a Python program with the clocks of a machine that was suspended: `suspended.py FILE PROGRAM ARGUMENTS…`.

CLOCK_BOOTTIME is ahead by the number of seconds in the file, which may grow while the program runs; CLOCK_MONOTONIC is
unchanged. That is their state after a suspend.
"""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

_clock_gettime = time.clock_gettime


def main() -> None:
    """Run the program in this process."""
    file, program, *arguments = sys.argv[1:]
    offsets = Path(file)

    def clock_gettime(clock: int) -> float:
        ahead = float(offsets.read_text()) if clock == time.CLOCK_BOOTTIME else 0.0
        return _clock_gettime(clock) + ahead

    time.clock_gettime = clock_gettime
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
