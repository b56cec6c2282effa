"""Where workers read that their host is going to leave, and where they say that they have saved their state.

A file and a named pipe, so that workers in any language can use them; see rallypoint.worker.notice.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from rallypoint.worker.notice import NOTICE_VARIABLE

_CHUNK = 64 * 1024  # bytes; a pipe holds no more


class NoticeBoard:
    """One for a job. There is no file until a notice is posted."""

    def __init__(self, folder: Path, on_saved: Callable[[int], None]) -> None:
        """Set up; makes nothing yet.

        Args:
            folder: Where to make the files; the workers can read it.
            on_saved: Called, on the event loop, with the global rank of a worker that says that its state is saved.
        """
        self._notice = folder / "notice"
        self._pipe = folder / "notice.saved"
        self._on_saved = on_saved
        self._descriptor: int | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variable that tells workers where to look."""
        return {NOTICE_VARIABLE: str(self._notice)}

    def post(self, reason: str, deadline: float, time: float) -> None:
        """Tell the workers; a notice that is there already is replaced.

        Args:
            reason: Why the host leaves.
            deadline: When workers are stopped if they have not saved their state, in seconds of CLOCK_MONOTONIC.
            time: The same moment by the wall clock, in Unix seconds.

        Raises:
            OSError: It can't be written.
        """
        self._listen()
        content = {"reason": reason, "deadline": deadline, "time": time, "saved": str(self._pipe)}
        # All of it or nothing: whoever sees the name reads a whole notice.
        draft = self._notice.with_suffix(".draft")
        draft.write_text(json.dumps(content) + "\n", encoding="utf-8")
        draft.rename(self._notice)

    def close(self) -> None:
        """Listen no longer."""
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _listen(self) -> None:
        if self._descriptor is not None:
            return
        with suppress(FileExistsError):
            os.mkfifo(self._pipe, 0o600)
        # For writing too: with no writer left, a pipe that is only read would be at its end for ever.
        self._descriptor = os.open(self._pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        asyncio.get_running_loop().add_reader(self._descriptor, self._hear, self._descriptor)

    def _hear(self, descriptor: int) -> None:
        try:
            said = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return
        # A line is written at once, so it arrives as a whole. What is no rank is nobody's word.
        for line in said.split():
            if line.isdigit() and len(line) < 10:
                self._on_saved(int(line))
