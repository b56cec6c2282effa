"""Clocks of replicas that tests set. The clocks of the kernel, of etcd and of the tests are not changed.

The wall clock jumps back and forth, as if set by an operator or a bad time server: libfaketime, preloaded into the
process, does that. libfaketime (0.9.10) can also move the monotonic clocks, but that is of no use here: CPython's locks
with a timeout then wait for ever. A suspended machine is a different case anyway: when it wakes up, its clock since
boot is ahead of its monotonic clock. `suspended` does that inside the process.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Protocol

# The path of Debian, and those of other systems.
_PLACES = ("usr/lib/*/faketime", "usr/lib*/faketime", "usr/local/lib*/faketime")
_STARTER = Path(__file__).with_name("suspended.py")


class Clock(Protocol):
    """A clock of a process that is started with `wrapper` in front of its own command."""

    wrapper: list[str]

    def jump(self, seconds: float) -> None:
        """Move it by so many seconds, forward or back. The process sees that when it reads it next."""
        ...


class WallClock:
    """A wall clock that an operator sets.

    Attributes:
        wrapper: See `Clock`.
        offset: Seconds by which it is ahead of the machine's.
    """

    def __init__(self, file: Path) -> None:
        """Start with offset 0; `file` is where the process reads its offset.

        Raises:
            FileNotFoundError: libfaketime isn't installed.
        """
        preloaded = library()
        if preloaded is None:
            raise FileNotFoundError("libfaketime isn't installed: the package is called faketime")
        self.offset = 0.0
        self._file = file
        self.wrapper = [
            "env",
            f"LD_PRELOAD={preloaded}",
            f"FAKETIME_TIMESTAMP_FILE={file}",
            "FAKETIME_NO_CACHE=1",  # it measures the age of its cache by the faked time
            # The name differs between versions.
            "FAKETIME_DONT_FAKE_MONOTONIC=1",
            "DONT_FAKE_MONOTONIC=1",
        ]
        self.jump(0.0)

    def jump(self, seconds: float) -> None:
        self.offset += seconds
        _replace(self._file, f"{self.offset:+.3f}\n")


class BootClock:
    """The clock since boot of a machine that is suspended now and then; it only moves forward.

    Attributes:
        wrapper: See `Clock`.
    """

    def __init__(self, file: Path) -> None:
        """Start with offset 0; `file` is where the process reads its offset."""
        self._file = file
        self._offset = 0.0
        self.wrapper = [sys.executable, str(_STARTER), str(file)]
        self.jump(0.0)

    def jump(self, seconds: float) -> None:
        assert seconds >= 0, "a machine is not suspended for less than nothing"
        self._offset += seconds
        _replace(self._file, f"{self._offset:.3f}\n")


def library() -> Path | None:
    """Return the path of libfaketime for programs with threads; None if it isn't installed."""
    found = [path for place in _PLACES for path in Path("/").glob(f"{place}/libfaketimeMT.so.1")]
    return found[0] if found else None


def _replace(file: Path, content: str) -> None:
    """Replace a file atomically: half a line would be another time."""
    fresh = file.with_suffix(".new")
    fresh.write_text(content)
    fresh.replace(file)
