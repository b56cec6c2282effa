"""The end of a worker that let its timer run out: evidence first, then the chosen signal, then SIGKILL of its tree."""

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

from rallypoint.agent.failures.failure import MAX_TRACEBACK, FailureKind, WorkerFailure
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
from rallypoint.rpc.logs import get_logger

SIGNAL_PATIENCE = 5.0
"""Seconds that a worker has to end by itself of the signal it chose. Enough to write down what it was at; a
checkpoint should not be written by one that hangs."""

SLOW_DEATH = 20.0
"""Seconds more that a process has to die of SIGKILL if it does not sleep uninterruptibly: to free a terabyte of memory,
or what a device driver holds, takes that long. A host that is taken for unfit is lost to its job."""

LOOK_TIMEOUT = 1.0
"""Seconds for a look at /proc where nothing waits for it but a sentence in a report."""

# The part of the time for evidence that finding it may take; the rest is for writing it down.
_GATHERING = 0.8

_log = get_logger("rallypoint.agent")


def hang_message(hang: HungWorker) -> str:
    """One sentence that says what a worker has done, or rather not done."""
    if hang.requested:
        return hang.requested
    learned = f", as learned from {hang.learned_from} completions" if hang.learned_from else ""
    return (
        f"it did not leave {hang.scope!r} within {hang.after:g} s{learned} (found {hang.late_by:.3f} s later)"
    )


@dataclass(slots=True)
class HangReport:
    """What is held against a worker, for the report of its failure.

    Attributes:
        message: the sentence.
        evidence: what was found; None if nobody looked.
        file: where all of it is; None if nowhere.
        stderr: the worker's standard error.
        dump_from: offset in it after which the worker, dying of SIGABRT, may have written its stacks; None if it
            was not made to.
        condemned: whether it was sent a signal to end it: however it ends then, it has failed.
        spoke: whether it did write them.
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
        """What is known so far, for a line of the log."""
        if self.diagnostics is None:
            return {"reason": self.message}
        file = str(self.file) if self.file is not None else "could not be written"
        return {"reason": self.message, "evidence": file, "summary": self.diagnostics.summary}

    def read_last_output(self) -> None:
        """Adds the stacks that it has written as it died, if any. Once it is dead."""
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
            self.diagnostics.stacks[pid] = PythonStacks(ordered, "as it died of SIGABRT")
            self.diagnostics.gaps = [
                gap for gap in self.diagnostics.gaps if not gap.startswith("Python stacks of")
            ]
            self.has_responded = True

    def complete_failure(self, failure: WorkerFailure) -> WorkerFailure:
        """The failure as it is reported: what it was killed for, and what it was doing."""
        self.read_last_output()
        told = replace(failure, message=self.message, kind=FailureKind.HUNG)
        if self.diagnostics is None:
            return told
        return replace(told, traceback=_bounded(self.diagnostics.text, self.file))


def _bounded(text: str, file: Path | None) -> str:
    """What fits into a report, which travels to every node: the beginning, since what matters most is there."""
    where = f"\n\nAll of it: {file}" if file is not None else ""
    raw = text.encode("utf-8", "replace")
    room = MAX_TRACEBACK - len(os.fsencode(where)) - 8
    if len(raw) > room:
        text = raw[:room].decode("utf-8", "ignore") + "\n..."
    return text + where


@dataclass(frozen=True, slots=True)
class HungProcess:
    """The worker whose timer ran out.

    Attributes:
        pid: its process.
        rank: in the round.
        stderr: its standard error.
        file: where to put evidence.
        pipe: where it writes its stacks; None if there is none.
        is_ours: whether a process is the worker or descends from a process of this host's workers.
    """

    pid: int
    rank: int
    stderr: Path
    file: Path
    pipe: StackPipe | None
    is_ours: Callable[[int], bool]


@dataclass(slots=True)
class Reaping:
    """One worker is examined, and then ended unless it is to live."""

    hang: HungWorker
    process: HungProcess
    evidence_timeout: float
    case: HangReport = field(init=False)
    _diagnostics_left: float = field(init=False)

    def __post_init__(self) -> None:
        self._diagnostics_left = self.evidence_timeout
        self.case = HangReport(hang_message(self.hang), stderr=self.process.stderr)

    async def examine(self) -> None:
        """Gathers evidence, and puts it into the worker's file. Bounded."""
        if self._diagnostics_left <= 0:
            return
        began = time.monotonic()
        evidence = self.case.diagnostics = Diagnostics(self.hang, self.process.rank)
        await self._collect(evidence)
        left = self.evidence_timeout - (time.monotonic() - began)
        when = time.strftime("%Y-%m-%d %H:%M:%S %z")
        await self._write(f"{when}: {self.case.message}\n\n{evidence.text}\n", min(left, LOOK_TIMEOUT))
        self._diagnostics_left = self.evidence_timeout - (time.monotonic() - began)

    async def diagnose(self) -> Diagnostics:
        """What the worker is doing; nothing is written down. Bounded."""
        evidence = Diagnostics(self.hang, self.process.rank)
        await self._collect(evidence)
        return evidence

    async def _collect(self, evidence: Diagnostics) -> None:
        with self._suspects() as suspects:
            await collect_diagnostics(
                evidence, suspects, self.process.pipe, _GATHERING * self.evidence_timeout
            )

    async def end(self, kill: Callable[[], Awaitable[KillResult]]) -> KillResult:
        """Ends the worker and everything below it; see the module. Bounded, as `kill` is.

        Args:
            kill: sends SIGKILL to all of its tree; returns when that is dead, or has outlived it.
        """
        number = self.hang.signal or signal.SIGKILL
        self.case.to_be_killed = True
        if number != signal.SIGKILL:
            await self._end_by(number, SIGNAL_PATIENCE)
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

    async def _end_by(self, number: int, patience: float) -> None:
        with self._pinned(self.process.pid) as pidfd:
            if pidfd is None:
                return
            try:
                signal.pidfd_send_signal(pidfd, number)
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)  # a stopped one would not hear it
            except OSError as error:
                _log.warning("could not signal a worker", signal=number, reason=error.strerror)
                return
            await _exit_of(pidfd, patience)

    async def _request_last_output(self) -> None:
        """The last resort: Python's fault handler writes the stacks when SIGABRT ends a process."""
        pid, evidence = self.process.pid, self.case.diagnostics
        if signal.SIGABRT not in caught_signals(pid):
            return
        if evidence is not None and any(
            look.pid == pid and look.main.state == "D" for look in evidence.process_looks
        ):
            return  # it hears nothing
        try:
            _, most = resource.prlimit(pid, resource.RLIMIT_CORE)
            # Not 0: where cores are piped into a program, that would not be taken for a limit, and 1 is.
            least = 1 if most == resource.RLIM_INFINITY else min(1, most)
            resource.prlimit(pid, resource.RLIMIT_CORE, (least, most))
            async with asyncio.timeout(min(self._diagnostics_left, LOOK_TIMEOUT)):
                self.case.dump_from = (await in_background(self.process.stderr.stat)).st_size
        except (OSError, TimeoutError):
            return  # a core of some hundred gigabytes is no price for stacks
        await self._end_by(signal.SIGABRT, self._diagnostics_left)

    async def _write(self, text: str, timeout: float) -> None:
        """Adds to the worker's file. Logs may be on a file system that hangs, as the worker may because of it."""
        path = self.process.file

        def append() -> None:
            with open(path, "a", encoding="utf-8") as file:
                file.write(text)

        try:
            async with asyncio.timeout(timeout):
                await in_background(append)
            self.case.file = path
        except TimeoutError:
            _log.warning("could not write the evidence of a hang in time", file=str(path))
        except OSError as error:
            _log.warning("could not write the evidence of a hang", file=str(path), reason=error.strerror)

    @contextmanager
    def _suspects(self) -> Iterator[Sequence[InspectedProcess]]:
        """The holder of the timer and, if that is another process, the worker."""
        with ExitStack() as stack:
            pids = dict.fromkeys((self.hang.pid or self.process.pid, self.process.pid))
            pinned = {pid: stack.enter_context(self._pinned(pid)) for pid in pids}
            yield [InspectedProcess(pid, pidfd) for pid, pidfd in pinned.items() if pidfd is not None]

    @contextmanager
    def _pinned(self, pid: int) -> Iterator[int | None]:
        """Holds on to a process of ours; None if it is gone, and its number perhaps another's."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            yield None
            return
        try:
            yield pidfd if self.process.is_ours(pid) else None
        finally:
            os.close(pidfd)


async def _exit_of(pidfd: int, patience: float) -> bool:
    """Returns when a process has exited, or after so many seconds; whether it has."""
    loop = asyncio.get_running_loop()
    exited: asyncio.Future[None] = loop.create_future()
    loop.add_reader(pidfd, lambda: None if exited.done() else exited.set_result(None))
    try:
        await asyncio.wait({exited}, timeout=patience)
        return exited.done()
    finally:
        loop.remove_reader(pidfd)


async def survivors_of(pids: Sequence[int]) -> tuple[int, ...]:
    """Those of the processes that SIGKILL, sent some seconds ago, does not end; waits for who is only slow to die."""
    lives = await asyncio.gather(*(_lives_on(pid) for pid in pids))
    return tuple(pid for pid, lives_on in zip(pids, lives, strict=True) if lives_on)


async def _lives_on(pid: int) -> bool:
    look = await _inspect_worker(pid)
    if look is not None and look.stuck is not None:
        return True
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        return not await _exit_of(pidfd, SLOW_DEATH)
    finally:
        os.close(pidfd)


async def _inspect_worker(pid: int) -> ProcessLook | None:
    with suppress(TimeoutError):
        async with asyncio.timeout(LOOK_TIMEOUT):
            return await in_background(partial(inspect_process, pid))
    return None


async def describe_left(pids: Sequence[int]) -> str:
    """Says of processes that outlived SIGKILL what they wait for; a sentence for people."""
    told = []
    for pid in pids[:4]:
        look = await _inspect_worker(pid)
        stuck = look.stuck if look is not None else None
        if stuck is not None:
            why = stuck.meaning or "waits in the kernel"
            place = ", ".join(part for part in (stuck.wait_channel, stuck.call) if part)
            told.append(
                f"{pid} ({stuck.name}) is in uninterruptible sleep: it {why}" + f" ({place})" * bool(place)
            )
        elif look is not None:
            told.append(f"{pid} ({look.main.name}) is {look.main.state_in_words}")
        else:
            told.append(f"{pid}")
    more = f" and {len(pids) - 4} more" if len(pids) > 4 else ""
    plural = "es" if len(pids) > 1 else ""
    return f"process{plural} of workers outlived SIGKILL: {'; '.join(told)}{more}"
