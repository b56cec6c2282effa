"""A host that is being drained: its workers are warned, and get their time to finish or to save their state."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rallypoint.agent.core import core
from rallypoint.rpc.logs import get_logger
from rallypoint.worker.notice import NOTICE_VARIABLE

# ---- Where workers read that their host is going to leave, and where they say that they have saved their state.
#
# A file and a named pipe, so that workers in any language can use them; see rallypoint.worker.notice.


_CHUNK = 64 * 1024  # bytes; a pipe holds no more


class PreemptionNotice:
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
        asyncio.get_running_loop().add_reader(self._descriptor, self._receive, self._descriptor)

    def _receive(self, descriptor: int) -> None:
        try:
            said = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return
        # A line is written at once, so it arrives as a whole. What is no rank is nobody's word.
        for line in said.split():
            if line.isdigit() and len(line) < 10:
                self._on_saved(int(line))


_log = get_logger("rallypoint.agent")


@dataclass(frozen=True, slots=True)
class DrainNotice:
    """That a host is being drained.

    Attributes:
        reason: Why, for people.
        deadline: When it leaves at the latest, by this host's wall clock, in Unix seconds.
        monotonic: The same moment in seconds of CLOCK_MONOTONIC, which nobody sets.
    """

    reason: str
    deadline: float
    monotonic: float


class _WorkerEnd(Protocol):
    @property
    def succeeded(self) -> bool:
        """Whether the worker returned 0."""


class _WorkerState(Protocol):
    @property
    def rank(self) -> int:
        """Its global rank."""

    @property
    def exit(self) -> _WorkerEnd | None:
        """How it ended, once it has."""


def all_saved(workers: Sequence[_WorkerState], saved: set[int]) -> bool:
    """Whether some workers run, all of them are among the ranks that saved their state, and the others succeeded.

    Where none runs they have succeeded, or one has failed; that is not for a drain to say.
    """
    running = [worker for worker in workers if worker.exit is None]
    ended = all(worker.exit.succeeded for worker in workers if worker.exit is not None)
    return bool(running) and ended and all(worker.rank in saved for worker in running)


class Drain:
    """Carries out what the core decides about a drain, and tells it when there is nothing more to wait for.

    Attributes:
        now: The drain that is going on; None if there is none.
    """

    def __init__(self, tell: Callable[[core.Event], None]) -> None:
        """Set up. `tell` is called with what the core must know."""
        self.now: DrainNotice | None = None
        self._publish = tell
        self._notice: PreemptionNotice | None = None
        self._saved: set[int] = set()
        self._workers: Callable[[], Sequence[_WorkerState]] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set_up(self, folder: Path) -> dict[str, str]:
        """Make ready to warn workers, in a folder that they can read.

        Returns:
            The variable that tells them where to look for a notice.
        """
        self._notice = PreemptionNotice(folder, self._has_saved)
        return self._notice.environment

    def begin(self, grace: float, reason: str) -> None:
        """Drain this host. While it is being drained already, only an earlier end of the grace changes anything.

        Args:
            grace: Seconds that workers get to finish or to save their state.
            reason: For people; workers can read it.
        """
        monotonic = time.monotonic() + grace
        first = self.now is None
        if self.now is not None and monotonic >= self.now.monotonic:
            return
        self.now = DrainNotice(
            reason if self.now is None else self.now.reason, time.time() + grace, monotonic
        )
        _log.warning("draining" if first else "draining faster", reason=reason, grace=grace)
        if self._timer is not None:
            self._timer.cancel()
        over = core.DrainOver(f"they had {grace:g} s to save their state")
        self._timer = asyncio.get_running_loop().call_later(grace, self._publish, over)
        if first:
            self._publish(core.DrainRequested(f"drained: {reason}"))
        elif self._workers is not None:
            self._post(self.now)

    def warn(self, workers: Callable[[], Sequence[_WorkerState]]) -> None:
        """Tell the workers, and mind what they answer.

        Args:
            workers: Says which run, or ended; empty until all have been started.
        """
        assert self.now is not None, "the core was told of it"
        self._workers = workers
        self._post(self.now)

    def check_workers(self) -> None:
        """A worker has ended: those that are left may all have saved their state."""
        if self._workers is not None and all_saved(self._workers(), self._saved):
            self._publish(core.DrainOver("its workers saved their state"))

    def close(self) -> None:
        """It is over, however it ended."""
        if self._timer is not None:
            self._timer.cancel()
        if self._notice is not None:
            self._notice.close()

    def _post(self, draining: DrainNotice) -> None:
        assert self._notice is not None, "set up before workers are started"
        try:
            self._notice.post(draining.reason, draining.monotonic, draining.deadline)
        except OSError as error:
            _log.error("workers can't be told that they are drained", reason=error.strerror)

    def _has_saved(self, rank: int) -> None:
        if rank not in self._saved:
            _log.info("a worker saved its state", rank=rank)
            self._saved.add(rank)
            self.check_workers()
