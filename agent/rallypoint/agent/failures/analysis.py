"""Analysis of the failures of a round on this host: their reasons, and which was the first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rallypoint.agent.failures.core_dump import find_core_dump
from rallypoint.agent.failures.failure import (
    UNWINDING,
    WorkerFailure,
    describe_failure,
    earliest,
    failure_under_way,
    read_error_file,
)
from rallypoint.agent.failures.out_of_memory import MemoryWatch
from rallypoint.agent.logs.plan import WorkerLogs
from rallypoint.agent.spawner.protocol import WorkerExit

# ---- The failures of one round's workers on this host, in order of time.


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """A worker of a group failed, or could not be started; published at most once for each group."""

    failure: WorkerFailure


@dataclass(frozen=True, slots=True)
class EarlierFailure:
    """A failure that was found later, but was before the published one, or before a stop for another reason."""

    failure: WorkerFailure


class LocalFailures:
    """Collects failures, and publishes the first one: at once, and again if an earlier one is found.

    The first worker to fail is not always the first to end: one that has raised may take long to unwind, while its
    peers, which lost their connection to it, end within milliseconds.
    """

    def __init__(self, publish: Callable[[FirstFailure | EarlierFailure], None]) -> None:
        """Start without failures."""
        self._publish = publish
        self._known: dict[int, WorkerFailure] = {}
        self._reported: WorkerFailure | None = None

    @property
    def in_order(self) -> list[WorkerFailure]:
        """All known failures, in order of time."""
        return sorted(self._known.values(), key=lambda failure: failure.at or 0.0)

    def note(self, failure: WorkerFailure) -> None:
        """Take a failure of a worker that has ended, or never started; report nothing yet."""
        self._known[failure.local_rank] = failure

    def report_first(self, under_way: Iterable[WorkerFailure] = (), *, stopping: bool = False) -> None:
        """Report the first failure, unless it was reported already.

        Args:
            under_way: failures of workers that have raised, and have not ended by themselves.
            stopping: True if the workers are being stopped already, for any reason. Then there is no FirstFailure: its
                purpose is to have them stopped.
        """
        for failure in under_way:
            self._known.setdefault(failure.local_rank, failure)
        first = earliest(self._known.values())
        if first is None:
            return
        previous, self._reported = self._reported, first
        if previous is None:
            self._publish(EarlierFailure(first) if stopping else FirstFailure(first))
        elif (first.at or 0.0) < (previous.at or 0.0) and first.local_rank != previous.local_rank:
            self._publish(EarlierFailure(first))
        else:
            self._reported = previous


# Seconds by which the time of a file may be too early: the kernel takes it from a clock that ticks at least a hundred
# times a second.
_TICK = 0.01


def _own_cwd() -> Path:
    try:
        return Path.cwd()
    except OSError:  # it was deleted: nothing is found there
        return Path()


class PostMortem:
    """Collects and explains the failures of a group of workers, from before their start until they are stopped."""

    def __init__(
        self,
        failures: LocalFailures,
        identity: Callable[[int], dict[str, Any]],
        explain: Callable[[WorkerFailure], WorkerFailure] = lambda failure: failure,
        *,
        cwd: Path | None,
        rlimits: Mapping[str, tuple[int, int]],
        own_codes: bool = False,
    ) -> None:
        """Set up; `begin` starts it.

        Args:
            failures: collects the failures, and reports them.
            identity: rank, role and host of a worker, by its local rank.
            explain: adds knowledge about its reason to a failure.
            cwd: working directory of the workers; None: that of this process.
            own_codes: True if their exit codes are their own: no shell is in between.
        """
        self._failures = failures
        self._identity = identity
        self._explain = explain
        self._cwd = cwd
        self._rlimits = rlimits
        self._own_codes = own_codes
        self._logs: Mapping[int, WorkerLogs] = {}
        self._memory: MemoryWatch | None = None
        self._since = self._started = 0.0
        self._stopped_at: float | None = None

    @property
    def failures(self) -> list[WorkerFailure]:
        """All known failures, in order of time."""
        return self._failures.in_order

    def begin(self, logs: Mapping[int, WorkerLogs]) -> None:
        """Start; to be called right before the workers are started."""
        self._logs = logs
        self._since, self._started = time.monotonic(), time.time()
        self._memory = MemoryWatch()

    def describe(self, exit_: WorkerExit) -> WorkerFailure:
        """Return the failure of a worker, with its reason."""
        starved = self._memory.explain(exit_) if self._memory is not None else None
        failure = describe_failure(
            exit_,
            self._logs.get(exit_.local_rank),
            **self._identity(exit_.local_rank),
            since=self._since,
            starved=starved,
            besides=self._memory.hint(exit_) if self._memory is not None and starved is None else "",
            core=find_core_dump(
                exit_, cwd=self._cwd or _own_cwd(), rlimits=self._rlimits, started=self._started
            ),
            own_code=self._own_codes,
        )
        return self._explain(failure)

    def failed_before_stop(self, exit_: WorkerExit) -> bool:
        """True if a worker whose exit arrives only now failed before any worker was requested to stop."""
        return not exit_.succeeded and self._stopped_at is not None and exit_.at < self._stopped_at

    def note(self, failure: WorkerFailure, others: Mapping[int, int]) -> None:
        """Add a failure; `others`: process ids of the workers that have not ended by themselves, by local rank."""
        self._failures.note(failure)
        self.examine(others)

    def examine(self, others: Mapping[int, int]) -> None:
        """Check the workers here (see `note`) after a failure on any host: one that has raised may be the first."""
        self._failures.report_first(self._under_way(others), stopping=self._stopped_at is not None)

    def stopping(self, others: Mapping[int, int]) -> None:
        """Note that workers (see `note`) are about to be stopped: only one that has raised before that has failed."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
        self.examine(others)

    def close(self) -> None:
        """Release the kernel's log, after all workers have ended."""
        if self._memory is not None:
            self._memory.close()

    def _under_way(self, others: Mapping[int, int]) -> Iterable[WorkerFailure]:
        now, clock_time = time.monotonic(), time.time()
        for local_rank, pid in others.items():
            logs = self._logs.get(local_rank)
            record = read_error_file(logs.error_file) if logs is not None else None
            if logs is None or record is None:
                continue
            failure = failure_under_way(
                record,
                logs,
                local_rank=local_rank,
                pid=pid,
                **self._identity(local_rank),
                since=self._since,
                now=now,
                time=clock_time,
            )
            if failure.at is not None and self._counts(failure.at, now, exact=failure.at == record.raised_at):
                yield self._explain(failure)

    def _counts(self, raised_at: float, now: float, *, exact: bool) -> bool:
        """True if an exception is the failure of its worker, although the worker has not ended by itself."""
        if self._stopped_at is None:
            return now - raised_at <= UNWINDING  # an older exception was caught
        # An exception after the request to stop is a consequence of it.
        latest = self._stopped_at if exact else self._stopped_at - _TICK
        return self._stopped_at - UNWINDING <= raised_at <= latest
