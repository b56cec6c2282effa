"""The timers of an agent's workers, the state last sent to the timer service, and the difference. Pure.

The agent, not the service, is the source of truth. Only differences are sent: a timer that is acquired and released
between two sends costs no message, nothing queues up while the service is away, and after any break the difference is
simply everything.

Completions are the exception: each is sent at most once, because the service adds them up. A count that was taken is
never sent again, even if the message was lost; the longest is, with the next count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration

from rallypoint.rpc.durations import to_duration
from rallypoint.timer.v1 import timer_service_pb2 as pb

Key = TypeVar("Key")

MOST_SCOPES = 4096
"""Most learned scopes in a mirror; further ones are neither recorded nor sent."""


_MOST_STEP = 2**63 - 1  # of the message; a worker's has 64 bits without a sign
_MOST_COUNT = 2**32 - 1  # of a uint32


@dataclass(frozen=True, slots=True)
class MirroredTimer:
    """A timer that a worker holds. Seconds."""

    sequence: int
    since: float
    # 0: it is learned.
    after: float
    # The name to learn under; empty: `after` is given.
    learned_as: str


@dataclass(slots=True)
class _Completions:
    """Completions of a scope, and the longest in seconds."""

    count: int = 0
    longest: float = 0.0


@dataclass(frozen=True, slots=True)
class _StepReached:
    """The step that a worker has reached."""

    rank: int
    step: int
    since: float


class TimerMirror:
    """The timers of one node. `now` and `since` are seconds of one clock."""

    def __init__(self, first_sequence: int = 1) -> None:
        """Create an empty mirror that numbers its timers from `first_sequence` (at least 1) on."""
        self._sequence = first_sequence - 1
        self._held: dict[str, dict[str, MirroredTimer]] = {}
        # The sequence number under which the service knows each timer.
        self._sent: dict[tuple[str, str], int] = {}
        # Timers whose state may differ from the sent one, oldest change first.
        self._changed: dict[tuple[str, str], None] = {}
        self._gone: dict[str, None] = {}
        self._acknowledged: list[int] = []
        # Completions here: how many are not sent yet, and the longest ever.
        self._seen: dict[str, _Completions] = {}
        self._to_count: dict[str, None] = {}
        # The service's data of learned scopes, from this and other nodes.
        self._learned: dict[str, _Completions] = {}
        self._to_echo: dict[str, None] = {}
        # Forgotten scopes to confirm; observations sent after the confirmation are new.
        self._to_confirm: dict[str, None] = {}
        self._steps: dict[str, _StepReached] = {}
        self._moved: dict[str, None] = {}

    @property
    def pending(self) -> bool:
        """True if there may be something to send."""
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
        """The workers that hold timers or have reported progress."""
        return list({**dict.fromkeys(self._held), **dict.fromkeys(self._steps)})

    def find(self, worker_id: str, scope: str) -> MirroredTimer | None:
        """Return the worker's present timer of that name, or None."""
        return self._held.get(worker_id, {}).get(scope)

    def sequence_of(self, worker_id: str, scope: str) -> int | None:
        """Return the sequence number of the worker's present timer of that name, or None."""
        held = self.find(worker_id, scope)
        return held.sequence if held is not None else None

    def acquire(self, worker_id: str, scope: str, after: float, since: float, learned_as: str = "") -> None:
        """Start a worker's timer at `since`, in place of the one of that name. `learned_as`: see MirroredTimer."""
        self._sequence += 1
        held = MirroredTimer(self._sequence, since, 0.0 if learned_as else after, learned_as)
        self._held.setdefault(worker_id, {})[scope] = held
        self._changed[worker_id, scope] = None

    def renumber(self, worker_id: str, scope: str) -> None:
        """Give a new number to a timer that the service wrongly reported as expired, so that it is sent again."""
        held = self._held[worker_id][scope]
        self.acquire(worker_id, scope, held.after, held.since, held.learned_as)

    def complete(self, worker_id: str, scope: str, now: float) -> None:
        """End a worker's timer because the worker left the scope; if it learns, note the duration."""
        held = self.find(worker_id, scope)
        self.release(worker_id, scope)
        if held is not None and held.learned_as:
            self.observe(held.learned_as, 1, max(0.0, now - held.since))

    def observe(self, scope: str, count: int, longest: float) -> None:
        """Note `count` (at least 1) completions of a learned scope.

        `longest`: the longest of them in seconds; earlier ones may be included.
        """
        seen = self._seen.get(scope)
        if seen is None:
            if len(self._seen) >= MOST_SCOPES:
                return
            seen = self._seen[scope] = _Completions()
        seen.count += count
        seen.longest = max(seen.longest, longest)
        self._to_count[scope] = None

    def learned(self, scope: str, count: int, longest: float) -> None:
        """Keep learned data from the service, for the next service.

        A service that was just restarted knows less than the one before, until its agents have returned the data: keep
        the maximum.
        """
        former = self._learned.get(scope)
        if former is not None:
            count, longest = max(count, former.count), max(longest, former.longest)
        elif len(self._learned) >= MOST_SCOPES:
            return
        self._learned[scope] = _Completions(count, longest)

    def forget(self, scope: str) -> None:
        """Forget a scope because the service has forgotten it."""
        for notes in (self._seen, self._to_count, self._learned, self._to_echo):
            notes.pop(scope, None)
        self._to_confirm[scope] = None

    def progress(self, worker_id: str, rank: int, step: int, since: float) -> None:
        """Note that a worker reached a step at `since`. The same step again is ignored."""
        former = self._steps.get(worker_id)
        if former is None or former.step != step:
            self._steps[worker_id] = _StepReached(rank, step, since)
            self._moved[worker_id] = None

    def progress_of(self, worker_id: str, now: float) -> tuple[int, float] | None:
        """Return the step that a worker has reached and the seconds since, or None if it has reported none."""
        reached = self._steps.get(worker_id)
        return (reached.step, max(0.0, now - reached.since)) if reached is not None else None

    def release(self, worker_id: str, scope: str) -> None:
        """End a worker's timer; harmless if there is none."""
        scopes = self._held.get(worker_id)
        if scopes is None or scopes.pop(scope, None) is None:
            return
        if not scopes:
            del self._held[worker_id]
        self._changed[worker_id, scope] = None

    def clear(self, worker_id: str) -> None:
        """Remove a worker that is gone, with all its timers, including those started by calls to the service."""
        self._held.pop(worker_id, None)
        self._steps.pop(worker_id, None)
        self._moved.pop(worker_id, None)
        for key in [key for key in (*self._sent, *self._changed) if key[0] == worker_id]:
            self._sent.pop(key, None)
            self._changed.pop(key, None)
        self._gone[worker_id] = None

    def acknowledge(self, expiry_id: int) -> None:
        """Acknowledge an expiry whose timer no worker holds any more."""
        self._acknowledged.append(expiry_id)

    def settle(self, worker_id: str, scope: str, sequence: int, expiry_id: int | None) -> None:
        """End the timer of a handled expiry. If the worker holds a newer timer of that name by now, that one stays.

        `expiry_id`: the expiry to acknowledge; None if it was sent before the last `restart`.
        """
        if self.sequence_of(worker_id, scope) == sequence:
            self.release(worker_id, scope)
        if expiry_id is not None:
            self._acknowledged.append(expiry_id)

    def restart(self) -> None:
        """Send everything again, except completions, which the service may have counted already."""
        self._sent.clear()
        self._gone.clear()
        self._acknowledged.clear()
        self._to_confirm.clear()
        self._changed = {(worker, scope): None for worker, scopes in self._held.items() for scope in scopes}
        self._to_echo = dict.fromkeys(self._learned)
        self._moved = dict.fromkeys(self._steps)

    def take(self, now: float, limit: int) -> list[pb.SuperviseAction]:
        """Return the next changes to send, at most `limit`, in order. They count as sent."""
        actions: list[pb.SuperviseAction] = []
        while self._acknowledged and len(actions) < limit:
            acknowledge = pb.Acknowledge(expiry_id=self._acknowledged.pop())
            actions.append(pb.SuperviseAction(acknowledge=acknowledge))
        while self._gone and len(actions) < limit:
            actions.append(pb.SuperviseAction(clear=pb.ClearWorker(worker_id=_first(self._gone))))
        while self._to_echo and len(actions) < limit:
            actions.append(self._echo(_first(self._to_echo)))
        while self._changed and len(actions) < limit:
            action = self._difference(*_first(self._changed), now)
            if action is not None:
                actions.append(action)
        while self._moved and len(actions) < limit:
            worker_id = _first(self._moved)
            reached = self._steps[worker_id]
            elapsed, step = _since(reached.since, now), min(reached.step, _MOST_STEP)
            progress = pb.Progress(worker_id=worker_id, rank=reached.rank, step=step, elapsed=elapsed)
            actions.append(pb.SuperviseAction(progress=progress))
        while self._to_confirm and len(actions) < limit:
            actions.append(_learned(_first(self._to_confirm), _Completions()))
        while self._to_count and len(actions) < limit:
            scope = _first(self._to_count)
            seen = self._seen[scope]
            count, longest = min(seen.count, _MOST_COUNT), to_duration(seen.longest)
            observe = pb.Observe(scope=scope, count=count, longest=longest)
            actions.append(pb.SuperviseAction(observe=observe))
            seen.count = 0
        return actions

    def _difference(self, worker_id: str, scope: str, now: float) -> pb.SuperviseAction | None:
        held = self.find(worker_id, scope)
        sent = self._sent.get((worker_id, scope))
        if held is None:
            if sent is None:
                return None
            del self._sent[worker_id, scope]
            return pb.SuperviseAction(release=pb.Release(worker_id=worker_id, scope=scope))
        if held.sequence == sent:
            return None
        self._sent[worker_id, scope] = held.sequence
        elapsed = _since(held.since, now)
        acquire = pb.Acquire(worker_id=worker_id, scope=scope, elapsed=elapsed, sequence=held.sequence)
        if held.learned_as:
            acquire.learned_as = held.learned_as
        else:
            acquire.after.CopyFrom(to_duration(held.after))
        return pb.SuperviseAction(acquire=acquire)

    def _echo(self, scope: str) -> pb.SuperviseAction:
        """Return the learned data of a scope. The longest seen here may have been in a lost message: include it."""
        learned, seen = self._learned[scope], self._seen.get(scope, _Completions())
        return _learned(scope, _Completions(learned.count, max(learned.longest, seen.longest)))


def _since(moment: float, now: float) -> Duration:
    return to_duration(max(0.0, now - moment))


def _learned(scope: str, completions: _Completions) -> pb.SuperviseAction:
    longest = to_duration(completions.longest)
    return pb.SuperviseAction(learned=pb.Learned(scope=scope, count=completions.count, longest=longest))


def _first(waiting: dict[Key, None]) -> Key:
    """Remove and return the oldest key."""
    key = next(iter(waiting))
    del waiting[key]
    return key
