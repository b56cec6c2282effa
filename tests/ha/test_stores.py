"""Checks of the store's replies, key by key."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ha.findings import Wrong
from ha.history import NEVER, Operation, Outcome
from ha.linearizability import SearchResult, judge
from ha.random_histories import corrupted, linearizable
from ha.stores import apply, check_stores


def _operation(
    what: str,
    began: float,
    ended: float,
    asked: Mapping[str, Any],
    answered: Mapping[str, Any] | None,
    *,
    key: str = "run/k",
) -> Operation:
    outcome = Outcome.UNKNOWN if answered is None else Outcome.OK
    return Operation("c", f"store.{what}", key, began, ended, outcome, asked, answered or {})


def _wrong(*operations: Operation) -> list[Wrong]:
    return [finding.wrong for finding in check_stores(operations)]


def test_additions_count_once_each() -> None:
    """A sum that has an addition twice, or lacks an acknowledged one, is a violation."""
    one = _operation("add", 0, 1, {"amount": 1}, {"value": "1"})
    assert not _wrong(one, _operation("add", 2, 3, {"amount": 2}, {"value": "3"}))
    assert _wrong(one, _operation("add", 2, 3, {"amount": 2}, {"value": "2"})) == [Wrong.NOT_LINEARIZABLE]
    assert _wrong(one, _operation("add", 2, 3, {"amount": 2}, {"value": "4"})) == [Wrong.NOT_LINEARIZABLE]
    lost = _operation("add", 0, NEVER, {"amount": 1}, None)
    assert not _wrong(one, lost, _operation("add", 2, 3, {"amount": 2}, {"value": "4"}))


def test_a_swap_is_won_by_one() -> None:
    """Of two swaps that expect the same value, one succeeds, and the other's reply has the new value."""
    first = _operation("compare_set", 0, 3, {"expected": "", "desired": "a"}, {"swapped": True, "value": "a"})
    lost = _operation("compare_set", 0, 3, {"expected": "", "desired": "b"}, {"swapped": False, "value": "a"})
    won = _operation("compare_set", 0, 3, {"expected": "", "desired": "b"}, {"swapped": True, "value": "b"})
    assert not _wrong(first, lost)
    assert _wrong(first, won) == [Wrong.NOT_LINEARIZABLE]
    absent = _operation(
        "compare_set", 0, 3, {"expected": "x", "desired": "b"}, {"swapped": False, "value": None}
    )
    assert not _wrong(first, absent)
    assert not _wrong(absent)


def test_an_acknowledged_value_is_there() -> None:
    """A value that was set is read until another is set."""
    first = _operation("set", 0, 1, {"value": "a"}, {})
    assert not _wrong(first, _operation("get", 2, 3, {}, {"value": "a"}))
    assert _wrong(first, _operation("get", 2, 3, {}, {"value": None})) == [Wrong.NOT_LINEARIZABLE]


def test_keys_are_apart() -> None:
    """Each key is checked by itself, and a finding names its key."""
    other = _operation("get", 2, 3, {}, {"value": "a"}, key="run/other")
    (finding,) = check_stores([_operation("set", 0, 1, {"value": "a"}, {}), other])
    assert finding.where == "run/other"


def test_an_undecided_key_is_reported() -> None:
    """A key with too many writes of unknown outcome is reported as undecided."""
    lost = [_operation("add", 0, NEVER, {"amount": 2**power}, None) for power in range(24)]
    impossible = _operation("add", 1, 2, {"amount": 1}, {"value": "-1"})
    (finding,) = check_stores([*lost, impossible], budget=1000)
    assert finding.wrong is Wrong.UNDECIDED
    assert "24 of unknown outcome" in finding.sentence


def test_leaving_out_unread_writes_changes_no_result() -> None:
    """Leaving out register writes of unknown outcome that no reply shows saves time, and changes no result."""

    def ask(draw: random.Random, number: int, seen: str | None) -> tuple[str, Mapping[str, Any]]:
        match draw.randrange(3):
            case 0:
                return "store.set", {"value": f"v{number}"}
            case 1:
                return "store.compare_set", {"expected": seen or "", "desired": f"v{number}"}
        return "store.get", {}

    verdicts: Counter[bool] = Counter()
    for seed in range(1500):
        draw = random.Random(seed)
        operations = corrupted(draw, linearizable(draw, None, ask, apply, draw.randint(2, 14), lost=0.4))
        expected = judge(operations, None, apply).verdict is SearchResult.VIOLATION
        assert bool(check_stores(operations)) == expected, f"seed {seed}"
        verdicts[expected] += 1
    assert min(verdicts.values()) > 200, verdicts


def test_a_register_with_many_unknown_writes_is_decided() -> None:
    """A register with hundreds of writes, a hundred of unknown outcome, is decided almost without a search."""
    draw = random.Random(1)
    lost = [_operation("set", 10 * number, NEVER, {"value": f"lost-{number}"}, None) for number in range(100)]
    known = [
        _operation("set", 10 * number, 10 * number + 1, {"value": f"{number}"}, {}) for number in range(300)
    ]
    reads = [
        _operation("get", 10 * number + 2, 10 * number + 3, {}, {"value": f"{number}"})
        for number in range(300)
    ]
    operations = [*lost, *known, *reads]
    draw.shuffle(operations)
    assert not _wrong(*operations)
    assert _wrong(*operations, _operation("get", 4000, 4001, {}, {"value": "17"})) == [Wrong.NOT_LINEARIZABLE]
