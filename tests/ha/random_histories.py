"""Random histories of small objects: linearizable ones, and ones with a changed reply."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from ha.history import NEVER, Operation, Outcome
from ha.linearizability import Apply

_S = TypeVar("_S")

Ask = Callable[[random.Random, int, _S], tuple[str, Mapping[str, Any]]]
"""Returns the kind and fields of a client's operation, given a unique number and the state that it saw last."""


def linearizable(
    draw: random.Random,
    initial: _S,
    ask: Ask[_S],
    apply: Apply[Any],
    count: int,
    *,
    clients: int = 3,
    lost: float = 0.25,
) -> list[Operation]:
    """Return operations of some clients on an object that runs them one by one; a share of replies is `lost`.

    Each takes effect at a moment between its beginning and its end, in the order of the list. One whose reply is lost
    has no end: it takes effect in its turn, or never.
    """
    free = [0.0] * clients
    operations: list[Operation] = []
    state, now = initial, 0.0
    seen: list[Any] = [initial] * clients
    for number in range(count):
        client = draw.randrange(clients)
        # Times are whole numbers, so some are equal.
        now = max(now, free[client]) + draw.choice((0.0, 1.0, 2.0))
        began = max(free[client], now - draw.choice((0.0, 1.0, 3.0, 6.0)))
        what, asked = ask(draw, number, seen[client])
        operation = Operation(f"client-{client}", what, "object", began, NEVER, Outcome.UNKNOWN, asked)
        fate = draw.random()
        if fate < 0.4 * lost:
            free[client] = now + 1.0  # had no effect, and its client does not know that
        elif fate < lost:
            state, _ = apply(state, operation)
            free[client] = now + 1.0  # took effect, and its client does not know that
        else:
            state, answered = apply(state, operation)
            ended = now + draw.choice((0.0, 1.0, 3.0, 6.0))
            operation = replace(operation, ended=ended, outcome=Outcome.OK, answered=answered)
            free[client], seen[client] = ended, state
        operations.append(operation)
    return operations


def corrupted(draw: random.Random, operations: list[Operation]) -> list[Operation]:
    """Return a history with one reply exchanged, moved in time or refused; it may still be linearizable."""
    answered = [index for index, each in enumerate(operations) if each.outcome is Outcome.OK]
    if not answered:
        return operations
    index = draw.choice(answered)
    victim = operations[index]
    like = [each for each in operations if each.outcome is Outcome.OK and each.what == victim.what]
    changed = list(operations)
    match draw.randrange(3):
        case 0:
            changed[index] = replace(victim, answered=draw.choice(like).answered)
        case 1:
            shift = draw.choice((-20.0, -5.0, 5.0, 20.0))
            changed[index] = replace(victim, began=victim.began + shift, ended=victim.ended + shift)
        case _:
            changed[index] = replace(victim, outcome=Outcome.REFUSED, answered={})
    return changed
