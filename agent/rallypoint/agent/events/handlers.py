"""Where the events of a job go: `--event-log-handler`, and callables of its user's."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rallypoint.agent.events.recorder import AgentEvent
from rallypoint.rpc.endpoint import SettingError
from rallypoint.rpc.logs import get_logger

EventSink: TypeAlias = Callable[[AgentEvent], object]
"""Takes one event. Called from one thread, one event after the other; what it raises is logged and goes no further."""

ENTRY_POINTS = "rallypoint.event_sinks"
"""Group of entry points: each a callable without arguments that returns an EventSink."""

# A job has some ten events a round and worker. What is more than this behind is not worth its memory.
_WAITING = 10_000

_log = get_logger("rallypoint.agent.events")


def open_event_log(text: str) -> EventSink | None:
    """The sink that a value of `--event-log-handler` names.

    Args:
        text: "null" for none, "console" for the agent's log, "file:PATH" for lines of JSON, or the name of an entry
            point of the group ENTRY_POINTS.

    Returns:
        The sink; None where nobody wants to know.

    Raises:
        SettingError: There is none of that name, or its file can't be written; one line.
    """
    if text in ("", "null"):
        return None
    if text == "console":
        return log_event
    kind, _, place = text.partition(":")
    if kind == "file" and place:
        return EventFile(Path(place))
    return _plugged_in(text)


def check_event_log(text: str) -> str:
    """The text, if `open_event_log` would take it; nothing is opened but for a moment.

    Raises:
        SettingError: See `open_event_log`.
    """
    sink = open_event_log(text)
    if isinstance(sink, EventFile):
        sink.close()
    return text


def _plugged_in(name: str) -> EventSink:
    # Here and not at the top: it takes 20 ms, and next to nobody needs it.
    from importlib.metadata import entry_points  # noqa: PLC0415

    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        known = ", ".join(["null", "console", "file:PATH", *sorted(found)])
        raise SettingError(f"--event-log-handler: {name!r} is none of {known}")
    try:
        make: Callable[[], EventSink] = found[name].load()
        return make()
    except Exception as error:
        raise SettingError(
            f"--event-log-handler: the entry point {name!r} ({found[name].value}) raised {error!r}"
        ) from error


def log_event(event: AgentEvent) -> None:
    """Shows an event in the agent's log."""
    record = event.as_record()
    for known in ("time", "event"):
        del record[known]
    _log.info(f"event {event.name}", **record)


class EventFile:
    """Appends events to a file, a line of JSON each. Several agents may share one on a local file system."""

    def __init__(self, path: Path) -> None:
        """Open it.

        Raises:
            SettingError: That can't be done; one line.
        """
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise SettingError(
                f"--event-log-handler: can't write {str(path)!r}: {error.strerror}; name a file in a folder that exists"
            ) from None
        self._torn = b""

    def __call__(self, event: AgentEvent) -> None:
        """Append one event.

        Raises:
            OSError: It is lost, as where the disk is full; the next one may go through.
        """
        line = json.dumps(event.as_record(), default=str, separators=(",", ":")).encode()
        # A line in one write: others may append to the same file. One that broke off stays alone in its line.
        data = self._torn + line + b"\n"
        written = os.write(self._fd, data)
        self._torn = b"" if written == len(data) else b"\n"
        if self._torn:
            raise OSError(f"only {written} of {len(data)} bytes were written")

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)


class EventDelivery:
    """Hands events to sinks on a thread of its own: no disk and no code of a user's ever holds up the agent."""

    def __init__(self, sinks: Sequence[EventSink]) -> None:
        """`sinks`: each that has a `close` is closed at the end."""
        self._sinks = tuple(sinks)
        self._waiting: queue.Queue[AgentEvent | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self._failing: set[int] = set()
        self._lost = 0

    def __call__(self, event: AgentEvent) -> None:
        """Take an event; returns at once."""
        if not self._sinks:
            return
        if self._thread is None:
            # A daemon: a sink that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=self._deliver, name="rallypoint-events", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self._lost += 1
            if self._lost == 1:
                _log.warning("events are lost: their sinks are too slow", waiting=_WAITING)

    @property
    def has_sinks(self) -> bool:
        """Whether there are sinks."""
        return bool(self._sinks)

    @property
    def under_way(self) -> bool:
        """Whether there is something for `close` to wait for."""
        return self._thread is not None

    def close(self, timeout: float) -> bool:
        """Deliver what waits; blocks. False if that takes over `timeout` seconds: the rest is lost."""
        if self._thread is None:
            self._close_sinks()
            return True
        try:
            self._waiting.put(None, timeout=timeout)
        except queue.Full:
            return False
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _deliver(self) -> None:
        while (event := self._waiting.get()) is not None:
            for number, sink in enumerate(self._sinks):
                self._hand_over(number, sink, event)
        self._close_sinks()

    def _hand_over(self, number: int, sink: EventSink, event: AgentEvent) -> None:
        try:
            sink(event)
        except Exception as error:
            if number not in self._failing:  # once, and again after it has worked in between
                _log.warning(
                    "an event is lost: its sink raised",
                    sink=_name_of(sink),
                    lost=event.name,
                    reason=str(error) or repr(error),
                )
            self._failing.add(number)
        else:
            self._failing.discard(number)

    def _close_sinks(self) -> None:
        for sink in self._sinks:
            close: Any = getattr(sink, "close", None)
            if close is not None:
                try:
                    close()
                except Exception as error:
                    _log.warning("an event sink raised in the end", sink=_name_of(sink), reason=repr(error))


def _name_of(sink: EventSink) -> str:
    return getattr(sink, "__qualname__", None) or type(sink).__qualname__
