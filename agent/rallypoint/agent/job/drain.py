"""Drain of a host: its workers are warned, and get time to finish or to save their state."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rallypoint.agent.core import core
from rallypoint.agent.workers.group import Worker
from rallypoint.rpc.logs import get_logger
from rallypoint.worker.notice import NOTICE_VARIABLE

# ---- The file with the notice that the host is going to leave, and the pipe through which workers report saved state.
#
# A file and a named pipe, so that workers in any language can use them; see rallypoint.worker.notice.


_CHUNK = 64 * 1024  # bytes; a pipe holds no more


class PreemptionNotice:
    """Notice to the workers of one job. There is no file until a notice is posted."""

    def __init__(self, folder: Path, on_saved: Callable[[int], None]) -> None:
        """Set up; create no file yet.

        Args:
            folder: Folder for the files; the workers can read it.
            on_saved: Called on the event loop with the global rank of a worker that reports that it saved its state.
        """
        self._notice = folder / "notice"
        self._pipe = folder / "notice.saved"
        self._on_saved = on_saved
        self._descriptor: int | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The environment variable with the path of the notice."""
        return {NOTICE_VARIABLE: str(self._notice)}

    def post(self, reason: str, deadline: float, time: float) -> None:
        """Write the notice for the workers, or replace the present one.

        Args:
            deadline: When workers are stopped if they have not saved their state, in seconds of CLOCK_MONOTONIC.
            time: The same moment by the wall clock, in Unix seconds.

        Raises:
            OSError: The notice can't be written.
        """
        self._listen()
        content = {"reason": reason, "deadline": deadline, "time": time, "saved": str(self._pipe)}
        # Written under another name first: a worker never reads half a notice.
        draft = self._notice.with_suffix(".draft")
        draft.write_text(json.dumps(content) + "\n", encoding="utf-8")
        draft.rename(self._notice)

    def close(self) -> None:
        """Stop reading the pipe."""
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _listen(self) -> None:
        if self._descriptor is not None:
            return
        with suppress(FileExistsError):
            os.mkfifo(self._pipe, 0o600)
        # Opened for writing too: without any writer, reads would return end of file for ever.
        self._descriptor = os.open(self._pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        asyncio.get_running_loop().add_reader(self._descriptor, self._receive, self._descriptor)

    def _receive(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return
        # Workers write a line at once, so it arrives as a whole. Lines that are not a rank are ignored.
        for line in data.split():
            if line.isdigit() and len(line) < 10:
                self._on_saved(int(line))


_log = get_logger("rallypoint.agent")


@dataclass(frozen=True, slots=True)
class DrainNotice:
    """A drain of this host.

    Attributes:
        reason: Reason, for people.
        deadline: When it leaves at the latest, by this host's wall clock, in Unix seconds.
        monotonic: The same moment in seconds of CLOCK_MONOTONIC, which is never adjusted.
    """

    reason: str
    deadline: float
    monotonic: float


def all_saved(workers: Sequence[Worker], saved: set[int]) -> bool:
    """True if some workers run, all of these have saved their state, and the other workers succeeded.

    If none runs, all have succeeded or one has failed, and the worker group reports that.
    """
    running = [worker for worker in workers if worker.exit is None]
    ended = all(worker.exit.succeeded for worker in workers if worker.exit is not None)
    return bool(running) and ended and all(worker.rank in saved for worker in running)


class Drain:
    """Carries out the core's decisions about a drain, and publishes an event when the wait is over.

    Attributes:
        now: The drain in progress; None if there is none.
    """

    def __init__(self, publish: Callable[[core.Event], None]) -> None:
        """`publish`: receives the events for the core."""
        self.now: DrainNotice | None = None
        self._publish = publish
        self._notice: PreemptionNotice | None = None
        self._saved: set[int] = set()
        self._workers: Callable[[], Sequence[Worker]] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set_up(self, folder: Path) -> dict[str, str]:
        """Prepare a notice in a folder that the workers can read.

        Returns:
            The environment variable with the path of the notice.
        """
        self._notice = PreemptionNotice(folder, self._has_saved)
        return self._notice.environment

    def begin(self, grace: float, reason: str) -> None:
        """Drain this host. If a drain is in progress, only an earlier deadline has an effect.

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
        over = core.DrainOver(f"the grace period of {grace:g} s has ended")
        self._timer = asyncio.get_running_loop().call_later(grace, self._publish, over)
        if first:
            self._publish(core.DrainRequested(f"drained: {reason}"))
        elif self._workers is not None:
            self._post(self.now)

    def warn(self, workers: Callable[[], Sequence[Worker]]) -> None:
        """Write the notice, and wait for the workers' reports.

        Args:
            workers: Returns all workers, running or ended; empty until all have been started.
        """
        assert self.now is not None, "begin() has set it before the core decides"
        self._workers = workers
        self._post(self.now)

    def check_workers(self) -> None:
        """After a worker has ended: check whether all that still run have saved their state."""
        if self._workers is not None and all_saved(self._workers(), self._saved):
            self._publish(core.DrainOver("its workers saved their state"))

    def close(self) -> None:
        """Cancel the deadline and stop reading the pipe."""
        if self._timer is not None:
            self._timer.cancel()
        if self._notice is not None:
            self._notice.close()

    def _post(self, draining: DrainNotice) -> None:
        assert self._notice is not None, "set up before workers are started"
        try:
            self._notice.post(draining.reason, draining.monotonic, draining.deadline)
        except OSError as error:
            _log.error("can't write the drain notice for the workers", reason=error.strerror)

    def _has_saved(self, rank: int) -> None:
        if rank not in self._saved:
            _log.info("a worker saved its state", rank=rank)
            self._saved.add(rank)
            self.check_workers()
