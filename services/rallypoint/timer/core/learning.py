"""Timeouts learned from how long the scopes of a run take, and their timers. Pure; time is an argument.

A learning timer may expire only on the basis of real completions, so the counted number must never exceed the real
one. It may be lower: each account of a scope (an agent's, a file's, our own) counts some of the same completions. So
accounts are merged by their maximum, and only observations, each of which is sent once, are added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rallypoint.timer.core.values import Learned, ScopeView, TimerSettings, TooMany

T = TypeVar("T", bound=Hashable)

# The largest count that every format holds: a uint64 on the wire, a signed 64-bit integer in some client languages.
_MOST_COUNT = 2**63 - 1
_REMEDY = "keep changing numbers out of scope names, or forget some scopes with `rallypoint scopes`"


@dataclass(slots=True, eq=False)
class Scope(Generic[T]):
    """The completions of one scope of a run, and its timers."""

    run_id: str
    name: str
    count: int = 0
    # Seconds. Only grows, until the scope is forgotten.
    longest: float = 0.0
    # The learned timeout in seconds; None: too few completions so far.
    after: float | None = None
    timers: set[T] = field(default_factory=set)

    @property
    def learned(self) -> Learned:
        """The learned data, as it is published."""
        return Learned(self.name, self.count, self.longest)


class ScopeBook(Generic[T]):
    """The learned scopes of all runs. The caller checks names and numbers."""

    def __init__(self, settings: TimerSettings) -> None:
        self._settings = settings
        self._runs: dict[str, dict[str, Scope[T]]] = {}
        self._scopes = 0
        self._nodes: Counter[str] = Counter()
        # Runs without a node whose scopes are kept, and since when; the longest idle first.
        self._idle: dict[str, float] = {}
        self._unpublished: dict[tuple[str, str], None] = {}

    # Runs.

    def enter(self, run_id: str) -> None:
        """Note that a node of the run has come: the run's scopes are kept while it has nodes."""
        self._nodes[run_id] += 1
        self._idle.pop(run_id, None)

    def leave(self, run_id: str, now: float) -> None:
        """Note that a node of the run has gone, with all its timers."""
        self._nodes[run_id] -= 1
        if not self._nodes[run_id]:
            del self._nodes[run_id]
            if run_id in self._runs:
                self._idle[run_id] = now

    def next_forget(self) -> float | None:
        """Return when `forget_idle` is due next; None: not while no node leaves."""
        for since in self._idle.values():
            return since + self._settings.learned_retention
        return None

    def forget_idle(self, now: float) -> None:
        """Forget the runs that have been without a node for `learned_retention` seconds."""
        while (due := self.next_forget()) is not None and due <= now:
            self._forget_longest_idle()

    # Scopes.

    def scope(self, run_id: str, name: str) -> Scope[T]:
        """Return the scope of that name, created if unknown. Call `tidy` if it stays without timers and completions.

        Raises:
            TooMany: The run has too many scopes, or there are too many in all, or too many runs.
        """
        scopes = self._runs.get(run_id, {})
        scope = scopes.get(name)
        if scope is not None:
            return scope
        most = self._settings.max_scopes_per_run
        if len(scopes) >= most:
            raise TooMany(f"too many learned scopes in run {run_id!r}", most, _REMEDY)
        self._make_room(run_id)
        scope = Scope(run_id, name)
        self._runs.setdefault(run_id, {})[name] = scope
        self._scopes += 1
        return scope

    def tidy(self, scope: Scope[T]) -> None:
        """Remove the scope if it has neither timers nor completions."""
        if scope.timers or scope.count:
            return
        scopes = self._runs[scope.run_id]
        del scopes[scope.name]
        self._scopes -= 1
        if not scopes:
            del self._runs[scope.run_id]
            self._idle.pop(scope.run_id, None)

    # Learning.

    def observe(self, run_id: str, name: str, count: int, longest: float) -> Scope[T] | None:
        """Add `count` completions. Return the scope if they have just completed its warm-up.

        Raises:
            TooMany: As `scope`; nothing was learned.
        """
        scope = self.scope(run_id, name)
        return self._raise(scope, scope.count + count, longest)

    def learn(self, run_id: str, name: str, count: int, longest: float) -> Scope[T] | None:
        """Merge another account of the same completions. Return the scope if it has just completed its warm-up.

        Raises:
            TooMany: As `scope`; nothing was learned.
        """
        scope = self.scope(run_id, name)
        return self._raise(scope, max(scope.count, count), longest)

    def restore(self, run_id: str, learned: Learned, now: float) -> Scope[T] | None:
        """As `learn`, for a run that may be without nodes; the change is not published."""
        published = (run_id, learned.scope) not in self._unpublished
        ripe = self.learn(run_id, learned.scope, learned.count, learned.longest)
        if published:
            self._unpublished.pop((run_id, learned.scope), None)
        if not self._nodes[run_id]:
            self._idle.setdefault(run_id, now)
        return ripe

    def forget(self, run_id: str, name: str = "") -> int:
        """Forget a scope of the run ("": all); return how many were forgotten. Their timers start to learn again."""
        scopes = self._runs.get(run_id, {})
        found = list(scopes.values()) if not name else [scopes[name]] if name in scopes else []
        learned = [scope for scope in found if scope.count]
        for scope in learned:
            scope.count, scope.longest, scope.after = 0, 0.0, None
            self._unpublished[run_id, scope.name] = None
            self.tidy(scope)
        return len(learned)

    # Reading.

    def scopes(self, run_id: str = "", beyond: tuple[str, str] | None = None) -> Iterator[ScopeView]:
        """Yield the scopes of a run ("": of all), ordered by run and name, starting after `beyond`."""
        for run in sorted(self._runs) if not run_id else [run_id]:
            if beyond and run < beyond[0]:
                continue
            scopes = self._runs.get(run, {})
            for name in sorted(scopes):
                if beyond is None or (run, name) > beyond:
                    scope = scopes[name]
                    yield ScopeView(run, scope.learned, scope.after, len(scope.timers))

    def learned_of(self, run_id: str) -> list[Learned]:
        """Return all learned scopes of the run."""
        return [scope.learned for scope in self._runs.get(run_id, {}).values() if scope.count]

    def all_learned(self) -> Iterator[tuple[str, Learned]]:
        """Yield all learned scopes with their run_id: runs without nodes first, of these the longest idle first."""
        for run_id in [*self._idle, *(run_id for run_id in self._runs if run_id not in self._idle)]:
            for learned in self.learned_of(run_id):
                yield run_id, learned

    def take_learned(self) -> list[tuple[str, Learned]]:
        """Return the changes since the last call that are worth publishing, with their run_id.

        These are: a completed warm-up, a longer longest completion, and, with a count of 0, a forgotten scope.
        """
        unpublished, self._unpublished = self._unpublished, {}
        nothing: dict[str, Scope[T]] = {}
        changes = []
        for run_id, name in unpublished:
            scope = self._runs.get(run_id, nothing).get(name)
            changes.append((run_id, scope.learned if scope is not None else Learned(name, 0, 0.0)))
        return changes

    def _raise(self, scope: Scope[T], count: int, longest: float) -> Scope[T] | None:
        scope.count = min(count, _MOST_COUNT)
        grown = longest > scope.longest
        if grown:
            scope.longest = longest
        ripe = scope.after is None and scope.count >= self._settings.learn_warm_up
        if grown or ripe:
            self._unpublished[scope.run_id, scope.name] = None
        if ripe or (grown and scope.after is not None):
            scope.after = max(self._settings.learn_least, self._settings.learn_factor * scope.longest)
        return scope if ripe else None

    def _make_room(self, run_id: str) -> None:
        """Make room for one more scope of that run: evict the run that has been without a node for longest."""
        settings = self._settings
        if self._scopes >= settings.max_scopes:
            full = TooMany("too many learned scopes", settings.max_scopes, _REMEDY)
        elif len(self._runs) >= settings.max_learned_runs and run_id not in self._runs:
            full = TooMany("too many runs with learned scopes", settings.max_learned_runs, "end some first")
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
        self._unpublished.update({(run_id, name): None for name in scopes})
