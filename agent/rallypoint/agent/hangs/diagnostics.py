"""Diagnostics of a hang: the state of a worker whose timer has expired, collected while it is alive.

Bounded: a part that takes too long is left out, and the text lists it as missing.
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

# Parts of the time since the timer started: a process that used more processor time computes, one with less waits.
_BUSY, _IDLE = 0.5, 0.05

_log = get_logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InspectedProcess:
    """A process to inspect.

    Attributes:
        pidfd: a reference to it, so that no signal can reach another process that got its number.
    """

    pid: int
    pidfd: int


@dataclass(frozen=True, slots=True)
class PythonStacks:
    """Stacks of one process, and their source."""

    text: str
    source: str


@dataclass(slots=True)
class Diagnostics:
    """The diagnostics collected so far; the text grows with them.

    Attributes:
        process_looks: the kernel's view of the inspected processes, the holder of the timer first.
        stacks: their Python stacks, by pid.
        gaps: the missing parts, for people.
    """

    hang: HungWorker
    rank: int
    process_looks: list[ProcessLook] = field(default_factory=list)
    stacks: dict[int, PythonStacks] = field(default_factory=dict)
    gaps: list[str] = field(default_factory=list)

    @property
    def cpu_used(self) -> float | None:
        """Processor seconds that the timer's holder used since the timer started; None if not measured."""
        holder = next((look for look in self.process_looks if look.pid == self.hang.pid), None)
        if self.hang.cpu_seconds is None or holder is None:
            return None
        return max(0.0, holder.cpu_seconds - self.hang.cpu_seconds)

    @property
    def summary(self) -> str:
        """One line: the rank and process that hangs, the place, and whether it waits or computes."""
        hang = self.hang
        pid = self.process_looks[0].pid if self.process_looks else hang.pid
        process = f", process {pid}," if pid else ""
        parts = [f"rank {self.rank}{process} hangs in {hang.scope!r}, which may take {hang.after:g} s"]
        if hang.requested:
            parts = [f"rank {self.rank}{process.rstrip(',')}"]
        if self.process_looks:
            parts.append(_state_of(self.process_looks[0], self._load()))
        if self.stacks and (frame := innermost(next(iter(self.stacks.values())).text)):
            parts[-1] += f", in {frame}"
        line = ": ".join(parts)
        if (used := self.cpu_used) is not None:
            line += f"; it used {used:.1f} s of processor time in the {hang.after + hang.late_by:.1f} s since it began"
        return line

    @property
    def text(self) -> str:
        """All diagnostics for people, the most important first."""
        parts = [self.summary]
        for pid, stacks in self.stacks.items():
            parts.append(f"Python stacks of process {pid} ({stacks.source}):\n\n{stacks.text}")
        if self.gaps:
            parts.append("Missing: " + "; ".join(self.gaps) + ".")
        for look in self.process_looks:
            count = f"{look.thread_count} thread{'s' * (look.thread_count != 1)}"
            parts.append(f"Kernel state of process {look.pid}, {count}:\n\n{render_threads(look)}")
        return "\n\n".join(parts)

    def _load(self) -> float | None:
        """Processors that it used on average since the timer started; None if not measured."""
        used, elapsed = self.cpu_used, self.hang.after + self.hang.late_by
        return None if used is None or elapsed <= 0 else used / elapsed


def _state_of(look: ProcessLook, load: float | None) -> str:
    main, stuck = look.main, look.stuck
    if stuck is not None:
        meaning = stuck.meaning or "waits in the kernel"
        channel = f" ({stuck.wait_channel})" if stuck.wait_channel else ""
        call = f", system call {stuck.call}" if stuck.call else ""
        subject = "it is" if stuck is main else f"its thread {stuck.tid} ({stuck.name}) is"
        return f"{subject} in uninterruptible sleep: it {meaning}{channel}{call}"
    if look.stopped:
        return f"it was {main.state_in_words}"
    if main.state == "R":
        return "it computes" if load is None or load >= _BUSY else "it computes at the moment"
    waits = main.meaning or "waits"
    if load is None:
        return f"its main thread {waits}"
    if load >= _BUSY:
        return f"other threads compute while its main thread {waits}"
    if load <= _IDLE:
        return f"it {waits}"
    return f"it {waits} at the moment, and computed for a part of the time"


async def collect_diagnostics(
    diagnostics: Diagnostics, processes: Sequence[InspectedProcess], pipe: StackPipe | None, timeout: float
) -> None:
    """Collect the diagnostics that can be collected in time. Raises nothing but CancelledError.

    A stopped process is resumed, because only then can it write its stacks; but not if it is not to be killed.

    Args:
        diagnostics: receives the results.
        processes: the processes to inspect, the holder of the timer first.
        pipe: pipe into which the worker and its children write their stacks; None if there is none.
        timeout: seconds in all.
    """
    try:
        async with asyncio.timeout(timeout):
            await _inspect(diagnostics, processes)
            for process, look in zip(processes, list(diagnostics.process_looks), strict=False):
                await _request_stacks(diagnostics, process, look, pipe)
    except TimeoutError:
        diagnostics.gaps.append(f"diagnostics that take longer than {timeout:g} s")
    except Exception as error:
        _log.exception("could not collect the diagnostics of a hang", worker=diagnostics.hang.worker_id)
        diagnostics.gaps.append(f"diagnostics lost by an internal error of the agent ({error!r})")


async def _inspect(diagnostics: Diagnostics, processes: Sequence[InspectedProcess]) -> None:
    for process in processes:
        look = await in_background(partial(inspect_process, process.pid))
        if look is not None:
            diagnostics.process_looks.append(look)


async def _request_stacks(
    diagnostics: Diagnostics, process: InspectedProcess, look: ProcessLook, pipe: StackPipe | None
) -> None:
    spare = diagnostics.hang.signal is None
    responsive = look.main.state != "D" and not (look.stopped and spare)
    if pipe is not None and STACK_SIGNAL in look.catches and responsive:
        output: list[bytes] = []
        try:
            await pipe.request_stacks(process.pidfd, resume=look.stopped and not spare, output=output)
        finally:
            text = b"".join(output).decode("utf-8", "replace")
            if looks_like_stacks(text):
                found = in_order(text, diagnostics.hang.scope)
                diagnostics.stacks[process.pid] = PythonStacks(
                    found, "the hung thread, or the main thread, first"
                )
        if process.pid in diagnostics.stacks:
            return
    # A process that waits for a disk usually holds locks of its memory, and a reader of that memory would block too.
    text = "" if look.main.state == "D" else await spy(process.pid)
    if text:
        diagnostics.stacks[process.pid] = PythonStacks(text, "by py-spy")
    else:
        diagnostics.gaps.append(f"Python stacks of process {process.pid} ({_why_silent(look, spare)})")


def _why_silent(look: ProcessLook, spare: bool) -> str:
    if look.main.state == "D":
        return "it can't write them in uninterruptible sleep"
    if look.stopped and spare:
        return "it is stopped"
    if STACK_SIGNAL in look.catches:
        return "it did not respond to the request"
    return "it has not used rallypoint.timer, and py-spy is not installed or can't read them"


async def in_background(work: Callable[[], T]) -> T:
    """Run a function that may block for ever in a thread: the caller can be cancelled, and this process can exit."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def publish(value: T | None, error: BaseException | None) -> None:
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
            loop.call_soon_threadsafe(publish, value, failure)
        except RuntimeError:
            return  # the loop is closed: no task waits for the result any more

    threading.Thread(target=run, name="evidence", daemon=True).start()
    return await result
