"""A general check for linearizability: a search for an order of concurrent operations that explains their replies.

The search is that of Wing and Gong, with Lowe's memory of the configurations that led nowhere (G. Lowe, "Testing for
linearizability", 2017). An operation takes effect at one moment between its beginning and its end; one of unknown
outcome at any moment after it began, or never. The search is exponential in the number of concurrent operations, and
one of unknown outcome never ends, so it is bounded, and callers keep the histories of one object short.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Generic, TypeVar

from ha.history import NEVER, Operation, Outcome

# Configurations to visit before the search gives up: some seconds.
BUDGET = 300_000

_S = TypeVar("_S", bound=Hashable)

Apply = Callable[[_S, Operation], tuple[_S, Mapping[str, Any]]]
"""Returns the next state of an object and its reply, given its state and an operation."""


class SearchResult(Enum):
    """The result of the search."""

    LINEARIZABLE = auto()
    VIOLATION = auto()
    UNDECIDED = auto()


@dataclass(frozen=True, slots=True)
class Judgement:
    """A result, and for a violation the operations of which none can come next after the longest order found."""

    verdict: SearchResult
    stuck: Sequence[Operation] = ()


def judge(operations: Sequence[Operation], initial: _S, apply: Apply[_S], budget: int = BUDGET) -> Judgement:
    """Search for an order that explains operations on one object.

    Args:
        operations: The operations, in any order. Refused ones had no effect; for reads, `apply` leaves the state
            unchanged.
        initial: The first state of the object.
        apply: The behaviour of the object.
        budget: Configurations to visit, at most.
    """
    took_part = sorted(
        (each for each in operations if each.outcome is not Outcome.REFUSED), key=lambda each: each.began
    )
    return _Search(took_part, apply, budget).run(initial)


class _Search(Generic[_S]):
    def __init__(self, operations: Sequence[Operation], apply: Apply[_S], budget: int) -> None:
        self._operations = operations
        self._apply = apply
        self._budget = budget
        self._answered = sum(
            1 << index for index, each in enumerate(operations) if each.outcome is Outcome.OK
        )
        self._ends = [each.ended if each.outcome is Outcome.OK else NEVER for each in operations]

    def run(self, initial: _S) -> Judgement:
        if not self._answered:
            return Judgement(SearchResult.LINEARIZABLE)
        seen: set[tuple[int, _S]] = {(0, initial)}
        deepest, stuck = -1, 0
        path: list[Iterator[tuple[int, _S]]] = [self._next(0, initial)]
        while path:
            step = next(path[-1], None)
            if step is None:
                path.pop()
                continue
            if step in seen:
                continue
            done, state = step
            if done & self._answered == self._answered:
                return Judgement(SearchResult.LINEARIZABLE)
            if len(seen) >= self._budget:
                return Judgement(SearchResult.UNDECIDED)
            seen.add(step)
            if (depth := (done & self._answered).bit_count()) > deepest:
                deepest, stuck = depth, done
            path.append(self._next(done, state))
        return Judgement(
            SearchResult.VIOLATION, [self._operations[index] for index in self._candidates(stuck)]
        )

    def _next(self, done: int, state: _S) -> Iterator[tuple[int, _S]]:
        """Return the possible next configurations, in order of operations' ends: unknown outcomes come last."""
        for index in sorted(self._candidates(done), key=lambda index: self._ends[index]):
            operation = self._operations[index]
            after, answer = self._apply(state, operation)
            if operation.outcome is Outcome.UNKNOWN or answer == operation.answered:
                yield done | 1 << index, after

    def _candidates(self, done: int) -> list[int]:
        """Return the remaining operations that began before any other remaining one had ended."""
        candidates, first_end = [], NEVER
        for index in range(_lowest_zero(done), len(self._operations)):
            if done >> index & 1:
                continue
            if self._operations[index].began > first_end:
                break  # neither can any that began later
            candidates.append(index)
            first_end = min(first_end, self._ends[index])
        return candidates


def _lowest_zero(bits: int) -> int:
    return (~bits & (bits + 1)).bit_length() - 1
