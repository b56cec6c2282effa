"""Whether it was the kernel that killed a worker, for want of memory, and whose memory was used up.

A signal does not say who sent it. Two others do: the kernel counts, in each memory cgroup, the processes that it has
killed so, and it does that before it sends the signal; and it writes the process id into its log.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from rallypoint.agent.kernel_log import KernelLog, OomKill
from rallypoint.agent.memory_groups import MemoryGroup, memory_groups
from rallypoint.agent.spawn_protocol import WorkerExit


class MemoryWatch:
    """Remembers how often the kernel had killed for want of memory before workers were started."""

    def __init__(
        self,
        groups: Callable[[], list[MemoryGroup]] = memory_groups,
        log: KernelLog | None = None,
    ) -> None:
        """Begin now.

        Args:
            groups: what the cgroups of this process, which are those of its workers, say now.
            log: the kernel's log; None for this host's.
        """
        self._groups = groups
        self._before = {group.name: group for group in groups()}
        self._log = log if log is not None else KernelLog(Path("/dev/kmsg"))

    def explain(self, how: WorkerExit) -> str | None:
        """That the kernel killed a worker for want of memory, in a sentence; None if nothing shows that it did."""
        if how.signal != signal.SIGKILL:
            return None
        now = self._groups()
        word = self._log.kill_of(how.pid)
        if word is None and self._kills(now) == 0:
            return None
        peak = f"; its peak was {in_units(how.max_rss)}" if how.max_rss else ""
        return f"killed by the kernel for want of memory (SIGKILL): {self._whose(now, word)}{peak}"

    def hint(self, how: WorkerExit) -> str:
        """What to add to the sentence about a worker whose end `explain` does not explain; may be empty.

        A process of its own may have been killed, and that may be why it ended; and where it was killed itself, it is
        worth knowing that it was not by the kernel.
        """
        now = self._groups()
        if kills := self._kills(now):
            what = "a process" if kills == 1 else f"{kills} processes"
            return f"; the kernel has killed {what} here for want of memory since the workers were started"
        if how.signal != signal.SIGKILL or how.inferred:
            return ""
        if now and now[0].name in self._before:
            return "; not by the kernel for want of memory: somebody sent it"
        return "; if nobody sent it, the kernel's OOM killer may have: see dmesg"

    def close(self) -> None:
        """Watch no more."""
        self._log.close()

    def _kills(self, now: list[MemoryGroup]) -> int:
        """How many processes of this one's own cgroup were killed."""
        if not now or now[0].name not in self._before:
            return 0
        return max(0, now[0].kills - self._before[now[0].name].kills)

    def _whose(self, now: list[MemoryGroup], word: OomKill | None) -> str:
        """Whose memory was used up."""
        if word is not None and not word.of_cgroup:
            return "the host had none left"
        named = [group for group in now if word is not None and word.cgroup.endswith(group.name)]
        # Each counts what happens to those below it as well, so the lowest is the one.
        grown = [
            group
            for group in now
            if group.limit is not None
            and group.name in self._before
            and group.hits > self._before[group.name].hits
        ]
        for group in (*(group for group in named if group.limit is not None), *grown):
            return f"its cgroup {group.name} had used up its limit of {in_units(group.limit or 0)}"
        if word is not None:
            return f"the limit of its cgroup {word.cgroup}".rstrip() + " was used up"
        return "the host had none left"


def in_units(count: int) -> str:
    """Bytes for people, as in "1.5 GiB"."""
    number, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
