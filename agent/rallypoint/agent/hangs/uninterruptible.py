"""Detection of workers that are stuck in the kernel: not even SIGKILL ends a process in uninterruptible sleep.

The kernel does not announce such a sleep, so this polls; only if TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT is set, as
torch's agent does. Unlike there, a thread that two polls find asleep counts as stuck only if it has not run in between:
a worker that waits for its disk again and again is slow, and not stuck.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rallypoint.agent.hangs.diagnostics import in_background
from rallypoint.agent.hangs.kernel_stacks import inspect_process
from rallypoint.rpc.endpoint import SettingError

TIMEOUT_VARIABLE = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"

_LONGEST_PAUSE = 5.0  # seconds between two polls, which cost some 10 µs for each thread
_SWITCHES = re.compile(r"^(?:non)?voluntary_ctxt_switches:\s*(\d+)$", re.MULTILINE)


def uninterruptible_timeout(environment: Mapping[str, str]) -> float:
    """Seconds that a worker may be in uninterruptible sleep; 0: no limit.

    Raises:
        SettingError: The variable is not a number; one line. (torch would silently not watch then.)
    """
    text = environment.get(TIMEOUT_VARIABLE, "")
    try:
        return max(0.0, float(text or "0"))
    except ValueError:
        raise SettingError(
            f"{TIMEOUT_VARIABLE}={text!r} is not a number; expected seconds, or 0 not to watch"
        ) from None


@dataclass(frozen=True, slots=True)
class BlockedThread:
    """A thread in uninterruptible sleep.

    Attributes:
        switches: Number of its context switches so far: an equal number means the same sleep.
    """

    pid: int
    tid: int
    switches: int


@dataclass(slots=True)
class StuckWatch:
    """The start times of uninterruptible sleeps.

    Attributes:
        timeout: Seconds that a thread may sleep.
    """

    timeout: float
    _since: dict[BlockedThread, float] = field(default_factory=dict)

    @property
    def pause(self) -> float:
        """Seconds until the next poll."""
        return min(self.timeout / 2, _LONGEST_PAUSE)

    def note(self, sleepers: Collection[BlockedThread], now: float) -> BlockedThread | None:
        """Take the result of a poll.

        Args:
            sleepers: All threads in uninterruptible sleep.
            now: Time of the poll, in monotonic seconds.

        Returns:
            A thread that has slept for too long, if there is one.
        """
        self._since = {sleeper: self._since.get(sleeper, now) for sleeper in sleepers}
        return next((each for each, since in self._since.items() if now - since >= self.timeout), None)


async def await_stuck(pids: Callable[[], Mapping[int, int]], timeout: float) -> str:
    """Return a sentence once a worker is stuck.

    Args:
        pids: Process ids of the running workers, by rank.
        timeout: Seconds that a worker may be in uninterruptible sleep.
    """
    watch = StuckWatch(timeout)
    while True:
        await asyncio.sleep(watch.pause)
        workers = {pid: rank for rank, pid in pids().items()}
        sleepers = await in_background(partial(find_sleepers, workers))
        if (stuck := watch.note(sleepers, time.monotonic())) is not None:
            return await in_background(partial(_describe, stuck, workers[stuck.pid], timeout))


def find_sleepers(pids: Collection[int], proc: Path = Path("/proc")) -> list[BlockedThread]:
    """The threads of these processes that are in uninterruptible sleep."""
    found: list[BlockedThread] = []
    for pid in pids:
        with suppress(OSError):
            for tid in os.listdir(proc / str(pid) / "task"):
                folder = proc / str(pid) / "task" / tid
                with suppress(OSError):
                    line = (folder / "stat").read_text(errors="replace")
                    if line[line.rfind(")") + 2 : line.rfind(")") + 3] == "D":
                        counts = _SWITCHES.findall((folder / "status").read_text(errors="replace"))
                        found.append(BlockedThread(pid, int(tid), sum(map(int, counts))))
    return found


def _describe(stuck: BlockedThread, rank: int, timeout: float) -> str:
    look = inspect_process(stuck.pid)
    thread = next((thread for thread in look.threads if thread.tid == stuck.tid), None) if look else None
    why = f": it {thread.meaning}" if thread is not None and thread.meaning else ""
    wait = (
        ", ".join(part for part in (thread.wait_channel, thread.call) if part) if thread is not None else ""
    )
    where = f" ({wait})" if wait else ""
    worker = f"worker of rank {rank} (process {stuck.pid})"
    return f"{worker} has been in uninterruptible sleep for {timeout:g} s{why}{where}"
