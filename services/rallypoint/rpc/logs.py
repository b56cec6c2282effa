"""Structured logs on stderr: short lines for people, or one JSON object a line for programs.

`get_logger` and lines of both kinds need only the standard library; rich is imported for the line at the bottom of a
terminal, see `show_progress`. A program that never calls `configure_logs` receives our records like those of any
library, through its own `logging`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TextIO

from rallypoint.rpc.text import printable

if TYPE_CHECKING:
    from rich.live import Live

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class _Event:
    """The message of our records: a fixed event name, its fields, and a sentence for people that replaces both."""

    __slots__ = ("fields", "name", "sentence")

    def __init__(self, name: str, fields: dict[str, object], sentence: str) -> None:
        self.name = name
        self.fields = fields
        self.sentence = sentence

    def __str__(self) -> str:
        return self.sentence or " ".join(
            [self.name, *(f"{key}={value!r}" for key, value in self.fields.items())]
        )


class Logger:
    """Logs events: `log.info("node lost", run_id=..., reason=...)`. JSON or str() must be able to show the fields.

    People read a `sentence` among the fields instead of the event and its fields; programs do not get it.
    """

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
            sentence = str(fields.pop("sentence", ""))
            message = _Event(event, {**self._fields, **fields}, sentence)
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
    handler = _Handler(stream)
    colours = stream.isatty() and not os.environ.get("NO_COLOR")
    handler.setFormatter(_FormatterForPeople(colours) if human else _JsonFormatter())
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


# SGR codes of levels above info.
_COLOURS = {"debug": "2", "warning": "33", "error": "31", "critical": "31"}


class _FormatterForPeople(logging.Formatter):
    """Formats one line: local time, level unless it is info, event, and fields. A traceback has lines of its own."""

    def __init__(self, colours: bool) -> None:
        super().__init__()
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        message, level = record.msg, record.levelname.lower()
        if not isinstance(message, _Event):
            words = [f"{record.name}: {printable(record.getMessage())}"]
        elif message.sentence:
            words = [printable(message.sentence)]
        else:
            words = [message.name, *(f"{key}={_shown(value)}" for key, value in message.fields.items())]
        if level != "info":
            words[:0] = [f"\x1b[{_COLOURS[level]}m{level}\x1b[0m" if self._colours else level]
        time = datetime.fromtimestamp(record.created, UTC).astimezone()
        line = " ".join([f"\x1b[2m{time:%H:%M:%S}\x1b[0m" if self._colours else f"{time:%H:%M:%S}", *words])
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _shown(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and text and not set(text) & set(" \"'") else repr(text)


class _Handler(logging.StreamHandler[TextIO]):
    """Writes records; above the bottom line of a terminal, while there is one."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.bottom: Live | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        if self.bottom is None:
            super().emit(record)
            return
        from rich.text import Text  # noqa: PLC0415 (slow)

        self.bottom.console.print(Text.from_ansi(self.format(record)), soft_wrap=True)


def _handler() -> _Handler | None:
    return next((each for each in logging.getLogger().handlers if isinstance(each, _Handler)), None)


def logs_are_json() -> bool:
    """True if `configure_logs` has chosen JSON: then all output of this process on stderr should be."""
    handler = _handler()
    return handler is not None and isinstance(handler.formatter, _JsonFormatter)


def show_progress(line: str) -> bool:
    """Show or renew a line below the logs; empty: remove it.

    Return False without a terminal, or if logs are not for people: log the line instead, and not as often.
    """
    handler = _handler()
    if handler is None or not handler.stream.isatty() or logs_are_json():
        return False
    if not line:
        if handler.bottom is not None:
            handler.bottom.stop()
            handler.bottom = None
        return True
    from rich.console import Console  # noqa: PLC0415 (slow, and only for terminals)
    from rich.live import Live  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    if handler.bottom is None:
        # Without a thread: the caller renews it. The rest of stderr is not redirected: workers write to it as well.
        console = Console(file=handler.stream)
        handler.bottom = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        handler.bottom.start()
        console.show_cursor(True)
    handler.bottom.update(Text(printable(line), no_wrap=True, overflow="ellipsis"), refresh=True)
    return True


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


def filter_grpc_logs() -> None:
    """Keep what is not `_worth_showing` out of the log, also if this process does not configure its logs itself.

    A program that embeds one of our servers, through the launcher's API or torchrun, has its own handlers, or none:
    then Python writes errors to stderr. Every server and client of gRPC calls it; more than once is harmless.
    """
    for name in ("grpc._cython.cygrpc", "asyncio"):
        logging.getLogger(name).addFilter(_worth_showing)


def is_end_of_stream(error: BaseException) -> bool:
    """True if grpc.aio failed to send on a stream because the other side has ended it, or is lost.

    gRPC has no public type for it. Compared by name, because this module is loaded before gRPC, or without it. An
    ExecuteBatchError with another text is a misuse of the call, for example two writes at a time.
    """
    return type(error).__name__ == "ExecuteBatchError" and 'Failed "execute_batch"' in str(error)
