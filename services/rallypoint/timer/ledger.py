"""What an agent's workers hold, what the timer service was told of it, and the difference. Pure.

The agent, not the service, holds the truth. Only differences are sent, so a timer that is acquired and released
before anybody looks costs no message, nothing queues up while the service is away, and after any break the
difference is simply everything.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Start:
    """Tell that a worker's timer runs. Seconds."""

    worker_id: str
    scope: str
    after: float
    elapsed: float
    sequence: int


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


Change = Start | End | EndAll | Acknowledge


@dataclass(frozen=True, slots=True)
class _Held:
    sequence: int
    since: float
    after: float


class Ledger:
    """The timers of one node. `now` and `since` are monotonic seconds of one clock."""

    def __init__(self, first_sequence: int = 1) -> None:
        """Makes an empty ledger that numbers its timers from `first_sequence` (at least 1) on."""
        self._sequence = first_sequence - 1
        self._held: dict[str, dict[str, _Held]] = {}
        # The sequence number under which the service knows a timer.
        self._told: dict[tuple[str, str], int] = {}
        # Where held and told may differ, in the order in which it came about.
        self._changed: dict[tuple[str, str], None] = {}
        self._gone: dict[str, None] = {}
        self._acknowledged: list[int] = []

    @property
    def pending(self) -> bool:
        """Whether there may be something to tell."""
        return bool(self._changed or self._gone or self._acknowledged)

    @property
    def workers(self) -> list[str]:
        """The workers that hold timers."""
        return list(self._held)

    def sequence_of(self, worker_id: str, scope: str) -> int | None:
        """The number of the timer that the worker holds now."""
        held = self._held.get(worker_id, {}).get(scope)
        return held.sequence if held is not None else None

    def acquire(self, worker_id: str, scope: str, after: float, since: float) -> None:
        """A worker's timer runs since then, in place of the one of that name."""
        self._sequence += 1
        self._held.setdefault(worker_id, {})[scope] = _Held(self._sequence, since, after)
        self._changed[worker_id, scope] = None

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
        for key in [key for key in (*self._told, *self._changed) if key[0] == worker_id]:
            self._told.pop(key, None)
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
        """The service has to be told everything again. What it told before `restart` counts no more."""
        self._told.clear()
        self._gone.clear()
        self._acknowledged.clear()
        self._changed = {(worker, scope): None for worker, scopes in self._held.items() for scope in scopes}

    def take(self, now: float, limit: int) -> list[Change]:
        """What to tell next, at most `limit` changes, in order. They count as told."""
        changes: list[Change] = []
        while self._acknowledged and len(changes) < limit:
            changes.append(Acknowledge(self._acknowledged.pop()))
        while self._gone and len(changes) < limit:
            worker_id = next(iter(self._gone))
            del self._gone[worker_id]
            changes.append(EndAll(worker_id))
        while self._changed and len(changes) < limit:
            key = next(iter(self._changed))
            del self._changed[key]
            change = self._difference(*key, now)
            if change is not None:
                changes.append(change)
        return changes

    def _difference(self, worker_id: str, scope: str, now: float) -> Change | None:
        held = self._held.get(worker_id, {}).get(scope)
        told = self._told.get((worker_id, scope))
        if held is None:
            return End(*self._forget(worker_id, scope)) if told is not None else None
        if held.sequence == told:
            return None
        self._told[worker_id, scope] = held.sequence
        return Start(worker_id, scope, held.after, max(0.0, now - held.since), held.sequence)

    def _forget(self, worker_id: str, scope: str) -> tuple[str, str]:
        del self._told[worker_id, scope]
        return worker_id, scope
