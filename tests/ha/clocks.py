"""Clocks of replicas that tests set. The kernel's own stay as they are, and so do those of etcd and of the tests.

The wall clock jumps to and fro, as an operator or a bad time server sets it, by libfaketime, preloaded into the
process. That libfaketime (0.9.10) can move the monotonic clocks as well is of no use here: CPython's locks, waited for
with a timeout, then wait for ever. What happens to a machine that was suspended is another thing anyway: its clock
since boot is ahead of its monotonic one when it wakes up. So that is done inside the process, by `suspended`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Protocol

# Debian's, and where others put it.
_PLACES = ("usr/lib/*/faketime", "usr/lib*/faketime", "usr/local/lib*/faketime")
_STARTER = Path(__file__).with_name("suspended.py")


class Clock(Protocol):
    """A clock of a process that is started by `wrapper`, in front of its own command."""

    wrapper: list[str]

    def jump(self, seconds: float) -> None:
        """Set it ahead by so much, or back. The process sees it when it looks next."""
        ...


class WallClock:
    """That of an operator.

    Attributes:
        wrapper: See `Clock`.
        offset: By how many seconds it is ahead of the machine's.
    """

    def __init__(self, file: Path) -> None:
        """Right at first; `file` is where the process reads its offset.

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
            "FAKETIME_NO_CACHE=1",  # it tells by its own time how old what it remembers is
            # Named differently by its versions.
            "FAKETIME_DONT_FAKE_MONOTONIC=1",
            "DONT_FAKE_MONOTONIC=1",
        ]
        self.jump(0.0)

    def jump(self, seconds: float) -> None:
        self.offset += seconds
        _replace(self._file, f"{self.offset:+.3f}\n")


class BootClock:
    """That of a machine that is suspended now and then; it only goes ahead.

    Attributes:
        wrapper: See `Clock`.
    """

    def __init__(self, file: Path) -> None:
        """Right at first; `file` is where the process reads its offset."""
        self._file = file
        self._offset = 0.0
        self.wrapper = [sys.executable, str(_STARTER), str(file)]
        self.jump(0.0)

    def jump(self, seconds: float) -> None:
        assert seconds >= 0, "a machine is not suspended for less than nothing"
        self._offset += seconds
        _replace(self._file, f"{self._offset:.3f}\n")


def library() -> Path | None:
    """libfaketime for programs with threads; None: it isn't installed."""
    found = [path for place in _PLACES for path in Path("/").glob(f"{place}/libfaketimeMT.so.1")]
    return found[0] if found else None


def _replace(file: Path, content: str) -> None:
    """Put a file in the place of the one before at once: half a line would be another time."""
    fresh = file.with_suffix(".new")
    fresh.write_text(content)
    fresh.replace(file)
