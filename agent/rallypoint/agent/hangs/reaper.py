"""The end of a worker whose timer has expired: diagnostics first, then the chosen signal, then SIGKILL of its tree."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from rallypoint.agent.failures.failure import MAX_TRACEBACK, WorkerFailure
from rallypoint.agent.hangs.diagnostics import (
    Diagnostics,
    InspectedProcess,
    PythonStacks,
    collect_diagnostics,
    in_background,
)
from rallypoint.agent.hangs.hung_worker import HungWorker
from rallypoint.agent.hangs.kernel_stacks import ProcessLook, caught_signals, inspect_process
from rallypoint.agent.hangs.python_stacks import StackPipe, in_order, last_dump
from rallypoint.agent.spawner.protocol import KillResult
from rallypoint.rendezvous.core.state import FailureKind
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.text import clip

SIGNAL_TIMEOUT = 5.0
"""Seconds that a worker has to end after the signal it chose. Enough to log its state; a hung worker should not write a
checkpoint."""

SLOW_DEATH = 20.0
"""Additional seconds that a process has to die of SIGKILL if it is not in uninterruptible sleep: freeing a terabyte of
memory, or memory of a device driver, takes that long. A host that is considered unhealthy is lost to its job."""

# Seconds that a process in uninterruptible sleep has to die: it may sleep only for a moment of its death.
_MOMENT = 1.0

LOOK_TIMEOUT = 1.0
"""Limit in seconds for reading /proc if the result is only needed for a sentence in a report."""

# The part of the diagnosis timeout for collecting; the rest is for writing the file.
_COLLECTING = 0.8

_log = get_logger("rallypoint.agent")


def hang_message(hang: HungWorker) -> str:
    """Return one sentence with the reason for which a worker is reported or killed."""
    if hang.requested:
        return hang.requested
    learned = f", as learned from {hang.learned_from} completions" if hang.learned_from else ""
    return (
        f"it did not leave {hang.scope!r} within {hang.after:g} s{learned} (found {hang.late_by:.3f} s later)"
    )


@dataclass(slots=True)
class HangReport:
    """Reason and diagnostics of a hang, for the report of the worker's failure.

    Attributes:
        message: the reason, one sentence.
        diagnostics: the diagnostics; None if none were collected.
        file: file with all of them; None if there is none.
        dump_from: offset in it after which the worker may have written its stacks when SIGABRT ended it; None if it
            got no SIGABRT.
        to_be_killed: True once it was sent a signal to end it: then every exit of it is a failure.
        has_responded: True if it did write the stacks.
    """

    message: str
    diagnostics: Diagnostics | None = None
    file: Path | None = None
    stderr: Path | None = None
    dump_from: int | None = None
    to_be_killed: bool = False
    has_responded: bool = False

    @property
    def figures(self) -> dict[str, str]:
        """The present state, as fields of a log line."""
        if self.diagnostics is None:
            return {"reason": self.message}
        file = str(self.file) if self.file is not None else "could not be written"
        return {"reason": self.message, "evidence": file, "summary": self.diagnostics.summary}

    def read_last_output(self) -> None:
        """Add the stacks that it has written when it died, if any. To be called once it is dead."""
        if self.dump_from is None or self.diagnostics is None or self.stderr is None:
            return
        dump, self.dump_from = last_dump(self.stderr, self.dump_from), None
        if dump:
            pid = (
                self.diagnostics.process_looks[-1].pid
                if self.diagnostics.process_looks
                else self.diagnostics.hang.pid
            )
            ordered = in_order(dump, self.diagnostics.hang.scope)
            self.diagnostics.stacks[pid] = PythonStacks(ordered, "written when SIGABRT ended it")
            self.diagnostics.gaps = [
                gap for gap in self.diagnostics.gaps if not gap.startswith("Python stacks of")
            ]
            self.has_responded = True

    def complete_failure(self, failure: WorkerFailure) -> WorkerFailure:
        """Return the failure with the reason of the kill, and the diagnostics."""
        self.read_last_output()
        completed = replace(failure, message=self.message, kind=FailureKind.HUNG)
        if self.diagnostics is None:
            return completed
        return replace(completed, traceback=_bounded(self.diagnostics.text, self.file))


def _bounded(text: str, file: Path | None) -> str:
    """The beginning of the diagnostics, the most important part: the report is sent to every node."""
    where = f"\n\nAll of it: {file}" if file is not None else ""
    return clip(text, MAX_TRACEBACK - len(os.fsencode(where)), "\n...") + where


@dataclass(frozen=True, slots=True)
class HungProcess:
    """The processes and files of a hung worker.

    Attributes:
        pipe: pipe into which it writes its stacks; None if there is none.
        is_ours: returns True for a worker of this host, and for its descendants.
    """

    pid: int
    rank: int
    stderr: Path
    file: Path
    pipe: StackPipe | None
    is_ours: Callable[[int], bool]


@dataclass(slots=True)
class Reaping:
    """Diagnosis of one worker, and its end unless it is only to be reported."""

    hang: HungWorker
    process: HungProcess
    evidence_timeout: float
    case: HangReport = field(init=False)
    _diagnostics_left: float = field(init=False)

    def __post_init__(self) -> None:
        self._diagnostics_left = self.evidence_timeout
        self.case = HangReport(hang_message(self.hang), stderr=self.process.stderr)

    async def examine(self) -> None:
        """Collect diagnostics, and write them into the worker's file. Bounded."""
        if self._diagnostics_left <= 0:
            return
        began = time.monotonic()
        diagnostics = self.case.diagnostics = Diagnostics(self.hang, self.process.rank)
        await self._collect(diagnostics)
        left = self.evidence_timeout - (time.monotonic() - began)
        when = time.strftime("%Y-%m-%d %H:%M:%S %z")
        await self._write(f"{when}: {self.case.message}\n\n{diagnostics.text}\n", min(left, LOOK_TIMEOUT))
        self._diagnostics_left = self.evidence_timeout - (time.monotonic() - began)

    async def diagnose(self) -> Diagnostics:
        """Collect diagnostics without writing a file. Bounded."""
        diagnostics = Diagnostics(self.hang, self.process.rank)
        await self._collect(diagnostics)
        return diagnostics

    async def _collect(self, diagnostics: Diagnostics) -> None:
        with self._pinned_processes() as processes:
            await collect_diagnostics(
                diagnostics, processes, self.process.pipe, _COLLECTING * self.evidence_timeout
            )

    async def end(self, kill: Callable[[], Awaitable[KillResult]]) -> KillResult:
        """End the worker and its descendants; see the module. Bounded, as `kill` is.

        Args:
            kill: sends SIGKILL to its whole tree; returns when all processes are dead, or some have outlived it.
        """
        number = self.hang.signal or signal.SIGKILL
        self.case.to_be_killed = True
        if number != signal.SIGKILL:
            await self._end_by(number, SIGNAL_TIMEOUT)
        if (
            self.case.diagnostics is not None
            and not self.case.diagnostics.stacks
            and self._diagnostics_left > 0
        ):
            await self._request_last_output()
        killed = await kill()
        self.case.read_last_output()
        if self.case.has_responded and self.case.diagnostics is not None:
            stacks = next(iter(self.case.diagnostics.stacks.values()))
            await self._write(f"\nPython stacks, {stacks.source}:\n\n{stacks.text}\n", LOOK_TIMEOUT)
        return killed

    async def _end_by(self, number: int, timeout: float) -> None:
        with self._pinned(self.process.pid) as pidfd:
            if pidfd is None:
                return
            try:
                signal.pidfd_send_signal(pidfd, number)
                signal.pidfd_send_signal(
                    pidfd, signal.SIGCONT
                )  # a stopped process would not handle the signal
            except OSError as error:
                _log.warning("could not signal a worker", signal=number, reason=error.strerror)
                return
            await _exit_of(pidfd, timeout)

    async def _request_last_output(self) -> None:
        """Send SIGABRT, the last resort: Python's fault handler writes the stacks when it ends a process."""
        pid, diagnostics = self.process.pid, self.case.diagnostics
        if signal.SIGABRT not in caught_signals(pid):
            return
        if diagnostics is not None and any(
            look.pid == pid and look.main.state == "D" for look in diagnostics.process_looks
        ):
            return  # in uninterruptible sleep it handles no signal
        try:
            _, most = resource.prlimit(pid, resource.RLIMIT_CORE)
            # Not 0: if cores are piped into a program, the kernel ignores a limit of 0, but not a limit of 1.
            least = 1 if most == resource.RLIM_INFINITY else min(1, most)
            resource.prlimit(pid, resource.RLIMIT_CORE, (least, most))
            async with asyncio.timeout(min(self._diagnostics_left, LOOK_TIMEOUT)):
                self.case.dump_from = (await in_background(self.process.stderr.stat)).st_size
        except (OSError, TimeoutError):
            return  # without a limit, a core dump of some hundred gigabytes might be written: too much for stacks
        await self._end_by(signal.SIGABRT, self._diagnostics_left)

    async def _write(self, text: str, timeout: float) -> None:
        """Append to the worker's file. Its file system may hang, and may even be the reason for the worker's hang."""
        path = self.process.file

        def append() -> None:
            with open(path, "a", encoding="utf-8") as file:
                file.write(text)

        try:
            async with asyncio.timeout(timeout):
                await in_background(append)
            self.case.file = path
        except TimeoutError:
            _log.warning("could not write the diagnostics of a hang in time", file=str(path))
        except OSError as error:
            _log.warning("could not write the diagnostics of a hang", file=str(path), reason=error.strerror)

    @contextmanager
    def _pinned_processes(self) -> Iterator[Sequence[InspectedProcess]]:
        """The holder of the timer and, if that is another process, the worker."""
        with ExitStack() as stack:
            pids = dict.fromkeys((self.hang.pid or self.process.pid, self.process.pid))
            pinned = {pid: stack.enter_context(self._pinned(pid)) for pid in pids}
            yield [InspectedProcess(pid, pidfd) for pid, pidfd in pinned.items() if pidfd is not None]

    @contextmanager
    def _pinned(self, pid: int) -> Iterator[int | None]:
        """Open a pidfd of a worker's process; None if it has ended, and its number may belong to another process."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            yield None
            return
        try:
            yield pidfd if self.process.is_ours(pid) else None
        finally:
            os.close(pidfd)


async def _exit_of(pidfd: int, timeout: float) -> bool:
    """Wait for the exit of a process, for at most so many seconds; True if it has exited."""
    loop = asyncio.get_running_loop()
    exited: asyncio.Future[None] = loop.create_future()
    loop.add_reader(pidfd, lambda: None if exited.done() else exited.set_result(None))
    try:
        await asyncio.wait({exited}, timeout=timeout)
        return exited.done()
    finally:
        loop.remove_reader(pidfd)


async def survivors_of(pids: Sequence[int]) -> tuple[int, ...]:
    """The processes that SIGKILL, sent some seconds ago, does not end; waits for those that are only slow to die."""
    lives = await asyncio.gather(*(_lives_on(pid) for pid in pids))
    return tuple(pid for pid, lives_on in zip(pids, lives, strict=True) if lives_on)


async def _lives_on(pid: int) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if await _is_stuck(pid):
            if await _exit_of(pidfd, _MOMENT):
                return False
            if await _is_stuck(pid):
                return True
        return not await _exit_of(pidfd, SLOW_DEATH)
    finally:
        os.close(pidfd)


async def _is_stuck(pid: int) -> bool:
    look = await _inspect_worker(pid)
    return look is not None and look.stuck is not None


async def _inspect_worker(pid: int) -> ProcessLook | None:
    with suppress(TimeoutError):
        async with asyncio.timeout(LOOK_TIMEOUT):
            return await in_background(partial(inspect_process, pid))
    return None


async def describe_left(pids: Sequence[int]) -> str:
    """Describe in one sentence the processes that outlived SIGKILL, and the resources that they wait for."""
    parts = []
    for pid in pids[:4]:
        look = await _inspect_worker(pid)
        stuck = look.stuck if look is not None else None
        if stuck is not None:
            why = stuck.meaning or "waits in the kernel"
            where = ", ".join(part for part in (stuck.wait_channel, stuck.call) if part)
            parts.append(
                f"{pid} ({stuck.name}) is in uninterruptible sleep: it {why}" + f" ({where})" * bool(where)
            )
        elif look is not None:
            parts.append(f"{pid} ({look.main.name}) is {look.main.state_in_words}")
        else:
            parts.append(f"{pid}")
    more = f" and {len(pids) - 4} more" if len(pids) > 4 else ""
    plural = "es" if len(pids) > 1 else ""
    return f"process{plural} of workers outlived SIGKILL: {'; '.join(parts)}{more}"
