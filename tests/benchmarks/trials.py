"""Measurements of several variants in turns, so that a slow phase of the machine affects all of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.processes import BenchmarkError, Server, client_command, driven, floor_server, our_server
from benchmarks.session import Session

T = TypeVar("T")

Start = Callable[[Path], AbstractContextManager[Server]]
"""Starts a server that is to be measured; takes the folder for its files."""

JOURNALS = ("memory", "sqlite")
FLOOR = "floor"

# Seconds that a client process gets beyond its own timeout.
_MARGIN = 60.0


def ours(journal: str) -> Start:
    """Return a starter of the rendezvous service with a journal of `JOURNALS`."""
    return partial(our_server, journal=journal)


def floor(behaviour: str, size: int = 200) -> Start:
    """Return a starter of a bare server; see `processes.floor_server`."""
    return partial(floor_server, behaviour=behaviour, size=size)


def in_turns(
    session: Session, what: str, variants: Mapping[str, Callable[[], T]], show: Callable[[T], str]
) -> dict[str, T]:
    """Measure each variant in turn, `session.trials` times over.

    Args:
        session: Receives each result and each failure.
        `what`: Name of the measurement, for people.
        variants: Each measures one variant once, or raises BenchmarkError.
        show: Formats a result in a few words.

    Returns:
        For each variant its `median`; variants that always failed are left out.
    """
    results: dict[str, list[T]] = {}
    for trial in range(1, session.trials + 1):
        for name, measure in variants.items():
            doing = f"{what} {name} {trial}/{session.trials}"
            try:
                result = measure()
            except BenchmarkError as error:
                session.fail(f"{doing}: {error}")
            else:
                results.setdefault(name, []).append(result)
                session.say(f"{doing}: {show(result)}")
    return {name: median(each) for name, each in results.items()}


def median(results: Iterable[T]) -> T:
    """Return a result whose fields are the medians of those of `results`, dataclasses of numbers."""
    rows = list(results)
    kind: Any = type(rows[0])
    names = [field.name for field in fields(kind)]
    middle: T = kind(**{name: statistics.median(getattr(row, name) for row in rows) for name in names})
    return middle


def measured(session: Session, server: Server, module: str, order: Any, result: Callable[..., T]) -> T:
    """Measure a server with a client process.

    Args:
        session: Has the folder for the client's log.
        server: The measured server.
        module: Module of `benchmarks.clients`.
        order: Argument of the client, a dataclass; its `timeout` is the client's own, in seconds.
        result: The dataclass of the client's result.

    Raises:
        BenchmarkError: The measurement failed.
    """
    command = client_command(module, order)
    try:
        return result(**driven(command, session.folder / f"client-{module}.log", order.timeout + _MARGIN))
    except BenchmarkError as error:
        raise BenchmarkError(f"{error}; the server's log ends with: {server.log_tail()}") from None
