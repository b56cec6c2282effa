"""The progress of the workers of each run, and stalled runs. Pure; time is an argument.

`now` is a WatchClock's (see rpc/clock.py): time in which the watchdog was paused does not count.

A run stalls when none of its workers has reached another step for `stall_after` seconds. It is examined only while at
least one of its nodes with workers has a subscribed agent that has reported everything it knows. While no agent is
there, nothing is known of its workers; and after a restart of the service, the first workers reported may be the only
ones of the run that rightly stand still.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import nsmallest

from rallypoint.rpc.clock import ROUNDING
from rallypoint.timer.core.countdown import DeadlineQueue
from rallypoint.timer.core.values import InvalidField, check_name, check_seconds

# Seconds that an agent may need to come back, since no client waits more than five between two attempts. Applies from
# the return of the first agent to the first examination of its run, and from the loss of an agent to forgetting its
# node if the run goes on.
_SETTLE = 30.0
# Workers examined in one call, so that many large runs that stall at once don't block the event loop.
_MOST_AT_ONCE = 50_000


@dataclass(frozen=True, slots=True)
class ProgressSettings:
    """Limits and durations of progress. Durations in seconds."""

    # A run none of whose workers has advanced for so long is reported; None: never. Default 600: longer than most
    # evaluations and checkpoints. An agent can choose another value for its run.
    stall_after: float | None = 600.0
    # How long the progress of a node without an agent is kept if no other node of its run has one. Default 3600, as
    # for its timers. If the run continues on other nodes it is half a minute, or a lost host would be reported as the
    # slowest.
    retention: float = 3600.0
    # Most workers of one run and in all; progress of further workers is dropped. Defaults 100,000 and 1,000,000: about
    # 300 bytes each.
    max_workers_per_run: int = 100_000
    max_workers: int = 1_000_000


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """The progress of one worker."""

    node_id: str
    worker_id: str
    rank: int
    step: int
    # Seconds since it reached that step.
    idle: float


@dataclass(frozen=True, slots=True)
class Stall:
    """A stall of a run: no worker has advanced for a while. `over`: the stall has ended."""

    run_id: str
    over: bool
    # Seconds for which none has advanced, or had not when the stall ended.
    idle: float
    # The worker that stopped first: of the workers at the lowest step, the first that reached it.
    first: WorkerProgress
    # The workers of the run that reported progress, and how many of them are at the step of `first`.
    workers: int
    at_same_step: int


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The progress of one run."""

    workers: int
    lowest_step: int
    highest_step: int
    # Seconds for which no worker has advanced.
    idle: float
    # Set while the run stalls.
    stall: Stall | None
    # The workers at the lowest steps; of equal ones, the first that reached it.
    slowest: list[WorkerProgress]
    # None: the run is never reported as stalled.
    stall_after: float | None


@dataclass(slots=True, eq=False)
class _WorkerEntry:
    node: _NodeEntry
    worker_id: str
    rank: int
    step: int
    # When it reached its step, on the watch clock.
    since: float
    # The subscription of its node that reported it last.
    stream: int

    @property
    def order(self) -> tuple[int, float, int]:
        """A sort key; least for the worker that is furthest behind, and has been for longest."""
        return self.step, self.since, self.rank

    def view(self, now: float) -> WorkerProgress:
        # The watch clock may step back a little.
        idle = max(0.0, now - self.since)
        return WorkerProgress(self.node.node_id, self.worker_id, self.rank, self.step, idle)


@dataclass(slots=True, eq=False)
class _NodeEntry:
    run: _RunEntry
    node_id: str
    workers: dict[str, _WorkerEntry] = field(default_factory=dict)
    # The number of its subscriptions so far.
    stream: int = 0
    # Whether its agent is subscribed; if not, since when; and whether that agent has reported everything it knows.
    subscribed: bool = False
    left_at: float = 0.0
    watched: bool = False


@dataclass(slots=True, eq=False)
class _RunEntry:
    run_id: str
    stall_after: float | None
    nodes: dict[str, _NodeEntry] = field(default_factory=dict)
    workers: int = 0
    # Workers of watched nodes.
    watched: int = 0
    # When a worker last reached another step, and from when on the run may be examined; on the watch clock.
    advanced_at: float = 0.0
    judged_from: float = 0.0
    # Whether an examination is scheduled. It may be too early, never too late: an advance need not touch the queue.
    scheduled: bool = False
    # Set while it stalls: the stall as last counted, since when no worker has advanced, and whether workers came or
    # left.
    stall: Stall | None = None
    stood_since: float = 0.0
    recount: bool = False

    def each_worker(self) -> Iterator[_WorkerEntry]:
        for node in self.nodes.values():
            yield from node.workers.values()


class ProgressBoard:
    """The progress of all runs. The caller checks that a subscription is in force."""

    def __init__(self, settings: ProgressSettings | None = None) -> None:
        self._settings = settings or ProgressSettings()
        self._runs: dict[str, _RunEntry] = {}
        self._queue: DeadlineQueue[_RunEntry | _NodeEntry] = DeadlineQueue()
        self._workers = 0
        self._new_stalls: list[Stall] = []

    def __len__(self) -> int:
        return self._workers

    # Reports of agents.

    def subscribe(self, run_id: str, node_id: str, stall_after: float | None, now: float) -> None:
        """Start a node's report: the progress of its workers follows, up to `registered`.

        `stall_after`: seconds without progress until the run counts as stalled; 0: never; None: as the settings.
        """
        run = self._runs.get(run_id)
        if run is None:
            run = self._runs[run_id] = _RunEntry(run_id, None)
        run.stall_after = self._settings.stall_after if stall_after is None else stall_after or None
        node = run.nodes.get(node_id)
        if node is None:
            node = run.nodes[node_id] = _NodeEntry(run, node_id)
        node.stream += 1
        node.subscribed = True
        self._queue.drop(node)
        self._watch(node, False, now)
        self._review(run, now)

    def report(
        self,
        run_id: str,
        node_id: str,
        worker_id: str,
        now: float,
        *,
        rank: int,
        step: int,
        elapsed: float = 0.0,
    ) -> bool:
        """Record that a worker of a subscribed node reached a step `elapsed` seconds ago. False: no room, not kept.

        Raises:
            InvalidField: worker_id is empty or too long, or a number is out of range.
        """
        check_name("worker_id", worker_id)
        if rank < 0:
            raise InvalidField("rank", "must not be negative")
        check_seconds("elapsed", elapsed)
        run = self._runs[run_id]
        node = run.nodes[node_id]
        worker = node.workers.get(worker_id)
        since = now - elapsed
        if worker is None:
            if (
                run.workers >= self._settings.max_workers_per_run
                or self._workers >= self._settings.max_workers
            ):
                return False
            self._add(_WorkerEntry(node, worker_id, rank, step, since, node.stream), now)
            return True
        worker.rank, worker.stream = rank, node.stream
        if worker.step != step:
            worker.step, worker.since = step, since
            self._advanced(run, since, now)
        return True

    def registered(self, run_id: str, node_id: str, now: float) -> None:
        """End a node's report: its workers that are not part of it are removed."""
        node = self._runs[run_id].nodes[node_id]
        for worker in [each for each in node.workers.values() if each.stream != node.stream]:
            self._remove(worker)
        self._watch(node, True, now)
        self._review(node.run, now)

    def clear(self, run_id: str, node_id: str, worker_id: str, now: float) -> None:
        """Remove a worker that is gone; harmless if it reported nothing."""
        run = self._runs.get(run_id)
        node = run.nodes.get(node_id) if run is not None else None
        worker = node.workers.get(worker_id) if node is not None else None
        if run is None or node is None or worker is None:
            return
        self._remove(worker)
        if not node.workers and not node.subscribed:
            self._forget(node)
        self._review(run, now)

    def unsubscribe(self, run_id: str, node_id: str, now: float) -> None:
        """Note that a node's agent is gone; its progress is kept for a while. Harmless if the node is unknown."""
        run = self._runs.get(run_id)
        node = run.nodes.get(node_id) if run is not None else None
        if run is None or node is None:
            return
        node.subscribed = False
        self._watch(node, False, now)
        node.left_at = now
        self._forget_if_lost(node, now)
        self._review(run, now)

    # Time.

    def next_due(self) -> float | None:
        """Return when to call `judge` next, on the watch clock; None: not before another call."""
        return self._queue.earliest()

    def judge(self, now: float) -> None:
        """Advance time: find stalled runs, forget nodes. If much is due, the rest waits for the next call, for which
        `next_due` then returns a time that has passed."""
        looked_at = 0
        while looked_at < _MOST_AT_ONCE and (item := self._queue.pop_due(now + ROUNDING)) is not None:
            if isinstance(item, _NodeEntry):
                looked_at += len(item.workers) + 1
                self._forget_if_lost(item, now)
                self._review(item.run, now)
            else:
                looked_at += item.workers + 1
                item.scheduled = False
                self._review(item, now)

    def take_new_stalls(self) -> list[Stall]:
        """Return the stalls that have begun or ended since the last call."""
        stalls, self._new_stalls = self._new_stalls, []
        return stalls

    # Queries.

    def stall_of(self, run_id: str, now: float) -> Stall | None:
        """Return the current stall of the run, or None. O(1), unless workers have come or left since the last query."""
        run = self._runs.get(run_id)
        if run is None or run.stall is None:
            return None
        if run.recount:
            run.stall, run.recount = _stall(run, now), False
        return _grown(run.stall, now - run.stood_since)

    def progress_of(self, run_id: str, most: int, now: float, first: int = 0) -> RunProgress:
        """Return the progress of a run, with at most `most` of its workers: those after the `first` slowest.

        O(its workers).
        """
        run = self._runs.get(run_id)
        if run is None or not run.workers:
            stall_after = self._settings.stall_after if run is None else run.stall_after
            return RunProgress(0, 0, 0, 0.0, None, [], stall_after)
        slowest = nsmallest(first + most, run.each_worker(), key=lambda worker: worker.order)
        return RunProgress(
            workers=run.workers,
            lowest_step=slowest[0].step,
            highest_step=max(worker.step for worker in run.each_worker()),
            idle=max(0.0, now - run.advanced_at),
            stall=self.stall_of(run_id, now),
            slowest=[worker.view(now) for worker in slowest[first:]],
            stall_after=run.stall_after,
        )

    def _add(self, worker: _WorkerEntry, now: float) -> None:
        node, run = worker.node, worker.node.run
        node.workers[worker.worker_id] = worker
        self._workers += 1
        run.workers += 1
        run.recount = True
        if run.workers == 1:
            run.advanced_at = worker.since
        if node.watched:
            self._count_watched(run, 1, now)
        self._advanced(run, worker.since, now)

    def _remove(self, worker: _WorkerEntry) -> None:
        node, run = worker.node, worker.node.run
        del node.workers[worker.worker_id]
        self._workers -= 1
        run.workers -= 1
        run.recount = True
        if node.watched:
            run.watched -= 1

    def _watch(self, node: _NodeEntry, watched: bool, now: float) -> None:
        if node.watched != watched:
            node.watched = watched
            self._count_watched(node.run, len(node.workers) if watched else -len(node.workers), now)

    def _count_watched(self, run: _RunEntry, change: int, now: float) -> None:
        if not run.watched and change > 0:
            run.judged_from = now + min(_SETTLE, run.stall_after or 0.0)
        run.watched += change

    def _advanced(self, run: _RunEntry, when: float, now: float) -> None:
        run.advanced_at = max(run.advanced_at, when)
        if run.stall is not None or not run.scheduled:
            self._review(run, now)

    def _review(self, run: _RunEntry, now: float) -> None:
        """Decide whether the run is stalled, and when to examine it again."""
        idle = now - run.advanced_at
        limit = run.stall_after
        stands = bool(run.workers) and limit is not None and idle + ROUNDING >= limit
        if run.stall is not None:
            if not stands:
                self._end_stall(run, run.stall, now)
        elif limit is None or not run.watched:
            self._queue.drop(run)
            run.scheduled = False
            return
        elif stands and now + ROUNDING >= run.judged_from:
            run.stall, run.stood_since, run.recount = _stall(run, now), run.advanced_at, False
            self._new_stalls.append(run.stall)
        if run.stall is None and limit is not None and run.watched:
            self._queue.schedule(run, max(run.advanced_at + limit, run.judged_from))
            run.scheduled = True

    def _end_stall(self, run: _RunEntry, stall: Stall, now: float) -> None:
        end = run.advanced_at if run.advanced_at > run.stood_since else now
        self._new_stalls.append(replace(_grown(stall, end - run.stood_since), over=True))
        run.stall = None

    def _forget_if_lost(self, node: _NodeEntry, now: float) -> None:
        """Forget a node whose agent has been gone for too long, or schedule the next examination."""
        end = node.left_at + self._settings.retention
        if not node.workers or now + ROUNDING >= (node.left_at + _SETTLE if node.run.watched else end):
            self._forget(node)
        else:
            self._queue.schedule(node, min(now + _SETTLE, end))

    def _forget(self, node: _NodeEntry) -> None:
        for worker in list(node.workers.values()):
            self._remove(worker)
        run = node.run
        del run.nodes[node.node_id]
        self._queue.drop(node)
        if not run.nodes:
            del self._runs[run.run_id]
            self._queue.drop(run)


def _grown(stall: Stall, idle: float) -> Stall:
    """Return the same stall after it has lasted `idle` seconds."""
    first = replace(stall.first, idle=stall.first.idle + idle - stall.idle)
    return replace(stall, idle=idle, first=first)


def _stall(run: _RunEntry, now: float) -> Stall:
    first = min(run.each_worker(), key=lambda worker: worker.order)
    same = sum(1 for worker in run.each_worker() if worker.step == first.step)
    return Stall(run.run_id, False, now - run.advanced_at, first.view(now), run.workers, same)
