"""The options of a job by name, as text or values, turned into fields of JobConfig.

One table for the flags of `rallypoint run`, for LaunchConfig and for JobSpec.options, so that names and error messages
are the same in all three.
"""

from __future__ import annotations

import math
import re
import shlex
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rallypoint.agent.config.rlimits import RlimitError, check_rlimits, parse_rlimit, parse_size
from rallypoint.agent.config.settings import MOST_SECONDS
from rallypoint.agent.logs.lines import check_line_prefix
from rallypoint.agent.logs.streams import LEAST_ROTATED, LogError, Redirect
from rallypoint.rpc.endpoint import Endpoint, SettingError, parse_endpoint
from rallypoint.rpc.text import whole_number

Value: TypeAlias = "str | bool | int | float | Path | Sequence[str]"
"""Value of an option. In text, commas separate the parts of a repeatable one, and two commas stand for one."""

_MOST_KEPT = 1_000_000  # attempts or files; more is a mistake
_TRUTH_VALUES = {
    True: True,
    False: False,
    "1": True,
    "0": False,
    "true": True,
    "false": False,
    "yes": True,
    "no": False,
}


class OptionError(SettingError):
    """An option that does not exist, or an invalid value; one line that names the option."""


@dataclass(frozen=True, slots=True)
class _ParserInput:
    """Input of a parser: the value, the option's name for errors, and the number of workers of the host."""

    value: Any
    label: str
    workers: int

    @property
    def text(self) -> str:
        """The value as text."""
        text = str(self.value)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise self.error("is not valid UTF-8") from None
        return text

    @property
    def parts(self) -> tuple[str, ...]:
        """The values of an option that can be repeated."""
        if isinstance(self.value, str):
            return split_commas(self.value)
        return tuple(str(part) for part in self.value)

    def error(self, problem: str) -> OptionError:
        """Return an error for the value; `problem` is the predicate of its sentence."""
        return OptionError(f"{self.label}: {self.value!r} {problem}")


_Parser: TypeAlias = Callable[[_ParserInput], Any]


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a job.

    Attributes:
        field: The field of JobConfig that it sets.
        parse: Turns the option's value into the field's value.
        repeatable: True if it is a list.
    """

    field: str
    parse: _Parser
    repeatable: bool = False


def job_fields(
    options: Mapping[str, Value | None], workers: int, label: Callable[[str], str] = lambda name: f"--{name}"
) -> dict[str, Any]:
    """Turn options into fields of JobConfig, for `dataclasses.replace`.

    Args:
        options: Values by name, with dashes or underscores; None: not given.
        workers: Number of workers of the host: local ranks from that on are errors.
        label: Returns the name of an option for errors.

    Raises:
        OptionError: An option does not exist, or its value is invalid.
    """
    fields: dict[str, Any] = {}
    for given, value in options.items():
        name = given.replace("_", "-")
        option = OPTIONS.get(name)
        if option is None:
            raise OptionError(f"{label(name)}: there is no such option; known: {', '.join(sorted(OPTIONS))}")
        if value is not None:
            fields[option.field] = option.parse(_ParserInput(value, label(name), workers))
    return fields


def idle_options(
    given: Mapping[str, Value | None],
    fields: Mapping[str, Any],
    label: Callable[[str], str] = lambda name: f"--{name}",
) -> list[str]:
    """Return a sentence for each option that has no effect because another one is not set.

    Args:
        given: Options by name, with dashes or underscores.
        fields: Result of `job_fields` for all of them.
        label: Returns the name of an option for the sentences.
    """
    names = {name.replace("_", "-") for name, value in given.items() if value is not None}
    lines = []
    if "log-line-prefix" in names and fields.get("tee", Redirect()) == Redirect():
        lines.append(("log-line-prefix", "tee", "only lines that are teed have a prefix"))
    if "log-keep-files" in names and fields.get("log_max_bytes") is None:
        lines.append(("log-keep-files", "log-max-size", "files of any size are not rotated"))
    return [f"{label(name)} has no meaning without {label(other)}: {why}" for name, other, why in lines]


def split_commas(text: str) -> tuple[str, ...]:
    """Split a list at its commas; two commas in a row are one comma inside a part, as in torchrun."""
    return tuple(part.replace("\0", ",") for part in text.replace(",,", "\0").split(",") if part)


def parse_signal(text: str) -> signal.Signals:
    """Return a signal by its name, with or without SIG, or by its number.

    Raises:
        ValueError: There is no such signal.
    """
    name = text.strip().upper()
    if name.isdecimal():
        return signal.Signals(int(name))
    try:
        return signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]
    except KeyError:
        raise ValueError(f"{text!r} is no signal") from None


def _text(given: _ParserInput) -> str:
    return given.text


def _store(given: _ParserInput) -> str:
    if given.text not in ("tcp", "rallypoint"):
        raise given.error("is neither tcp nor rallypoint")
    return given.text


def _some_text(given: _ParserInput) -> str:
    if not given.text:
        raise given.error("is empty")
    return given.text


def _host(given: _ParserInput) -> str:
    try:
        parse_endpoint(str(Endpoint(given.text, 1)))
    except SettingError:
        raise given.error("is no name of a host and no address") from None
    return given.text


def _path(given: _ParserInput) -> Path:
    return Path(_some_text(given))


def _flag(given: _ParserInput) -> bool:
    value = given.value.lower() if isinstance(given.value, str) else given.value
    if value not in _TRUTH_VALUES:
        raise given.error("is neither true nor false")
    return _TRUTH_VALUES[value]


def _seconds(given: _ParserInput) -> float:
    try:
        number = float(given.value)
    except (TypeError, ValueError):
        raise given.error("is not a number of seconds") from None
    if not (math.isfinite(number) and 0 <= number <= MOST_SECONDS):
        raise given.error(f"is out of range; expected 0 to {MOST_SECONDS} seconds")
    return number


def _count(given: _ParserInput) -> int:
    if (number := whole_number(given.text, 0, _MOST_KEPT)) is None:
        raise given.error(f"is not a whole number from 0 to {_MOST_KEPT}")
    return number


def _port(given: _ParserInput) -> int:
    if (port := whole_number(given.text, 1, 65535)) is None:
        raise given.error("is not a port; expected a number from 1 to 65535")
    return port


def _streams(given: _ParserInput) -> Redirect:
    if isinstance(given.value, Redirect):
        return given.value
    try:
        return Redirect.parse(given.text, given.label, given.workers)
    except LogError as error:
        raise OptionError(str(error)) from None


def _local_ranks(given: _ParserInput) -> frozenset[int] | None:
    ranks = set()
    for part in given.parts:
        text = part.strip()
        if not re.fullmatch("[0-9]{1,9}", text):
            raise given.error(f"has {text!r}, which is not a local rank; expected numbers, as in 0,1")
        if int(text) >= given.workers:
            raise given.error(
                f"has {text}, but this host has {given.workers} worker{'s' * (given.workers != 1)}, counted from 0"
            )
        ranks.add(int(text))
    return frozenset(ranks) or None


def _log_size(given: _ParserInput) -> int | None:
    if (size := parse_size(given.text)) is None:
        raise given.error("is not a size; expected bytes, or as in 100MB or 1GiB")
    if 0 < size < LEAST_ROTATED:
        raise given.error(
            f"is too small for a log file; expected at least {LEAST_ROTATED} bytes, or 0 for any size"
        )
    return size or None


def _log_files(given: _ParserInput) -> int:
    count = _count(given)
    if count == 0:
        raise given.error("would keep no rotated file; expected at least 1")
    return count


def _line_prefix(given: _ParserInput) -> str:
    try:
        return check_line_prefix(given.text, given.label)
    except LogError as error:
        raise OptionError(str(error)) from None


def _texts(given: _ParserInput) -> tuple[str, ...]:
    return given.parts


def _command(given: _ParserInput) -> tuple[str, ...] | None:
    if not isinstance(given.value, str):
        return tuple(str(part) for part in given.value) or None
    try:
        return tuple(shlex.split(given.value)) or None
    except ValueError as error:
        raise given.error(f"can't be read as a command ({str(error).lower()})") from None


def _signal(given: _ParserInput) -> int:
    try:
        number = signal.Signals(given.value) if isinstance(given.value, int) else parse_signal(given.text)
    except ValueError:
        raise given.error("is no signal; expected a name or number, as in SIGTERM or 15") from None
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise given.error("can't be caught by a worker; choose another signal")
    return number


def _numa_binding(given: _ParserInput) -> str:
    from rallypoint.agent.workers.affinity import BINDINGS  # noqa: PLC0415

    binding = given.text.replace("_", "-")
    if binding not in BINDINGS:
        raise given.error(f"is none of {', '.join(BINDINGS)}")
    return binding


def _resource_limits(given: _ParserInput) -> dict[str, tuple[int, int]]:
    try:
        if isinstance(given.value, Mapping):
            check_rlimits(given.value)
            return dict(given.value)
        limits = [parse_rlimit(part) for part in given.parts]
        for name, count in Counter(name for name, _ in limits).items():
            if count > 1:
                raise RlimitError(f"{name} is given {count} times; give it once")
        return dict(limits)
    except RlimitError as error:
        raise OptionError(f"{given.label}: {error}") from None


def _health_checks(given: _ParserInput) -> tuple[str, ...]:
    from rallypoint.agent.health.checks import HealthCheckError, parse_health_check  # noqa: PLC0415

    for part in given.parts:
        try:
            parse_health_check(part)
        except HealthCheckError as error:
            raise OptionError(f"{given.label}: {error}") from None
    return given.parts


def _event_log(given: _ParserInput) -> str:
    from rallypoint.agent.events.handlers import check_event_log  # noqa: PLC0415

    try:
        return check_event_log(given.text)
    except SettingError as error:
        raise OptionError(str(error)) from None


OPTIONS: Mapping[str, Option] = {
    "role": Option("role", _some_text),
    "topology": Option("topology", _text),
    "log-dir": Option("log_dir", _path),
    "redirects": Option("redirects", _streams),
    "tee": Option("tee", _streams),
    "local-ranks-filter": Option("local_ranks_filter", _local_ranks),
    "duplicate-stdout-filters": Option("duplicate_stdout_filters", _texts),
    "duplicate-stderr-filters": Option("duplicate_stderr_filters", _texts),
    "log-line-prefix": Option("line_prefix", _line_prefix),
    "log-max-size": Option("log_max_bytes", _log_size),
    "log-keep-files": Option("log_keep_files", _log_files),
    "keep-attempts": Option("keep_attempts", _count),
    "failure-file": Option("failure_file", _path),
    "event-log-handler": Option("event_log", _event_log),
    "shutdown-timeout": Option("shutdown_timeout", _seconds),
    "stop-signal": Option("stop_signal", _signal),
    "evidence-timeout": Option("evidence_timeout", _seconds),
    "require-watchdog": Option("require_watchdog", _flag),
    "watchdog-timeout": Option("watchdog_timeout", _seconds),
    "stall-after": Option("stall_after", _seconds),
    "virtual-local-rank": Option("virtual_local_rank", _flag),
    "master-addr": Option("master_address", _host),
    "master-port": Option("master_port", _port),
    "store": Option("store", _store),
    "numa-binding": Option("numa_binding", _numa_binding),
    "rlimit": Option("rlimits", _resource_limits, repeatable=True),
    "health-check": Option("health_checks", _health_checks, repeatable=True),
    "health-timeout": Option("health_timeout", _seconds),
    "maintenance-command": Option("maintenance_command", _command),
    "drain-timeout": Option("drain_grace", _seconds),
    "warn-signal": Option("warn_signal", _signal),
}
"""Every option of a job, by its name with dashes."""
