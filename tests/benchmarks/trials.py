"""Measuring several things in turns, so that the moods of the machine meet them alike."""

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

# Seconds that a client process gets beyond the time in which it is to give up itself.
_MARGIN = 60.0


def ours(journal: str) -> Start:
    """The rendezvous service with a journal of JOURNALS."""
    return partial(our_server, journal=journal)


def floor(behaviour: str, size: int = 200) -> Start:
    """A bare server; see `processes.floor_server`."""
    return partial(floor_server, behaviour=behaviour, size=size)


def in_turns(
    session: Session, what: str, variants: Mapping[str, Callable[[], T]], show: Callable[[T], str]
) -> dict[str, T]:
    """Measure each variant in turn, `session.trials` times over.

    Args:
        session: Is told of each result, and of each failure.
        what: Is measured, for people.
        variants: Each measures one variant once; raises BenchmarkError where it can't.
        show: A result in a few words.

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
    """A result, which is a dataclass of numbers, whose every field is the median of that field."""
    rows = list(results)
    kind: Any = type(rows[0])
    names = [field.name for field in fields(kind)]
    middle: T = kind(**{name: statistics.median(getattr(row, name) for row in rows) for name in names})
    return middle


def measured(session: Session, server: Server, module: str, order: Any, result: Callable[..., T]) -> T:
    """Have a client process measure a server.

    Args:
        session: Names the folder.
        server: What is measured.
        module: Of `benchmarks.clients`.
        order: What to tell the client, a dataclass; its `timeout` is the seconds after which that gives up.
        result: The dataclass to make of its answer.

    Raises:
        BenchmarkError: It could not be measured.
    """
    command = client_command(module, order)
    try:
        return result(**driven(command, session.folder / f"client-{module}.log", order.timeout + _MARGIN))
    except BenchmarkError as error:
        raise BenchmarkError(f"{error}; the server's log ends with: {server.log_tail()}") from None
