"""Measurements of a worker: durations of functions and blocks, and values.

    from rallypoint.worker.metrics import put, timed, timing

    @timed
    def save_checkpoint(): ...

    with timing("load_batch"):
        batch = next(batches)
    put("queue_depth", len(queue))

Measurements go to the agent if it has a destination for them (`--metrics-address`, `--event-log-handler`), else they
are dropped; a sink of your own replaces the agent with `configure`. Measuring never blocks and never raises:
measurements that exceed the agent's buffer are lost.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

__all__ = ["METRICS_VARIABLE", "Measurement", "configure", "put", "timed", "timing"]

METRICS_VARIABLE = "RALLYPOINT_METRICS_SOCKET"
"""Variable with the agent's socket in the worker's environment; not set if measurements have no destination."""

if TYPE_CHECKING:
    from typing import ParamSpec  # Python 3.10

    _P = ParamSpec("_P")
_R = TypeVar("_R")


class Measurement(NamedTuple):
    """A measurement: a duration or a value.

    Attributes:
        name: Name of the measurement.
        seconds: The duration; None for a value.
        raised: True if the measured code ended with an exception.
        value: The value; None for a duration.
    """

    name: str
    seconds: float | None = None
    raised: bool = False
    value: float | None = None


_Sink = Callable[[Measurement], object]


def configure(sink: _Sink | None) -> None:
    """Send measurements of this process to a sink of your own; None: to the agent again.

    Args:
        sink: Called in the measuring thread; its exceptions are dropped.
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
    """Decorate a function to measure the duration of every call, and whether it raised.

    Args:
        function: The function, if the decorator is used without arguments.
        name: Name of the measurement; default: `Class.method`, or `module.function` with the last part of the module.
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
    """Measure the duration of a block, and whether it raised."""
    began, raised = time.perf_counter(), True
    try:
        yield
        raised = False
    finally:
        _send(Measurement(name, seconds=time.perf_counter() - began, raised=raised))


def put(name: str, value: float) -> None:
    """Report a value, for example a queue's depth; the latest one counts."""
    _send(Measurement(name, value=float(value)))


def _name_of(function: Callable[..., Any]) -> str:
    parts = function.__qualname__.split(".")
    if len(parts) > 1 and parts[-2] != "<locals>":
        return ".".join(parts[-2:])
    return f"{function.__module__.rpartition('.')[2]}.{parts[-1]}"


def _send(measurement: Measurement) -> None:
    with contextlib.suppress(Exception):  # a failing sink must not stop the training
        _sink(measurement)


class _AgentSink:
    """Send measurements to the agent's socket, if there is one."""

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
