"""Evidence of a hang: what a worker was doing when its timer ran out, gathered while it still lives.

Bounded: whatever can't be had in time is left out, and the text says so.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from rallypoint.agent.hangs.hung_worker import HungWorker
from rallypoint.agent.hangs.kernel_stacks import ProcessLook, inspect_process, render_threads
from rallypoint.agent.hangs.python_stacks import StackPipe, in_order, innermost, looks_like_stacks, spy
from rallypoint.rpc.logs import get_logger
from rallypoint.timer.worker.process import STACK_SIGNAL

# Of the time since a timer began: who used more of it computes, who used less waits.
_BUSY, _IDLE = 0.5, 0.05

_log = get_logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InspectedProcess:
    """A process that is asked.

    Attributes:
        pid: which.
        pidfd: holds on to it, so that no signal can go to another that got its number.
    """

    pid: int
    pidfd: int


@dataclass(frozen=True, slots=True)
class PythonStacks:
    """Stacks of one process, and how they were had."""

    text: str
    source: str


@dataclass(slots=True)
class Diagnostics:
    """What was found; the text grows with it.

    Attributes:
        hang: the timer that ran out.
        rank: of the worker.
        looks: what the kernel said of the processes asked, the one that holds the timer first.
        stacks: their Python stacks, by pid.
        gaps: what could not be had, in words.
    """

    hang: HungWorker
    rank: int
    process_looks: list[ProcessLook] = field(default_factory=list)
    stacks: dict[int, PythonStacks] = field(default_factory=dict)
    gaps: list[str] = field(default_factory=list)

    @property
    def cpu_used(self) -> float | None:
        """Seconds of processor time that the holder has used since it began; None if that was not noted."""
        holder = next((look for look in self.process_looks if look.pid == self.hang.pid), None)
        if self.hang.cpu_seconds is None or holder is None:
            return None
        return max(0.0, holder.cpu_seconds - self.hang.cpu_seconds)

    @property
    def summary(self) -> str:
        """One line that says who hangs where, and whether it waits or computes."""
        hang = self.hang
        pid = self.process_looks[0].pid if self.process_looks else hang.pid
        process = f", process {pid}," if pid else ""
        told = [f"rank {self.rank}{process} hangs in {hang.scope!r}, which may take {hang.after:g} s"]
        if hang.requested:
            told = [f"rank {self.rank}{process.rstrip(',')}"]
        if self.process_looks:
            told.append(_state_of(self.process_looks[0], self._business()))
        if self.stacks and (frame := innermost(next(iter(self.stacks.values())).text)):
            told[-1] += f", in {frame}"
        line = ": ".join(told)
        if (used := self.cpu_used) is not None:
            line += f"; it used {used:.1f} s of processor time in the {hang.after + hang.late_by:.1f} s since it began"
        return line

    @property
    def text(self) -> str:
        """All of it for people: what matters most comes first."""
        parts = [self.summary]
        for pid, stacks in self.stacks.items():
            parts.append(f"Python stacks of process {pid} ({stacks.source}):\n\n{stacks.text}")
        if self.gaps:
            parts.append("Missing: " + "; ".join(self.gaps) + ".")
        for look in self.process_looks:
            what = f"{look.thread_count} thread{'s' * (look.thread_count != 1)}"
            parts.append(f"What the kernel says of process {look.pid}, {what}:\n\n{render_threads(look)}")
        return "\n\n".join(parts)

    def _business(self) -> float | None:
        """Which part of the time since it began was spent computing, in processors."""
        used, elapsed = self.cpu_used, self.hang.after + self.hang.late_by
        return None if used is None or elapsed <= 0 else used / elapsed


def _state_of(look: ProcessLook, business: float | None) -> str:
    main, stuck = look.main, look.stuck
    if stuck is not None:
        what = stuck.meaning or "waits in the kernel"
        channel = f" ({stuck.wait_channel})" if stuck.wait_channel else ""
        call = f", system call {stuck.call}" if stuck.call else ""
        whose = "it is" if stuck is main else f"its thread {stuck.tid} ({stuck.name}) is"
        return f"{whose} in uninterruptible sleep: it {what}{channel}{call}"
    if look.stopped:
        return f"it was {main.state_in_words}"
    if main.state == "R":
        return "it computes" if business is None or business >= _BUSY else "it computes at the moment"
    waits = main.meaning or "waits"
    if business is None:
        return f"its main thread {waits}"
    if business >= _BUSY:
        return f"other threads compute while its main thread {waits}"
    if business <= _IDLE:
        return f"it {waits}"
    return f"it {waits} at the moment, and computed for a part of the time"


async def collect_diagnostics(
    evidence: Diagnostics, suspects: Sequence[InspectedProcess], pipe: StackPipe | None, timeout: float
) -> None:
    """Finds out what can be found out in time. Raises nothing but CancelledError.

    A stopped process is resumed, since only then can it write its stacks; not where nobody is to be killed.

    Args:
        evidence: gets what is found.
        suspects: the processes to be asked, the holder of the timer first.
        pipe: where the worker and its children write their stacks; None if there is none.
        timeout: seconds in all.
    """
    try:
        async with asyncio.timeout(timeout):
            await _inspect(evidence, suspects)
            for suspect, look in zip(suspects, list(evidence.process_looks), strict=False):
                await _request_stacks(evidence, suspect, look, pipe)
    except TimeoutError:
        evidence.gaps.append(f"whatever takes longer than {timeout:g} s to find out")
    except Exception as error:
        _log.exception("could not gather evidence of a hang", worker=evidence.hang.worker_id)
        evidence.gaps.append(f"what a failure of the agent has cost ({error!r})")


async def _inspect(evidence: Diagnostics, suspects: Sequence[InspectedProcess]) -> None:
    for suspect in suspects:
        look = await in_background(partial(inspect_process, suspect.pid))
        if look is not None:
            evidence.process_looks.append(look)


async def _request_stacks(
    evidence: Diagnostics, suspect: InspectedProcess, look: ProcessLook, pipe: StackPipe | None
) -> None:
    spare = evidence.hang.signal is None
    hears = look.main.state != "D" and not (look.stopped and spare)
    if pipe is not None and STACK_SIGNAL in look.catches and hears:
        said: list[bytes] = []
        try:
            await pipe.request_stacks(suspect.pidfd, resume=look.stopped and not spare, said=said)
        finally:
            text = b"".join(said).decode("utf-8", "replace")
            if looks_like_stacks(text):
                found = in_order(text, evidence.hang.scope)
                evidence.stacks[suspect.pid] = PythonStacks(
                    found, "the hung thread, or the main thread, first"
                )
        if suspect.pid in evidence.stacks:
            return
    # One that waits for a disk holds locks of its memory, as a rule, and who reads there would wait with it.
    text = "" if look.main.state == "D" else await spy(suspect.pid)
    if text:
        evidence.stacks[suspect.pid] = PythonStacks(text, "by py-spy")
    else:
        evidence.gaps.append(f"Python stacks of process {suspect.pid} ({_why_silent(look, spare)})")


def _why_silent(look: ProcessLook, spare: bool) -> str:
    if look.main.state == "D":
        return "in uninterruptible sleep it can't say them"
    if look.stopped and spare:
        return "it is stopped"
    if STACK_SIGNAL in look.catches:
        return "asked, it did not answer"
    return "it has not used rallypoint.timer, and py-spy is not installed or can't read them"


async def in_background(work: Callable[[], T]) -> T:
    """Runs what may block for ever; who waits for it can be cancelled, and the end of this process is not delayed."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def tell(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, failure = None, None
        try:
            value = work()
        except BaseException as error:
            failure = error
        try:
            loop.call_soon_threadsafe(tell, value, failure)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    threading.Thread(target=run, name="evidence", daemon=True).start()
    return await result
