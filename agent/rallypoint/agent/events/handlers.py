"""Delivery of a job's events to `--event-log-handler`, and to callables of its user."""

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
"""Takes one event. Called from one thread, one event after the other; its exceptions are logged and not propagated."""

ENTRY_POINTS = "rallypoint.event_sinks"
"""Group of entry points: each a callable without arguments that returns an EventSink."""

# A job has some ten events a round and worker. Events beyond this backlog are not worth their memory.
_WAITING = 10_000

_log = get_logger("rallypoint.agent.events")


def open_event_log(text: str) -> EventSink | None:
    """Open the sink for a value of `--event-log-handler`.

    Args:
        text: "null" for none, "console" for the agent's log, "file:PATH" for lines of JSON, or the name of an entry
            point of the group ENTRY_POINTS.

    Returns:
        The sink; None for "null".

    Raises:
        SettingError: There is no sink of that name, or its file can't be written; one line.
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
    """Return the text if `open_event_log` accepts it; a file is closed at once.

    Raises:
        SettingError: See `open_event_log`.
    """
    sink = open_event_log(text)
    if isinstance(sink, EventFile):
        sink.close()
    return text


def _plugged_in(name: str) -> EventSink:
    # Not at the top: the import takes 20 ms, and is rarely needed.
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
    """Write an event to the agent's log."""
    record = event.as_record()
    for known in ("time", "event"):
        del record[known]
    _log.info(f"event {event.name}", **record)


class EventFile:
    """Appends events to a file, a line of JSON each. Several agents may share one on a local file system."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            SettingError: It can't be opened; one line.
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
            OSError: It is lost, as on a full disk; the next event may be written.
        """
        line = json.dumps(event.as_record(), default=str, separators=(",", ":")).encode()
        # Each line in one write: other agents may append to the same file. A torn line is ended before the next one.
        data = self._torn + line + b"\n"
        written = os.write(self._fd, data)
        self._torn = b"" if written == len(data) else b"\n"
        if self._torn:
            raise OSError(f"only {written} of {len(data)} bytes were written")

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class EventDelivery:
    """Delivers events to sinks on a thread of its own: no disk and no code of a user can block the agent."""

    def __init__(self, sinks: Sequence[EventSink]) -> None:
        """`sinks`: those with a `close` method are closed at the end."""
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
        """True if there are sinks."""
        return bool(self._sinks)

    @property
    def under_way(self) -> bool:
        """True if the thread has been started, so that `close` must wait for it."""
        return self._thread is not None

    def close(self, timeout: float) -> bool:
        """Deliver the queued events; blocks. False if that takes over `timeout` seconds: the rest is lost."""
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
            if number not in self._failing:  # log the first failure, and the first after each success
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
                    _log.warning(
                        "an event sink raised when it was closed", sink=_name_of(sink), reason=repr(error)
                    )


def _name_of(sink: EventSink) -> str:
    return getattr(sink, "__qualname__", None) or type(sink).__qualname__
