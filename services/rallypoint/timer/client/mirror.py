"""What an agent's workers hold, what the timer service was told of it, and the difference. Pure.

The agent, not the service, holds the truth. Only differences are sent, so a timer that is acquired and released
before anybody looks costs no message, nothing queues up while the service is away, and after any break the
difference is simply everything.

Completions are the exception: they are told at most once, for the service adds them up. A count that was taken is
not told again, whatever became of it; the longest is, with the next count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from rallypoint.timer.durations import to_duration
from rallypoint.timer.v1 import timer_service_pb2 as pb

Key = TypeVar("Key")

MOST_SCOPES = 4096
"""Scopes that learn, of which a ledger takes note; those beyond teach nobody anything."""


@dataclass(frozen=True, slots=True)
class Start:
    """Tell that a worker's timer runs. Seconds."""

    worker_id: str
    scope: str
    # 0: it is to be learned.
    after: float
    elapsed: float
    sequence: int
    # Under which name; empty: it is not learned.
    learned_as: str = ""


@dataclass(frozen=True, slots=True)
class End:
    """Tell that a worker's timer has ended."""

    worker_id: str
    scope: str


@dataclass(frozen=True, slots=True)
class EndAll:
    """Tell that a worker is gone."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell that an expiry has been dealt with."""

    expiry_id: int


@dataclass(frozen=True, slots=True)
class Completions:
    """Tell that a scope that learns was left `count` times more, and the longest that it ever took here."""

    scope: str
    count: int
    longest: float


@dataclass(frozen=True, slots=True)
class LearnedReport:
    """Tell what a service said it had learned of a scope: how many completions it saw, and the longest.

    With a count of 0: that it is forgotten here as well.
    """

    scope: str
    count: int
    longest: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """Tell which step a worker has come to, and how long ago."""

    worker_id: str
    rank: int
    step: int
    elapsed: float


Change = Start | End | EndAll | Acknowledge | Completions | LearnedReport | StepReport


@dataclass(frozen=True, slots=True)
class MirroredTimer:
    """A timer that a worker holds."""

    sequence: int
    since: float
    # As Start.
    after: float
    learned_as: str


@dataclass(slots=True)
class _Seen:
    """Completions of a scope: how many are to be told, and the longest ever."""

    count: int = 0
    longest: float = 0.0


@dataclass(frozen=True, slots=True)
class _StepReached:
    """How far a worker has come."""

    rank: int
    step: int
    since: float


class TimerMirror:
    """The timers of one node. `now` and `since` are seconds of one clock."""

    def __init__(self, first_sequence: int = 1) -> None:
        """Makes an empty ledger that numbers its timers from `first_sequence` (at least 1) on."""
        self._sequence = first_sequence - 1
        self._held: dict[str, dict[str, MirroredTimer]] = {}
        # The sequence number under which the service knows a timer.
        self._learned_sent: dict[tuple[str, str], int] = {}
        # Where held and told may differ, in the order in which it came about.
        self._changed: dict[tuple[str, str], None] = {}
        self._gone: dict[str, None] = {}
        self._acknowledged: list[int] = []
        self._seen: dict[str, _Seen] = {}
        self._to_count: dict[str, None] = {}
        # What the service has learned, from here and from other nodes.
        self._lessons: dict[str, LearnedReport] = {}
        self._to_echo: dict[str, None] = {}
        # Scopes that were forgotten: what is told of them after this is new.
        self._to_confirm: dict[str, None] = {}
        self._steps: dict[str, _StepReached] = {}
        self._moved: dict[str, None] = {}

    @property
    def pending(self) -> bool:
        """Whether there may be something to tell."""
        return bool(
            self._changed
            or self._gone
            or self._acknowledged
            or self._to_count
            or self._to_echo
            or self._to_confirm
            or self._moved
        )

    @property
    def workers(self) -> list[str]:
        """The workers that hold timers, or have told how far they have come."""
        return list({**dict.fromkeys(self._held), **dict.fromkeys(self._steps)})

    def find(self, worker_id: str, scope: str) -> MirroredTimer | None:
        """The timer of that name that the worker holds now."""
        return self._held.get(worker_id, {}).get(scope)

    def sequence_of(self, worker_id: str, scope: str) -> int | None:
        """The number of the timer that the worker holds now."""
        held = self.find(worker_id, scope)
        return held.sequence if held is not None else None

    def acquire(self, worker_id: str, scope: str, after: float, since: float, learned_as: str = "") -> None:
        """A worker's timer runs since then, in place of the one of that name. `learned_as` as Start has it."""
        self._sequence += 1
        held = MirroredTimer(self._sequence, since, 0.0 if learned_as else after, learned_as)
        self._held.setdefault(worker_id, {})[scope] = held
        self._changed[worker_id, scope] = None

    def renumber(self, worker_id: str, scope: str) -> None:
        """A timer that the service took for run out has not: it gets a new number, so that it is told again."""
        held = self._held[worker_id][scope]
        self.acquire(worker_id, scope, held.after, held.since, held.learned_as)

    def complete(self, worker_id: str, scope: str, now: float) -> None:
        """A worker left a scope: its timer ends, and how long it took is learned from if it learns."""
        held = self.find(worker_id, scope)
        self.release(worker_id, scope)
        if held is not None and held.learned_as:
            self.observe(held.learned_as, 1, max(0.0, now - held.since))

    def observe(self, scope: str, count: int, longest: float) -> None:
        """Scopes that learn under this name were left.

        Args:
            scope: the name.
            count: how many times more, at least 1.
            longest: the longest of these times; earlier ones may be included.
        """
        seen = self._seen.get(scope)
        if seen is None:
            if len(self._seen) >= MOST_SCOPES:
                return
            seen = self._seen[scope] = _Seen()
        seen.count += count
        seen.longest = max(seen.longest, longest)
        self._to_count[scope] = None

    def learned(self, scope: str, count: int, longest: float) -> None:
        """The service has learned of a scope; kept for services to come.

        A service that has just been restarted says less than the one before, until its agents brought that back.
        """
        former = self._lessons.get(scope)
        if former is not None:
            count, longest = max(count, former.count), max(longest, former.longest)
        elif len(self._lessons) >= MOST_SCOPES:
            return
        self._lessons[scope] = LearnedReport(scope, count, longest)

    def forget(self, scope: str) -> None:
        """The service was told to learn a scope anew."""
        for notes in (self._seen, self._to_count, self._lessons, self._to_echo):
            notes.pop(scope, None)
        self._to_confirm[scope] = None

    def progress(self, worker_id: str, rank: int, step: int, since: float) -> None:
        """A worker came to a step then. The same step again is none."""
        former = self._steps.get(worker_id)
        if former is None or former.step != step:
            self._steps[worker_id] = _StepReached(rank, step, since)
            self._moved[worker_id] = None

    def progress_of(self, worker_id: str, now: float) -> tuple[int, float] | None:
        """The step that a worker has come to, and the seconds since; None if it has told none."""
        place = self._steps.get(worker_id)
        return (place.step, max(0.0, now - place.since)) if place is not None else None

    def release(self, worker_id: str, scope: str) -> None:
        """A worker's timer has ended; harmless if there is none."""
        scopes = self._held.get(worker_id)
        if scopes is None or scopes.pop(scope, None) is None:
            return
        if not scopes:
            del self._held[worker_id]
        self._changed[worker_id, scope] = None

    def clear(self, worker_id: str) -> None:
        """A worker is gone, and its timers with it, also those that it acquired elsewhere."""
        self._held.pop(worker_id, None)
        self._steps.pop(worker_id, None)
        self._moved.pop(worker_id, None)
        for key in [key for key in (*self._learned_sent, *self._changed) if key[0] == worker_id]:
            self._learned_sent.pop(key, None)
            self._changed.pop(key, None)
        self._gone[worker_id] = None

    def acknowledge(self, expiry_id: int) -> None:
        """An expiry was of a timer that nobody holds any more."""
        self._acknowledged.append(expiry_id)

    def settle(self, worker_id: str, scope: str, sequence: int, expiry_id: int | None) -> None:
        """The expiry of a timer has been dealt with, so the timer has ended.

        Args:
            worker_id: its worker.
            scope: its scope.
            sequence: its number; if the worker holds a newer timer of that name by now, that one stays.
            expiry_id: what to acknowledge; None if that was told before the last `restart`.
        """
        if self.sequence_of(worker_id, scope) == sequence:
            self.release(worker_id, scope)
        if expiry_id is not None:
            self._acknowledged.append(expiry_id)

    def restart(self) -> None:
        """The service has to be told everything again. What it told before `restart` counts no more.

        But for completions, which it may have counted.
        """
        self._learned_sent.clear()
        self._gone.clear()
        self._acknowledged.clear()
        self._to_confirm.clear()
        self._changed = {(worker, scope): None for worker, scopes in self._held.items() for scope in scopes}
        self._to_echo = dict.fromkeys(self._lessons)
        self._moved = dict.fromkeys(self._steps)

    def take(self, now: float, limit: int) -> list[Change]:
        """What to tell next, at most `limit` changes, in order. They count as told."""
        changes: list[Change] = []
        while self._acknowledged and len(changes) < limit:
            changes.append(Acknowledge(self._acknowledged.pop()))
        while self._gone and len(changes) < limit:
            changes.append(EndAll(_first(self._gone)))
        while self._to_echo and len(changes) < limit:
            changes.append(self._echo(_first(self._to_echo)))
        while self._changed and len(changes) < limit:
            change = self._difference(*_first(self._changed), now)
            if change is not None:
                changes.append(change)
        while self._moved and len(changes) < limit:
            worker_id = _first(self._moved)
            place = self._steps[worker_id]
            changes.append(StepReport(worker_id, place.rank, place.step, max(0.0, now - place.since)))
        while self._to_confirm and len(changes) < limit:
            changes.append(LearnedReport(_first(self._to_confirm), 0, 0.0))
        while self._to_count and len(changes) < limit:
            scope = _first(self._to_count)
            seen = self._seen[scope]
            changes.append(Completions(scope, seen.count, seen.longest))
            seen.count = 0
        return changes

    def _difference(self, worker_id: str, scope: str, now: float) -> Change | None:
        held = self._held.get(worker_id, {}).get(scope)
        told = self._learned_sent.get((worker_id, scope))
        if held is None:
            return End(*self._forget(worker_id, scope)) if told is not None else None
        if held.sequence == told:
            return None
        self._learned_sent[worker_id, scope] = held.sequence
        elapsed = max(0.0, now - held.since)
        return Start(worker_id, scope, held.after, elapsed, held.sequence, held.learned_as)

    def _echo(self, scope: str) -> LearnedReport:
        """What is known of a scope. The longest seen here may have been in a message that was lost."""
        lesson, seen = self._lessons[scope], self._seen.get(scope)
        return replace(lesson, longest=max(lesson.longest, seen.longest)) if seen is not None else lesson

    def _forget(self, worker_id: str, scope: str) -> tuple[str, str]:
        del self._learned_sent[worker_id, scope]
        return worker_id, scope


def _first(waiting: dict[Key, None]) -> Key:
    """Takes out what has waited longest."""
    key = next(iter(waiting))
    del waiting[key]
    return key


# ---- What a ledger has to tell, as the messages of the timer service.


_MOST_COUNT = 2**32 - 1  # of a uint32


def action_of(change: Change) -> pb.SuperviseAction:
    """The action that tells a change."""
    match change:
        case Start():
            return pb.SuperviseAction(acquire=_acquire(change))
        case End():
            return pb.SuperviseAction(release=pb.Release(worker_id=change.worker_id, scope=change.scope))
        case EndAll():
            return pb.SuperviseAction(clear=pb.Clear(worker_id=change.worker_id))
        case Acknowledge():
            return pb.SuperviseAction(acknowledge=pb.Acknowledge(expiry_id=change.expiry_id))
        case Completions():
            count, longest = min(change.count, _MOST_COUNT), to_duration(change.longest)
            return pb.SuperviseAction(observe=pb.Observe(scope=change.scope, count=count, longest=longest))
        case LearnedReport():
            longest = to_duration(change.longest)
            learned = pb.Learned(scope=change.scope, count=change.count, longest=longest)
            return pb.SuperviseAction(learned=learned)
        case StepReport():
            elapsed = to_duration(change.elapsed)
            return pb.SuperviseAction(
                progress=pb.Progress(
                    worker_id=change.worker_id, rank=change.rank, step=change.step, elapsed=elapsed
                )
            )


def _acquire(start: Start) -> pb.Acquire:
    acquire = pb.Acquire(
        worker_id=start.worker_id,
        scope=start.scope,
        elapsed=to_duration(start.elapsed),
        sequence=start.sequence,
    )
    if start.learned_as:
        acquire.learned_as = start.learned_as
    else:
        acquire.after.CopyFrom(to_duration(start.after))
    return acquire
