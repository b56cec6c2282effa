"""The events of our own loggers, as names and fields rather than as text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from logging import LogRecord
from typing import Any


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One event of a logger of ours."""

    level: str
    name: str
    fields: dict[str, Any]


def log_events(records: Iterable[LogRecord]) -> list[LogEvent]:
    """Return the events among records, without the records of other libraries."""
    events: list[LogEvent] = []
    for record in records:
        message: Any = record.msg
        if hasattr(message, "fields"):
            events.append(LogEvent(record.levelname, message.name, message.fields))
    return events
