"""A user at a terminal: a program on a pseudo-terminal, its output, and key presses."""

from __future__ import annotations

import os
import select
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.mortal import mortal
from support.waiting import PATIENCE

SIZE = (24, 80)
"""Lines and columns."""


class TerminalSession:
    """A program on its own terminal, as the leader of a session.

    Attributes:
        process: The program.
        shown: All output so far.
    """

    def __init__(self, process: subprocess.Popen[bytes], master: int, slave: int) -> None:
        """Use `at_terminal`."""
        self.process, self._master, self._slave = process, master, slave
        self.shown = ""
        self._seen = 0
        self.initial = self.settings

    @property
    def settings(self) -> list[Any]:
        """The settings of the terminal."""
        return termios.tcgetattr(self._slave)

    @property
    def foreground(self) -> int:
        """The process group that gets the keys."""
        return os.tcgetpgrp(self._master)

    def type(self, keys: str) -> None:
        """Press keys; Enter is a carriage return."""
        os.write(self._master, keys.encode())

    def resize(self, lines: int, columns: int) -> None:
        """Change the size of the window."""
        termios.tcsetwinsize(self._master, (lines, columns))

    def until(self, text: str) -> str:
        """Wait for a text after the last one waited for; return all output between the two."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.shown[self._seen :]:
            assert time.monotonic() < deadline, f"waited in vain for {text!r} in:\n{self.shown}"
            self._read(0.05)
        before, _, _ = self.shown[self._seen :].partition(text)
        self._seen += len(before) + len(text)
        return before

    def until_all(self, *texts: str) -> None:
        """Wait until each text has been shown, in any order."""
        deadline = time.monotonic() + PATIENCE
        while missing := [text for text in texts if text not in self.shown]:
            assert time.monotonic() < deadline, f"waited in vain for {missing} in:\n{self.shown}"
            self._read(0.05)

    def ended(self) -> int:
        """Wait for the end of the program; return its exit code."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"it did not end:\n{self.shown}"
            self._read(0.05)
        while self._read(0):
            pass
        return self.process.returncode

    def _read(self, timeout: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], timeout)
        if ready:
            self.shown += os.read(self._master, 1 << 16).decode(errors="replace")
        return bool(ready)


@contextmanager
def at_terminal(
    *command: str, environment: Mapping[str, str], redirect: str = "", folder: Path | None = None
) -> Iterator[TerminalSession]:
    """Run a command on a new terminal, and kill it at the end.

    Args:
        command: The command.
        environment: Its whole environment.
        folder: Its working directory; None: that of the test.
        redirect: A redirection in shell syntax, such as `2>file`.
    """
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, SIZE)
    if redirect:
        command = ("sh", "-c", f'exec "$0" "$@" {redirect}', *command)
    process = subprocess.Popen(
        mortal("setsid", "--ctty", *command),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=dict(environment),
        cwd=folder,
    )
    try:
        yield TerminalSession(process, master, slave)
    finally:
        process.kill()
        process.wait(PATIENCE)
        os.close(slave)
        os.close(master)
