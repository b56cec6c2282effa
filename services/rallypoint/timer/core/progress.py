"""How far the workers of each run have come, and which run stalls. Pure; time is an argument.

`now` is a WatchClock's (see lag.py): while the watchdog was not watching, nobody stood still.

A run stalls when none of its workers has come to another step for `stall_after`. It is judged while at least one
of its nodes with workers has a subscribed agent that has told all it knows: while no agent is there, nothing is
known of its workers, and what the first one tells after a restart of the service may be the one part of the run
that stands by right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import nsmallest

from rallypoint.timer.core.core import MAX_AFTER
from rallypoint.timer.core.countdown import DeadlineQueue
from rallypoint.timer.core.values import InvalidField, check_name

# Seconds that an agent may need to come back, since no client waits for more than five between two attempts: from
# the first that is back to a run's first judgement, and from an agent's end to its node's if the run goes on.
_SETTLE = 30.0
# A deadline this close, in seconds, has come: sums of floats round both ways.
_ROUNDING = 1e-6
# Workers looked at in one go, so that many large runs that stall at once don't hold up the event loop.
_MOST_AT_ONCE = 50_000


@dataclass(frozen=True, slots=True)
class ProgressSettings:
    """What is kept of progress, and for how long. Durations in seconds."""

    # A run none of whose workers has advanced for so long is reported; None: never. Default 600: longer than most
    # evaluations and checkpoints. An agent can say otherwise for its run.
    stall_after: float | None = 600.0
    # How long the progress of a node without an agent is remembered, if no other of its run has one. Default 3600,
    # as for its timers. If the run goes on elsewhere: half a minute, or a lost host would be the one that is behind.
    retention: float = 3600.0
    # Most workers of one run and in all. Defaults 100,000 and 1,000,000: about 300 bytes each. What more of them
    # tell is not kept.
    max_workers_per_run: int = 100_000
    max_workers: int = 1_000_000


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """How far a worker has come."""

    node_id: str
    worker_id: str
    rank: int
    step: int
    # Seconds that it has been at that step.
    idle: float


@dataclass(frozen=True, slots=True)
class Stall:
    """No worker of the run has advanced for a while; or one does again."""

    run_id: str
    over: bool
    # Seconds for which none has advanced, or had not.
    idle: float
    # Who stopped first: of the workers with the lowest step, the one that came to it first.
    first: WorkerProgress
    # How many workers of the run have told progress, and how many of them are at the step of `first`.
    workers: int
    at_same_step: int


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run has come."""

    workers: int
    lowest_step: int
    highest_step: int
    # Seconds for which no worker has advanced.
    idle: float
    # Set while the run stalls.
    stall: Stall | None
    # Those with the lowest step, and of equal ones who came to it first.
    slowest: list[WorkerProgress]
    # None: it can't stall.
    stall_after: float | None


@dataclass(slots=True, eq=False)
class _WorkerEntry:
    node: _NodeEntry
    worker_id: str
    rank: int
    step: int
    # When it came to its step, on the watch clock.
    since: float
    # The subscription of its node that told of it last.
    stream: int

    @property
    def order(self) -> tuple[int, float, int]:
        """Least: who is furthest behind, and has been for longest."""
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
    # Counts its subscriptions.
    stream: int = 0
    # Whether its agent is subscribed, and if not, since when; and whether that one has told all it knows.
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
    # When a worker came to another step last, and from when on the run may be judged; on the watch clock.
    advanced_at: float = 0.0
    judged_from: float = 0.0
    # Whether a judgement is scheduled. It may be too early, never too late: advancing needn't touch the queue.
    scheduled: bool = False
    # Set while it stalls: as it was last counted, since when nobody has advanced, and whether workers came or went.
    stall: Stall | None = None
    stood_since: float = 0.0
    recount: bool = False

    def each_worker(self) -> Iterator[_WorkerEntry]:
        for node in self.nodes.values():
            yield from node.workers.values()


class ProgressBoard:
    """The progress of all runs. Whether a subscription is in force is the caller's to know."""

    def __init__(self, settings: ProgressSettings | None = None) -> None:
        self._settings = settings or ProgressSettings()
        self._runs: dict[str, _RunEntry] = {}
        self._queue: DeadlineQueue[_RunEntry | _NodeEntry] = DeadlineQueue()
        self._workers = 0
        self._new_stalls: list[Stall] = []

    def __len__(self) -> int:
        return self._workers

    # What agents tell.

    def subscribe(self, run_id: str, node_id: str, stall_after: float | None, now: float) -> None:
        """A node speaks anew: what it knows of its workers follows, up to `registered`.

        Args:
            run_id: name of the run.
            node_id: name of the node.
            stall_after: seconds after which the run counts as stalled; 0: never; None: the service decides.
            now: the watch clock.
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
        """A worker of a subscribed node came to a step, `elapsed` seconds ago. False: too many; it is not kept.

        Raises:
            InvalidField: worker_id is empty or too long, or a number is out of range.
        """
        check_name("worker_id", worker_id)
        if rank < 0:
            raise InvalidField("rank", "must not be negative")
        if not 0 <= elapsed <= MAX_AFTER:
            raise InvalidField("elapsed", "must be at least zero and at most ten years")
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
        """A subscribed node has told all it knows: workers of which it told nothing go away."""
        node = self._runs[run_id].nodes[node_id]
        for worker in [each for each in node.workers.values() if each.stream != node.stream]:
            self._remove(worker)
        self._watch(node, True, now)
        self._review(node.run, now)

    def clear(self, run_id: str, node_id: str, worker_id: str, now: float) -> None:
        """A worker is gone; harmless if it told nothing."""
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
        """A node's agent is gone; what it told is kept for a while. Harmless if the node isn't known."""
        run = self._runs.get(run_id)
        node = run.nodes.get(node_id) if run is not None else None
        if run is None or node is None:
            return
        node.subscribed = False
        self._watch(node, False, now)
        node.left_at = now
        self._forget_if_lost(node, now)
        self._review(run, now)

    # What time does.

    def next_due(self) -> float | None:
        """When to call `judge` next, on the watch clock; None: not before something else happens."""
        return self._queue.earliest()

    def judge(self, now: float) -> None:
        """Lets time pass: runs may turn out to stall, nodes are forgotten. If much is due, the rest waits for the
        next call, for which `next_due` then says so."""
        looked_at = 0
        while looked_at < _MOST_AT_ONCE and (item := self._queue.pop_due(now + _ROUNDING)) is not None:
            if isinstance(item, _NodeEntry):
                looked_at += len(item.workers) + 1
                self._forget_if_lost(item, now)
                self._review(item.run, now)
            else:
                looked_at += item.workers + 1
                item.scheduled = False
                self._review(item, now)

    def take_new_stalls(self) -> list[Stall]:
        """Runs that have begun to stall, or ceased to, since the last call."""
        news, self._new_stalls = self._new_stalls, []
        return news

    # What people and late subscribers ask.

    def stall_of(self, run_id: str, now: float) -> Stall | None:
        """How the run stalls; None if it doesn't. O(1), unless workers have come or gone since it was asked last."""
        run = self._runs.get(run_id)
        if run is None or run.stall is None:
            return None
        if run.recount:
            run.stall, run.recount = _stall(run, now), False
        return _grown(run.stall, now - run.stood_since)

    def progress_of(self, run_id: str, most: int, now: float) -> RunProgress:
        """How far a run has come, with at most so many of its workers. O(its workers)."""
        run = self._runs.get(run_id)
        if run is None or not run.workers:
            stall_after = self._settings.stall_after if run is None else run.stall_after
            return RunProgress(0, 0, 0, 0.0, None, [], stall_after)
        slowest = nsmallest(most, run.each_worker(), key=lambda worker: worker.order)
        return RunProgress(
            workers=run.workers,
            lowest_step=slowest[0].step,
            highest_step=max(worker.step for worker in run.each_worker()),
            idle=max(0.0, now - run.advanced_at),
            stall=self.stall_of(run_id, now),
            slowest=[worker.view(now) for worker in slowest],
            stall_after=run.stall_after,
        )

    # Within.

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
        """Decides whether the run stalls, and when to look again."""
        idle = now - run.advanced_at
        limit = run.stall_after
        stands = bool(run.workers) and limit is not None and idle + _ROUNDING >= limit
        if run.stall is not None:
            if not stands:
                self._end_stall(run, run.stall, now)
        elif limit is None or not run.watched:
            self._queue.drop(run)
            run.scheduled = False
            return
        elif stands and now + _ROUNDING >= run.judged_from:
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
        """Forgets a node whose agent is gone for too long, or decides when to look again."""
        end = node.left_at + self._settings.retention
        if not node.workers or now + _ROUNDING >= (node.left_at + _SETTLE if node.run.watched else end):
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
    """The same stall, once it has lasted for so long."""
    first = replace(stall.first, idle=stall.first.idle + idle - stall.idle)
    return replace(stall, idle=idle, first=first)


def _stall(run: _RunEntry, now: float) -> Stall:
    first = min(run.each_worker(), key=lambda worker: worker.order)
    same = sum(1 for worker in run.each_worker() if worker.step == first.step)
    return Stall(run.run_id, False, now - run.advanced_at, first.view(now), run.workers, same)
