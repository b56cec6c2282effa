"""Finds out why workers of a round failed on this host, and which of them was the first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
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

# ---- The failures of one round's workers on this host, and which of them came first.


class LocalFailures:
    """Collects failures, and tells of the first: at once, and again if an earlier one comes to light.

    Who failed first need not end first: one that has raised may take long to unwind, while its neighbours, who lost
    their connection to it, are gone within milliseconds.
    """

    def __init__(
        self, on_first: Callable[[WorkerFailure], None], on_earlier: Callable[[WorkerFailure], None]
    ) -> None:
        """Know of none.

        Args:
            on_first: called once, with the first failure that is known by then.
            on_earlier: called with a failure that turns out to have been before the one that was told last.
        """
        self._on_first = on_first
        self._on_earlier = on_earlier
        self._known: dict[int, WorkerFailure] = {}
        self._reported: WorkerFailure | None = None

    @property
    def in_order(self) -> list[WorkerFailure]:
        """All that are known, the first first."""
        return sorted(self._known.values(), key=lambda failure: failure.at or 0.0)

    def note(self, failure: WorkerFailure) -> None:
        """Take a failure of a worker that has ended, or never began; nothing is told yet."""
        self._known[failure.local_rank] = failure

    def report_first(self, under_way: Iterable[WorkerFailure] = (), *, stopping: bool = False) -> None:
        """Tell of the first failure, if it is not what was told already.

        Args:
            under_way: failures of workers that have raised, and had not ended by themselves.
            stopping: whether the workers are being stopped already, for whatever reason; then nothing is a first
                failure any more, since nobody need be told to stop them.
        """
        for failure in under_way:
            self._known.setdefault(failure.local_rank, failure)
        first = earliest(self._known.values())
        if first is None:
            return
        told, self._reported = self._reported, first
        if told is None:
            (self._on_earlier if stopping else self._on_first)(first)
        elif (first.at or 0.0) < (told.at or 0.0) and first.local_rank != told.local_rank:
            self._on_earlier(first)
        else:
            self._reported = told


# Seconds by which the time of a file may be too early: the kernel takes it from a clock that ticks a hundred times a
# second at the slowest.
_TICK = 0.01


class PostMortem:
    """Watches from before the workers start until they have been stopped."""

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
        """Begin nothing yet.

        Args:
            failures: collects what is found, and tells of it.
            identity: rank, role and host of a worker, by its local rank.
            explain: returns a failure with what else is known of its reason.
            cwd: where the workers are started; None: where this process is.
            rlimits: the limits they are started with.
            own_codes: whether their exit codes are their own: no shell is in between.
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
        """All failures that are known, the first first."""
        return self._failures.in_order

    def begin(self, logs: Mapping[int, WorkerLogs]) -> None:
        """Watch; called right before the workers are started."""
        self._logs = logs
        self._since, self._started = time.monotonic(), time.time()
        self._memory = MemoryWatch()

    def describe(self, how: WorkerExit) -> WorkerFailure:
        """Why a worker has failed."""
        cwd = self._cwd if self._cwd is not None else Path.cwd()
        starved = self._memory.explain(how) if self._memory is not None else None
        failure = describe_failure(
            how,
            self._logs.get(how.local_rank),
            **self._identity(how.local_rank),
            since=self._since,
            starved=starved,
            besides=self._memory.hint(how) if self._memory is not None and starved is None else "",
            core=find_core_dump(how, cwd=cwd, rlimits=self._rlimits, started=self._started),
            own_code=self._own_codes,
        )
        return self._explain(failure)

    def failed_before_stop(self, how: WorkerExit) -> bool:
        """Whether a worker had failed before any was asked to stop, although it is heard of only now."""
        return not how.succeeded and self._stopped_at is not None and how.at < self._stopped_at

    def note(self, failure: WorkerFailure, others: Mapping[int, int]) -> None:
        """A worker has failed.

        Args:
            failure: how.
            others: process ids of the workers that have not ended by themselves, by local rank.
        """
        self._failures.note(failure)
        self._report(others)

    def examine(self, others: Mapping[int, int]) -> None:
        """A worker elsewhere has failed: whoever has raised here has failed too, and may have before. See `note`."""
        self._report(others)

    def stopping(self, others: Mapping[int, int]) -> None:
        """Workers are about to be stopped, or have been: whoever had raised before that, had failed. See `note`."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
        self._report(others)

    def close(self) -> None:
        """All are gone: watch no more."""
        if self._memory is not None:
            self._memory.close()

    def _report(self, others: Mapping[int, int]) -> None:
        self._failures.report_first(self._under_way(others), stopping=self._stopped_at is not None)

    def _under_way(self, others: Mapping[int, int]) -> Iterable[WorkerFailure]:
        now, clock_time = time.monotonic(), time.time()
        for local_rank, pid in others.items():
            logs = self._logs.get(local_rank)
            story = read_error_file(logs.error_file) if logs is not None else None
            if logs is None or story is None:
                continue
            failure = failure_under_way(
                story,
                logs,
                local_rank=local_rank,
                pid=pid,
                **self._identity(local_rank),
                since=self._since,
                now=now,
                time=clock_time,
            )
            if failure.at is not None and self._counts(failure.at, now, exact=failure.at == story.raised_at):
                yield self._explain(failure)

    def _counts(self, raised_at: float, now: float, *, exact: bool) -> bool:
        """Whether what a worker has raised is its failure, although it has not ended by itself."""
        if self._stopped_at is None:
            return now - raised_at <= UNWINDING  # what it raised long ago, it has caught
        # What it raised because it was being stopped is a consequence.
        latest = self._stopped_at if exact else self._stopped_at - _TICK
        return self._stopped_at - UNWINDING <= raised_at <= latest
