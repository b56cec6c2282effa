"""Lets a worker measure what it does: how long a function takes, how large something is.

    from rallypoint.worker.metrics import put, timed, timing

    @timed
    def save_checkpoint(): ...

    with timing("load_batch"):
        batch = next(batches)
    put("queue_depth", len(queue))

Measurements go to the agent, if it has anybody to tell (`--metrics-address`, `--event-log-handler`), else nowhere; a
sink of your own takes them instead with `configure`. Measuring never blocks and never raises: what the agent has no
room for is lost.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, overload

__all__ = ["METRICS_VARIABLE", "Measurement", "configure", "put", "timed", "timing"]

METRICS_VARIABLE = "RALLYPOINT_METRICS_SOCKET"
"""Names the agent's socket in the worker's environment; not set where nobody wants to know."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured: either how long something took, or a value.

    Attributes:
        name: of what.
        seconds: how long it took; None for a value.
        raised: whether it ended with an exception.
        value: the value; None for a duration.
    """

    name: str
    seconds: float | None = None
    raised: bool = False
    value: float | None = None


_Sink = Callable[[Measurement], object]


def configure(sink: _Sink | None) -> None:
    """Sends measurements of this process to a sink of your own; None: to the agent again.

    Args:
        sink: called in the thread that measures; what it raises is dropped.
    """
    global _sink  # noqa: PLW0603 (one for the process, as logging has)
    if isinstance(_sink, _AgentSink):
        _sink.close()
    _sink = sink if sink is not None else _AgentSink()


@overload
def timed(function: Callable[_P, _R], /) -> Callable[_P, _R]: ...


@overload
def timed(*, name: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...


def timed(function: Callable[..., Any] | None = None, /, *, name: str = "") -> Any:
    """Decorates a function so that the time of every call is measured, and whether it raised.

    Args:
        function: the function, where the decorator is used without arguments.
        name: of the measurement; without it, `Class.method`, or `module.function` with the last part of the module.
    """
    if function is None:
        return functools.partial(_timed, name)
    return _timed("", function)


def _timed(name: str, function: Callable[_P, _R]) -> Callable[_P, _R]:
    known = name or _name_of(function)

    @functools.wraps(function)
    def measured(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with timing(known):
            return function(*args, **kwargs)

    return measured


@contextlib.contextmanager
def timing(name: str) -> Iterator[None]:
    """Measures the time of a block, and whether it raised."""
    began, raised = time.perf_counter(), True
    try:
        yield
        raised = False
    finally:
        _send(Measurement(name, seconds=time.perf_counter() - began, raised=raised))


def put(name: str, value: float) -> None:
    """Says how much of something there is now; the latest counts."""
    _send(Measurement(name, value=float(value)))


def _name_of(function: Callable[..., Any]) -> str:
    parts = function.__qualname__.split(".")
    if len(parts) > 1 and parts[-2] != "<locals>":
        return ".".join(parts[-2:])
    return f"{function.__module__.rpartition('.')[2]}.{parts[-1]}"


def _send(measurement: Measurement) -> None:
    with contextlib.suppress(Exception):  # who trains must not be stopped by who measures
        _sink(measurement)


class _AgentSink:
    """Sends to the agent's socket, if there is one."""

    def __init__(self) -> None:
        self._path = os.environ.get(METRICS_VARIABLE, "")
        self._rank = int(os.environ.get("RANK", "0"))
        self._socket: socket.socket | None = None

    def __call__(self, measurement: Measurement) -> None:
        if not self._path:
            return
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        record = {
            "name": measurement.name,
            "seconds": measurement.seconds,
            "raised": measurement.raised,
            "value": measurement.value,
            "rank": self._rank,
        }
        self._socket.sendto(json.dumps(record).encode(), self._path)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


_sink: _Sink = _AgentSink()
