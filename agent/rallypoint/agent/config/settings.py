"""The settings of a run, by their names in `--rdzv-conf`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from enum import IntEnum
from typing import Any

from rallypoint.rendezvous.core.state import LONGEST, LONGEST_LEASE, MOST_RESTARTS_KEPT, RunSettings
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import set_seconds, to_seconds
from rallypoint.rpc.text import whole_number

# Settings that are no keys: flags have them.
_FLAGS = ("min_nodes", "max_nodes", "max_restarts")
# Timeouts of the agent, not settings of the run.
_LOCAL = ("close_timeout", "read_timeout")
_SETTINGS = {field.name: field for field in fields(RunSettings) if field.name not in _FLAGS}
KNOWN_SETTINGS = (*_SETTINGS, *_LOCAL)
MOST_SECONDS = int(LONGEST)
# The shortest time that may not be 0, seconds.
_SHORTEST = 1e-3

# Default of the seconds that workers get to stop; as in torchrun.
SHUTDOWN_TIMEOUT = 30.0

# Limit in seconds for the whole diagnosis of a hung worker before it is killed. It usually takes a tenth of that; more
# is for processes that don't respond. For those, a longer limit delays the restart, a shorter one loses diagnostics.
EVIDENCE_TIMEOUT = 2.0

# Seconds that a job that requires a watchdog runs without one. A timer service is restarted, or moves, within that;
# the five seconds before its absence is noted come on top.
WATCHDOG_TIMEOUT = 30.0

# Limit in seconds for all health checks of a host together. They delay a restart after a failure.
HEALTH_TIMEOUT = 10.0

# Seconds that the workers of a drained host get to finish or to checkpoint. The large clouds announce maintenance at
# least two minutes ahead.
DRAIN_GRACE = 90.0


class RunSettingError(ValueError):
    """A setting that does not exist, or an invalid value; one line."""


@dataclass(frozen=True, slots=True)
class RendezvousConf:
    """The parsed `--rdzv-conf`: the run's settings, and the agent's own timeouts in seconds."""

    settings: pb.RunSettings
    close_timeout: float = 30.0
    read_timeout: float = 60.0


def rendezvous_conf(
    pairs: Mapping[str, str],
    nodes: tuple[int, int],
    max_restarts: int,
    shutdown_timeout: float = SHUTDOWN_TIMEOUT,
) -> RendezvousConf:
    """Build the settings of a run from its node counts and `--rdzv-conf`.

    Args:
        pairs: Keys and values of `--rdzv-conf`.
        nodes: Fewest and most nodes of a round.
        max_restarts: Restarts of failing workers, over the whole run.
        shutdown_timeout: Seconds that workers may take to stop. More than the default also extends the confirm timeout,
            unless `pairs` has one: a host that is still stopping its workers must not be considered lost.

    Raises:
        RunSettingError: A key is unknown, or a value is not a number, or out of its range; one line.
    """
    settings = pb.RunSettings(min_nodes=nodes[0], max_nodes=nodes[1], max_restarts=max_restarts)
    if shutdown_timeout > SHUTDOWN_TIMEOUT:
        set_seconds(settings.confirm_timeout, min(2 * shutdown_timeout, MOST_SECONDS))
    local: dict[str, float] = {}
    for key, text in pairs.items():
        if key not in KNOWN_SETTINGS:
            raise RunSettingError(f"{key!r} is not a setting; known: {', '.join(sorted(KNOWN_SETTINGS))}")
        if key in _LOCAL:
            local[key] = _number(key, text, _SHORTEST)
        else:
            _set(settings, _SETTINGS[key], text)
    _check_lease(settings)
    _check_budgets(settings)
    return RendezvousConf(settings, **local)


def _check_lease(settings: pb.RunSettings) -> None:
    absent = RunSettings()
    interval = to_seconds(settings.keep_alive_interval) or absent.keep_alive_interval
    lease = interval * (settings.keep_alive_max_attempt or absent.keep_alive_max_attempt)
    if lease > LONGEST_LEASE:
        raise RunSettingError(
            f"keep_alive_interval times keep_alive_max_attempt may be at most {LONGEST_LEASE:g} s, not {lease:g}"
        )


def _check_budgets(settings: pb.RunSettings) -> None:
    of_run, of_node = settings.max_restarts, settings.max_restarts_per_node
    if of_node > of_run:
        raise RunSettingError(
            f"max_restarts_per_node={of_node} has no effect: the run ends after {of_run} restarts in all "
            "(--max-restarts); raise that, or lower this"
        )
    if of_run > MOST_RESTARTS_KEPT and (of_node or to_seconds(settings.restart_window)):
        raise RunSettingError(
            f"with restart_window or max_restarts_per_node, --max-restarts may be at most {MOST_RESTARTS_KEPT}, "
            f"not {of_run}"
        )


def _set(settings: pb.RunSettings, setting: Field[Any], text: str) -> None:
    key, default = setting.name, setting.default
    if isinstance(default, float):
        set_seconds(
            getattr(settings, key), _number(key, text, 0.0 if setting.metadata["zero"] else _SHORTEST)
        )
    elif isinstance(default, IntEnum):
        setattr(settings, key, _choice(key, text, type(default)))
    else:
        setattr(settings, key, _whole(key, text, setting.metadata["least"], setting.metadata["most"]))


def _number(key: str, text: str, least: float) -> float:
    try:
        number = float(text)
    except ValueError:
        raise RunSettingError(f"{key}={text!r} is not a number of seconds") from None
    if not least <= number <= MOST_SECONDS:
        raise RunSettingError(f"{key}={text} is out of range; expected {least:g} to {MOST_SECONDS} seconds")
    return number


def _whole(key: str, text: str, least: int, most: int) -> int:
    if (number := whole_number(text, least, most)) is None:
        raise RunSettingError(f"{key}={text!r} is not a whole number from {least} to {most}")
    return number


def _choice(key: str, text: str, choices: type[IntEnum]) -> IntEnum:
    """Return a policy by its name, in any case, with dashes or underscores."""
    try:
        return choices[text.upper().replace("-", "_")]
    except KeyError:
        known = ", ".join(each.name.lower().replace("_", "-") for each in choices)
        raise RunSettingError(f"{key}={text!r} is none of {known}") from None
