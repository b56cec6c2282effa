"""The general search for an order that explains the replies."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from itertools import chain, combinations, permutations
from typing import Any

from ha.history import NEVER, Operation, Outcome
from ha.linearizability import SearchResult, judge
from ha.random_histories import corrupted, linearizable
from ha.stores import apply


def _operation(
    what: str, began: float, ended: float, asked: Mapping[str, Any], answered: Mapping[str, Any] | None
) -> Operation:
    outcome = Outcome.UNKNOWN if answered is None else Outcome.OK
    return Operation("c", f"store.{what}", "k", began, ended, outcome, asked, answered or {})


def _set(value: str, began: float, ended: float, *, known: bool = True) -> Operation:
    return _operation("set", began, ended, {"value": value}, {} if known else None)


def _get(value: str | None, began: float, ended: float) -> Operation:
    return _operation("get", began, ended, {}, {"value": value})


def _result(*operations: Operation) -> SearchResult:
    return judge(operations, None, apply).verdict


def test_a_read_shows_the_last_or_a_concurrent_write() -> None:
    """A read shows the last completed write, or a concurrent one."""
    assert _result(_set("a", 0, 1), _get("a", 2, 3)) is SearchResult.LINEARIZABLE
    assert _result(_set("a", 0, 5), _get("a", 2, 3)) is SearchResult.LINEARIZABLE
    assert _result(_set("a", 0, 5), _get(None, 2, 3)) is SearchResult.LINEARIZABLE
    assert _result(_set("a", 0, 1), _get(None, 2, 3)) is SearchResult.VIOLATION
    assert _result(_set("a", 4, 5), _get("a", 2, 3)) is SearchResult.VIOLATION


def test_all_readers_see_writes_in_one_order() -> None:
    """Two concurrent writes may come in any order, but in the same order for all readers."""
    writes = _set("a", 0, 10), _set("b", 0, 10)
    assert _result(*writes, _get("a", 1, 2), _get("b", 3, 4)) is SearchResult.LINEARIZABLE
    assert _result(*writes, _get("b", 1, 2), _get("a", 3, 4)) is SearchResult.LINEARIZABLE
    assert _result(*writes, _get("a", 1, 2), _get("b", 3, 4), _get("a", 5, 6)) is SearchResult.VIOLATION


def test_a_write_of_unknown_outcome_may_take_effect_late_or_never() -> None:
    """A write of unknown outcome takes effect at most once, at any moment after it began."""
    lost = _set("a", 0, NEVER, known=False)
    assert _result(lost, _get(None, 1, 2), _get(None, 8, 9)) is SearchResult.LINEARIZABLE
    assert _result(lost, _get(None, 1, 2), _get("a", 8, 9)) is SearchResult.LINEARIZABLE
    assert _result(lost, _get("a", 1, 2), _get(None, 8, 9)) is SearchResult.VIOLATION
    again = _set("b", 3, 4)
    assert _result(lost, _get("a", 1, 2), again, _get("b", 5, 6), _get("a", 7, 8)) is SearchResult.VIOLATION


def test_a_refused_write_has_no_effect() -> None:
    """A read that sees a refused write is a violation, and nothing else is."""
    refused = Operation(
        "c", "store.set", "k", 0, 1, Outcome.REFUSED, {"value": "a"}, {"reason": "LEASE_LOST"}
    )
    assert _result(refused, _get(None, 2, 3)) is SearchResult.LINEARIZABLE
    assert _result(refused, _get("a", 2, 3)) is SearchResult.VIOLATION


def test_a_violation_names_the_operations_that_can_not_follow() -> None:
    """The result has the operations that can't follow the longest order found."""
    stale = _get("a", 6, 7)
    judgement = judge([_set("a", 0, 1), _set("b", 2, 3), _get("b", 4, 5), stale], None, apply)
    assert judgement.verdict is SearchResult.VIOLATION
    assert list(judgement.stuck) == [stale]


def test_a_search_that_takes_too_long_is_given_up() -> None:
    """Past its budget the search returns UNDECIDED, not LINEARIZABLE."""
    lost = [_operation("add", 0, NEVER, {"amount": 2**power}, None) for power in range(24)]
    impossible = _operation("add", 1, 2, {"amount": 1}, {"value": "-1"})
    assert judge([*lost, impossible], None, apply, budget=1000).verdict is SearchResult.UNDECIDED
    assert judge([*lost[:5], impossible], None, apply, budget=1000).verdict is SearchResult.VIOLATION


def test_long_linearizable_histories_are_quick() -> None:
    """Hundreds of operations by five concurrent clients, a dozen of unknown outcome, are ordered at once."""

    def ask(draw: random.Random, number: int, seen: str | None) -> tuple[str, Mapping[str, Any]]:
        return ("store.add", {"amount": 1 + draw.randrange(10**6)}) if number % 3 else ("store.get", {})

    for seed in range(20):
        operations = linearizable(random.Random(seed), None, ask, apply, 300, clients=5, lost=0.04)
        judgement = judge(operations, None, apply, budget=20_000)
        assert judgement.verdict is SearchResult.LINEARIZABLE, f"seed {seed}"


def test_it_agrees_with_trying_every_order() -> None:
    """Of random short histories, correct and corrupted, exactly those with a valid order are linearizable."""
    verdicts: Counter[SearchResult] = Counter()
    for seed in range(1500):
        draw = random.Random(seed)
        operations = linearizable(draw, None, _ask, apply, draw.randint(2, 6))
        assert judge(operations, None, apply).verdict is SearchResult.LINEARIZABLE, f"seed {seed}"
        altered = corrupted(draw, operations)
        expected = SearchResult.LINEARIZABLE if _some_order_explains(altered) else SearchResult.VIOLATION
        assert judge(altered, None, apply).verdict is expected, f"seed {seed}"
        verdicts[expected] += 1
    assert min(verdicts[SearchResult.LINEARIZABLE], verdicts[SearchResult.VIOLATION]) > 200, verdicts


def _ask(draw: random.Random, number: int, seen: str | None) -> tuple[str, Mapping[str, Any]]:
    match draw.randrange(5):
        case 0:
            return "store.set", {"value": str(number)}
        case 1:
            return "store.add", {"amount": 100}
        case 2:
            return "store.compare_set", {"expected": seen or "", "desired": str(number)}
        case 3:
            return "store.delete", {}
    return "store.get", {}


def _some_order_explains(operations: list[Operation]) -> bool:
    """Return True if an order of all answered and some unknown operations explains the replies."""
    answered = [each for each in operations if each.outcome is Outcome.OK]
    unknown = [each for each in operations if each.outcome is Outcome.UNKNOWN]
    subsets = chain.from_iterable(combinations(unknown, size) for size in range(len(unknown) + 1))
    return any(_explains(order) for subset in subsets for order in permutations([*answered, *subset]))


def _explains(order: tuple[Operation, ...]) -> bool:
    value: str | None = None
    latest = -math.inf
    for operation in order:
        if operation.outcome is Outcome.OK and operation.ended < latest:
            return False  # an earlier one in this order began after it had ended
        latest = max(latest, operation.began)
        value, answer = apply(value, operation)
        if operation.outcome is Outcome.OK and answer != operation.answered:
            return False
    return True
