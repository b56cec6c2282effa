"""What runs have learned of how long their scopes take, and the timers that go by it. Pure; time is an argument.

A timer may only run out by what was seen, so the count of completions must never be more than there were. It may
be less: each account of a scope (an agent's, a file's, our own) counts some of the same completions, so accounts
are merged by their maximum, and only observations, which are told once, are added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rallypoint.timer.core.values import Learned, ScopeView, TimerSettings, TooMany

T = TypeVar("T", bound=Hashable)

# What fits everywhere that a count goes: a uint64 of the wire, a signed number of many a client's language.
_MOST_COUNT = 2**63 - 1
_MEND = "leave numbers that change out of their names, or have some forgotten"


@dataclass(slots=True, eq=False)
class Scope(Generic[T]):
    """What a run has learned of one scope, and the timers that go by it."""

    run_id: str
    name: str
    count: int = 0
    # Seconds. Only grows, until it is forgotten.
    longest: float = 0.0
    # How long it may take, in seconds; None until enough was seen.
    after: float | None = None
    timers: set[T] = field(default_factory=set)

    @property
    def learned(self) -> Learned:
        """What was learned, as it is told."""
        return Learned(self.name, self.count, self.longest)


class ScopeBook(Generic[T]):
    """What all runs have learned. Names and numbers are the caller's to check."""

    def __init__(self, settings: TimerSettings) -> None:
        self._settings = settings
        self._runs: dict[str, dict[str, Scope[T]]] = {}
        self._scopes = 0
        self._nodes: Counter[str] = Counter()
        # Runs that are remembered though they have no node, and since when; longest first.
        self._idle: dict[str, float] = {}
        self._untold: dict[tuple[str, str], None] = {}

    # Which runs there are.

    def enter(self, run_id: str) -> None:
        """A node of the run has come: what was learned is kept for as long as it is there."""
        self._nodes[run_id] += 1
        self._idle.pop(run_id, None)

    def leave(self, run_id: str, now: float) -> None:
        """A node of the run has gone, with all its timers."""
        self._nodes[run_id] -= 1
        if not self._nodes[run_id]:
            del self._nodes[run_id]
            if run_id in self._runs:
                self._idle[run_id] = now

    def next_forget(self) -> float | None:
        """When `forget_idle` will have something to do; None: not as things are."""
        for since in self._idle.values():
            return since + self._settings.learned_retention
        return None

    def forget_idle(self, now: float) -> None:
        """Forgets the runs that have been without a node for too long."""
        while (due := self.next_forget()) is not None and due <= now:
            self._forget_longest_idle()

    # What timers go by.

    def scope(self, run_id: str, name: str) -> Scope[T]:
        """The scope of that name, made if need be. One that stays without timers and completions is to be
        `tidied`.

        Raises:
            TooMany: the run has too many scopes, or there are too many in all, or too many runs.
        """
        scopes = self._runs.get(run_id, {})
        scope = scopes.get(name)
        if scope is not None:
            return scope
        most = self._settings.max_scopes_per_run
        if len(scopes) >= most:
            raise TooMany(f"too many scopes that run {run_id!r} learns", most, _MEND)
        self._make_room(run_id)
        scope = Scope(run_id, name)
        self._runs.setdefault(run_id, {})[name] = scope
        self._scopes += 1
        return scope

    def tidy(self, scope: Scope[T]) -> None:
        """Removes a scope that has neither timers nor completions."""
        if scope.timers or scope.count:
            return
        scopes = self._runs[scope.run_id]
        del scopes[scope.name]
        self._scopes -= 1
        if not scopes:
            del self._runs[scope.run_id]
            self._idle.pop(scope.run_id, None)

    # What is learned.

    def observe(self, run_id: str, name: str, count: int, longest: float) -> Scope[T] | None:
        """So many more completions were seen. Returns the scope if that was enough just now.

        Raises:
            TooMany: as `scope`; nothing was learned.
        """
        scope = self.scope(run_id, name)
        return self._raise(scope, scope.count + count, longest)

    def learn(self, run_id: str, name: str, count: int, longest: float) -> Scope[T] | None:
        """Merges another account of the same completions. Returns the scope if that was enough just now.

        Raises:
            TooMany: as `scope`; nothing was learned.
        """
        scope = self.scope(run_id, name)
        return self._raise(scope, max(scope.count, count), longest)

    def restore(self, run_id: str, learned: Learned, now: float) -> Scope[T] | None:
        """As `learn`, of a run that may be without nodes, and isn't told to anybody for it."""
        told = (run_id, learned.scope) not in self._untold
        ripe = self.learn(run_id, learned.scope, learned.count, learned.longest)
        if told:
            self._untold.pop((run_id, learned.scope), None)
        if not self._nodes[run_id]:
            self._idle.setdefault(run_id, now)
        return ripe

    def forget(self, run_id: str, name: str = "") -> int:
        """Forgets a scope of the run ("": all of them); says how many. Timers that go by them learn anew."""
        scopes = self._runs.get(run_id, {})
        found = list(scopes.values()) if not name else [scopes[name]] if name in scopes else []
        learned = [scope for scope in found if scope.count]
        for scope in learned:
            scope.count, scope.longest, scope.after = 0, 0.0, None
            self._untold[run_id, scope.name] = None
            self.tidy(scope)
        return len(learned)

    # What is told.

    def scopes(self, run_id: str = "", beyond: tuple[str, str] | None = None) -> Iterator[ScopeView]:
        """The scopes of a run ("": of all), ordered by run and name, from `beyond` (excluded) on."""
        for run in sorted(self._runs) if not run_id else [run_id]:
            if beyond and run < beyond[0]:
                continue
            scopes = self._runs.get(run, {})
            for name in sorted(scopes):
                if beyond is None or (run, name) > beyond:
                    scope = scopes[name]
                    yield ScopeView(run, scope.learned, scope.after, len(scope.timers))

    def learned_of(self, run_id: str) -> list[Learned]:
        """All that the run has learned."""
        return [scope.learned for scope in self._runs.get(run_id, {}).values() if scope.count]

    def all_learned(self) -> Iterator[tuple[str, Learned]]:
        """All that all runs have learned, by run_id; those without nodes first, longest idle first."""
        for run_id in [*self._idle, *(run_id for run_id in self._runs if run_id not in self._idle)]:
            for learned in self.learned_of(run_id):
                yield run_id, learned

    def take_learned(self) -> list[tuple[str, Learned]]:
        """What has changed since the last call and is worth telling, by run_id: a scope of which enough was
        seen, a longer longest, or a count of 0 for what was forgotten. A count alone is not worth it."""
        untold, self._untold = self._untold, {}
        nothing: dict[str, Scope[T]] = {}
        told = []
        for run_id, name in untold:
            scope = self._runs.get(run_id, nothing).get(name)
            told.append((run_id, scope.learned if scope is not None else Learned(name, 0, 0.0)))
        return told

    # Within.

    def _raise(self, scope: Scope[T], count: int, longest: float) -> Scope[T] | None:
        scope.count = min(count, _MOST_COUNT)
        grown = longest > scope.longest
        if grown:
            scope.longest = longest
        ripe = scope.after is None and scope.count >= self._settings.learn_warm_up
        if grown or ripe:
            self._untold[scope.run_id, scope.name] = None
        if ripe or (grown and scope.after is not None):
            scope.after = max(self._settings.learn_least, self._settings.learn_factor * scope.longest)
        return scope if ripe else None

    def _make_room(self, run_id: str) -> None:
        """For one more scope of that run, at the cost of a run that has been without a node for longest."""
        settings = self._settings
        if self._scopes >= settings.max_scopes:
            full = TooMany("too many scopes that learn", settings.max_scopes, _MEND)
        elif len(self._runs) >= settings.max_learned_runs and run_id not in self._runs:
            full = TooMany("too many runs that learn", settings.max_learned_runs, "end some first")
        else:
            return
        if not self._idle:
            raise full
        self._forget_longest_idle()

    def _forget_longest_idle(self) -> None:
        run_id = next(iter(self._idle))
        del self._idle[run_id]
        scopes = self._runs.pop(run_id)
        self._scopes -= len(scopes)
        self._untold.update({(run_id, name): None for name in scopes})
