"""Check that the replies of a store are linearizable, key by key."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ha.findings import Finding, Wrong
from ha.history import Operation, Outcome
from ha.linearizability import BUDGET, SearchResult, judge

PREFIX = "store."
"""Prefix of the kinds of the store's operations."""

# Operations on registers; a history writes each of their values once.
_REGISTER = {"store.set", "store.compare_set", "store.get"}


def check_stores(operations: Iterable[Operation], budget: int = BUDGET) -> list[Finding]:
    """Return the violations in the replies of a store; the object of each operation is a key of a run."""
    by_key: dict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        if operation.what.startswith(PREFIX):
            by_key[operation.object].append(operation)
    return [finding for key, of_key in by_key.items() for finding in _check_key(key, of_key, budget)]


def apply(value: str | None, operation: Operation) -> tuple[str | None, Mapping[str, Any]]:
    """Return the value of a key after an operation (None: the key does not exist), and the reply."""
    asked = operation.asked
    match operation.what:
        case "store.get":
            return value, {"value": value}
        case "store.set":
            return asked["value"], {}
        case "store.add":
            total = str(int(value or "0") + int(asked["amount"]))
            return total, {"value": total}
        case "store.compare_set":
            swapped = (value or "") == asked["expected"]
            after = asked["desired"] if swapped else value
            return after, {"swapped": swapped, "value": after}
        case "store.delete":
            return None, {"deleted": value is not None}
    raise ValueError(f"no operation of a store: {operation.what!r}")


def _check_key(key: str, operations: Sequence[Operation], budget: int) -> list[Finding]:
    judgement = judge(_worth_placing(operations), None, apply, budget)
    if judgement.verdict is SearchResult.VIOLATION:
        sentence = "no order explains the answers; after the longest that does for the others, none of these can come"
        return [Finding(Wrong.NOT_LINEARIZABLE, key, sentence, judgement.stuck)]
    if judgement.verdict is SearchResult.UNDECIDED:
        unknown = sum(each.outcome is Outcome.UNKNOWN for each in operations)
        sentence = (
            f"{len(operations)} operations, {unknown} of unknown outcome: too many orders to try them all"
        )
        return [Finding(Wrong.UNDECIDED, key, sentence)]
    return []


def _worth_placing(operations: Sequence[Operation]) -> list[Operation]:
    """Return the operations, without those of unknown outcome that make no difference.

    A read makes none. Neither does a write to a register that no reply shows: in an order with it, the next operation
    is another write, and the order without it explains the same replies.
    """
    register = {each.what for each in operations} <= _REGISTER
    seen = {
        value
        for each in operations
        for value in (each.answered.get("value"), each.asked.get("expected"))
        if value is not None
    }
    return [
        each
        for each in operations
        if each.outcome is not Outcome.UNKNOWN
        or (each.what != "store.get" and not (register and _written(each) not in seen))
    ]


def _written(operation: Operation) -> str | None:
    written: str | None = operation.asked.get("value", operation.asked.get("desired"))
    return written
