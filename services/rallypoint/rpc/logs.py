"""Structured logs: coloured lines on a terminal, one JSON object a line anywhere else, always on stderr.

`get_logger` and lines of JSON need only the standard library; structlog, which formats lines for terminals, is
imported when `configure_logs` finds a terminal (it takes some 50 ms). A program that never calls `configure_logs`
receives our records like those of any library, through its own `logging`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import MutableMapping
from datetime import UTC, datetime
from typing import Any, TextIO

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class _Event:
    """The message of our records: a fixed event name, and its fields."""

    __slots__ = ("fields", "name")

    def __init__(self, name: str, fields: dict[str, object]) -> None:
        self.name = name
        self.fields = fields

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={value!r}" for key, value in self.fields.items())])


class Logger:
    """Logs events: `log.info("node lost", run_id=..., reason=...)`. JSON or str() must be able to show the fields."""

    __slots__ = ("_fields", "_logger")

    def __init__(self, logger: logging.Logger, fields: dict[str, object]) -> None:
        self._logger = logger
        self._fields = fields

    def bind(self, **fields: object) -> Logger:
        """Return a logger that adds these fields to each event."""
        return Logger(self._logger, {**self._fields, **fields})

    @property
    def debugging(self) -> bool:
        """True if debug events are shown; check it before you build many of them."""
        return self._logger.isEnabledFor(logging.DEBUG)

    def debug(self, event: str, **fields: object) -> None:
        """Log an event for a developer of Rallypoint."""
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Log a fact that an operator may need later."""
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Log a problem that was handled."""
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Log a failure that a person should look at."""
        self._log(logging.ERROR, event, fields)

    def exception(self, event: str, *, error: BaseException | None = None, **fields: object) -> None:
        """Log an error with its traceback: `error`'s, or that of the exception being handled."""
        self._log(logging.ERROR, event, fields, error or sys.exc_info()[1])

    def _log(
        self, level: int, event: str, fields: dict[str, object], error: BaseException | None = None
    ) -> None:
        if self._logger.isEnabledFor(level):
            # 3: the frame of the caller of info(), debug() ...
            message = _Event(event, {**self._fields, **fields})
            self._logger.log(level, message, exc_info=error, stacklevel=3)


def get_logger(name: str, **fields: object) -> Logger:
    """Return a logger of that name whose events carry `fields`. Cheap; call it at the top of a module."""
    return Logger(logging.getLogger(name), fields)


def configure_logs(level: str = "info", format: str = "auto", stream: TextIO | None = None) -> None:
    """Send all logs of this process, ours and the standard library's, to stderr. A second call replaces the first.

    Args:
        level: debug, info, warning or error.
        format: human, json, or auto: human when the stream is a terminal, json otherwise.
        stream: the stream to use instead of stderr.

    Raises:
        ValueError: no such level or format.
    """
    stream = stream or sys.stderr
    if level not in _LEVELS:
        raise ValueError(f"log level {level!r} is none of {', '.join(_LEVELS)}")
    if format not in ("auto", "human", "json"):
        raise ValueError(f"log format {format!r} is none of auto, human, json")
    human = format == "human" or (format == "auto" and stream.isatty())
    handler = logging.StreamHandler(stream)
    colours = stream.isatty() and not os.environ.get("NO_COLOR")
    handler.setFormatter(_formatter_for_people(colours) if human else _JsonFormatter())
    handler.addFilter(_worth_showing)
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(_LEVELS[level])
    logging.captureWarnings(True)
    # Their debug output (selector choice, every cancelled call) hides ours.
    for name in ("asyncio", "grpc"):
        logging.getLogger(name).setLevel(max(_LEVELS[level], logging.WARNING))


class _JsonFormatter(logging.Formatter):
    """Formats one JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.msg
        line: dict[str, object] = {
            "event": message.name if isinstance(message, _Event) else record.getMessage(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "timestamp": datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
        if isinstance(message, _Event):
            for key, value in message.fields.items():
                line.setdefault(key, value)
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def _formatter_for_people(colours: bool) -> logging.Formatter:
    # Imported here and not at the top: see the module's docstring.
    import structlog  # noqa: PLC0415

    drawn: list[Any] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.dev.ConsoleRenderer(colors=colours, exception_formatter=structlog.dev.plain_traceback),
    ]
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _spread_fields,
        ],
        processors=drawn,
    )


def _spread_fields(
    _logger: object, _method: str, event_dict: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Split the record of one of our events into its name and fields."""
    message = event_dict["_record"].msg
    if isinstance(message, _Event):
        event_dict["event"] = message.name
        for key, value in message.fields.items():
            event_dict.setdefault(key, value)
    return event_dict


def _worth_showing(record: logging.LogRecord) -> bool:
    """Return False for two normal events that grpc.aio logs as errors with tracebacks.

    Two of its threads raced for one wake-up, and nothing is lost; or a client disconnected while a message was being
    written to it, as every killed client does. (An ExecuteBatchError of another kind is a bug and is kept.)
    """
    if record.name == "asyncio":
        return "PollerCompletionQueue._handle_events" not in record.getMessage()
    if record.name.startswith("grpc") and record.exc_info and record.exc_info[1]:
        return not is_end_of_stream(record.exc_info[1])
    return True


def leave_out_ends_of_streams() -> None:
    """Keep the ends of streams out of gRPC's log, also if this process does not configure its logs itself.

    A program that embeds one of our servers, through the launcher's API or torchrun, has its own handlers, or none:
    then Python writes errors to stderr. Every server and client of gRPC calls it; more than once is harmless.
    """
    logging.getLogger("grpc._cython.cygrpc").addFilter(_worth_showing)


def is_end_of_stream(error: BaseException) -> bool:
    """True if grpc.aio failed to send on a stream because the other side has ended it, or is lost.

    gRPC has no public type for it. Compared by name, because this module is loaded before gRPC, or without it. An
    ExecuteBatchError with another text is a misuse of the call, for example two writes at a time.
    """
    return type(error).__name__ == "ExecuteBatchError" and 'Failed "execute_batch"' in str(error)
