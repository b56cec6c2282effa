"""Options of `serve rendezvous` and `serve timer`: a flag for each field of their settings, with its default."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from rallypoint.rendezvous.base.limits import Limits
from rallypoint.rendezvous.core.state import MOST_NODES
from rallypoint.serving.options import Command, Finite, Flag, Seconds, Setting, command_with
from rallypoint.timer.core.values import TimerSettings

_Settings = TypeVar("_Settings", Limits, TimerSettings)

# Beyond any machine, in any unit: such a value is a typing error.
_MOST = 10**12
_LONGEST = 366 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class _FieldFlag:
    """The flag of a field of some settings, which has its default."""

    name: str
    kind: click.ParamType[Any]
    metavar: str
    help: str

    def declare(self, default: Any) -> Flag:
        """Return the decorator that adds the flag to a command."""
        attributes = {"type": self.kind, "metavar": self.metavar, "help": self.help}
        return click.option(self.name, cls=Setting, default=default, **attributes)

    @property
    def argument(self) -> str:
        """The command's argument with the flag's value."""
        return self.name.removeprefix("--").replace("-", "_")


class _Whole(click.IntRange):
    """A whole number within bounds."""

    name = "whole number"


def _count(name: str, help_: str, most: int = _MOST) -> _FieldFlag:
    """Return a flag for a number of things; at least one."""
    return _FieldFlag(name, _Whole(1, most), "N", help_)


def _size(name: str, help_: str) -> _FieldFlag:
    """Return a flag for a number of bytes; at least one."""
    return _FieldFlag(name, _Whole(1, _MOST), "BYTES", help_)


def _seconds(name: str, help_: str, least: float = 1.0) -> _FieldFlag:
    """Return a flag for a duration: from `least` seconds to a year."""
    return _FieldFlag(name, Seconds(least, _LONGEST), "SECONDS", help_)


def _flags_of(settings: object, table: Mapping[str, _FieldFlag]) -> Iterator[Flag]:
    return (flag.declare(getattr(settings, field)) for field, flag in table.items())


def _take(settings: _Settings, table: Mapping[str, _FieldFlag], arguments: dict[str, Any]) -> _Settings:
    """Return the settings with the values of the table's flags, which are removed from the arguments."""
    given = {field: arguments.pop(flag.argument) for field, flag in table.items()}
    return dataclasses.replace(settings, **given)


# ---- Options of `serve rendezvous`: limits of the service and of each run.


_RENDEZVOUS = {
    "runs": _count(
        "--max-runs", "Number of runs, ended ones included until they expire. Each takes some 10 KB."
    ),
    "runs_per_client": _count(
        "--max-runs-per-client",
        "Number of them that one client has created: a name in a token, or in a certificate under a policy, else a "
        "host. Lower: a client leaves more room for others.",
    ),
    "nodes_per_run": _count(
        "--max-nodes-per-run",
        "Number of nodes of a run, spares included. Each takes some 40 KB.",
        most=MOST_NODES,
    ),
    "subscribers_per_run": _count(
        "--max-subscribers-per-run",
        "Number of streams that watch a run or its events. Each change is sent to all of them.",
    ),
    "events_per_run": _count(
        "--max-events-per-run",
        "Number of events of a run that are kept, in memory. Two rounds of 8,000 nodes have 32,000.",
    ),
    "event_bytes_per_run": _size("--max-event-bytes-per-run", "Bytes of the events of a run."),
    "event_bytes": _size("--max-event-bytes", "Bytes of the events of all runs, in memory."),
    "run_ttl": _seconds(
        "--run-ttl",
        "How long a run without nodes is kept. Longer lets a job come back later, and keeps more runs.",
    ),
    "messages_per_second": _FieldFlag(
        "--message-rate",
        Finite(1, 1e9),
        "N",
        "Messages per second that a node may send on its stream; a node that sends more is disconnected. An "
        "agent sends a heartbeat every 5 s.",
    ),
    "message_burst": _count("--message-burst", "Messages that a node may send on its stream at once."),
}
_STORE = {
    "all_bytes": _size(
        "--max-store-bytes", "Bytes of keys and values in the stores of all runs, in memory and on disk."
    ),
    "client_bytes": _size(
        "--max-store-bytes-per-client", "Bytes in the stores of the runs that one client has created."
    ),
    "run_bytes": _size(
        "--max-store-bytes-per-run",
        "Maximum bytes of keys and values in a run's store, in memory and on disk.",
    ),
    "run_keys": _count(
        "--max-store-keys-per-run", "Number of keys in a run's store. A million take 4 s to recover."
    ),
    "waiters": _count(
        "--max-store-waiters-per-run",
        "Number of requests that wait for keys of a run. Each is an open call of some 10 KB.",
    ),
    "waited_keys": _count(
        "--max-store-waited-keys-per-run",
        "Number of keys in all waiting requests of a run together. Each takes some 200 bytes.",
    ),
    "queued_bytes": _size(
        "--max-store-queued-bytes-per-run",
        "Writes of a run that wait for a commit. Higher: a slow disk uses more memory; lower: bursts are refused.",
    ),
}
_STATE = {
    "states": _count("--max-states", "Number of runs that have a fenced state."),
    "states_per_client": _count("--max-states-per-client", "Number of them that one client has created."),
    "state_bytes": _size("--max-state-bytes", "Bytes of all fenced states, in memory and on disk."),
    "client_bytes": _size("--max-state-bytes-per-client", "Bytes of those that one client has created."),
    "queued_bytes": _size(
        "--max-state-queued-bytes",
        "Fenced states that wait for a commit. Higher: a slow disk uses more memory; lower: bursts are refused.",
    ),
    "watchers": _count(
        "--max-state-watchers", "Number of streams that watch a fenced state. Each takes some 40 KB."
    ),
}
_OTHERS = {
    "state_ttl": _seconds(
        "--state-ttl",
        "How long a fenced state is kept without a read, write or watcher. Longer keeps more of them.",
    )
}
_PARTS = {"rendezvous": _RENDEZVOUS, "store": _STORE, "state": _STATE}


def limit_options(command: Command) -> Command:
    """Add the flags of all limits to a command, which gets them as the argument `limits`, a Limits."""
    default = Limits()
    flags = [flag for part, table in _PARTS.items() for flag in _flags_of(getattr(default, part), table)]

    def take(arguments: dict[str, Any]) -> None:
        parts = {part: _take(getattr(default, part), table, arguments) for part, table in _PARTS.items()}
        arguments["limits"] = dataclasses.replace(_take(default, _OTHERS, arguments), **parts)

    return command_with([*flags, *_flags_of(default, _OTHERS)], take)(command)


# ---- Options of `serve timer`: learning, reports, and limits.


NOTHING = "none"
"""The value of --learned with which nothing is stored."""


class _File(click.ParamType[str]):
    """The path of a file, or the word for none; not empty."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the value."""
        if not str(value):
            self.fail(f"{str(value)!r} is not a path; expected one, or {NOTHING}", param, ctx)
        return str(value)


_LEARNED = click.option(
    "--learned",
    cls=Setting,
    type=_File(),
    default="var/timer-learned.json",
    metavar="PATH",
    help=f'File for learned timeouts of scopes (after="auto"), or {NOTHING} to lose them with the process.',
)
_TIMER = {
    "learn_warm_up": _count(
        "--learn-warm-up",
        "Completions of a scope, on all nodes of a run, before a learning timer can expire. Higher: watched later; "
        "lower: learned from fewer samples.",
        most=10**9,
    ),
    "learn_factor": _FieldFlag(
        "--learn-factor",
        Finite(1, 1e6),
        "FACTOR",
        "A learned timeout is this many times the longest completion. Lower: hangs are found sooner; higher: "
        "slow workers are spared.",
    ),
    "learn_least": _seconds(
        "--learn-least",
        "Shortest learned timeout. Lower: hangs of short scopes are found sooner; a pause of the host must stay "
        "below it.",
        least=0.001,
    ),
    "learned_retention": _seconds(
        "--learned-retention",
        "How long the learned timeouts of a run are kept after its end, for its next start.",
    ),
    "stall_after": _seconds(
        "--stall-after",
        "Report a run as stalled if no worker has advanced for this long, unless its agents set another time; 0: "
        "never. No worker is killed for it.",
        least=0.0,
    ),
    "reoffer_interval": _seconds(
        "--reoffer-interval",
        "Time to wait for an agent to acknowledge an expired timer before it is sent again.",
        least=0.1,
    ),
    "retention": _seconds(
        "--expiry-retention",
        "How long an expired timer that no agent has claimed, and a node without timers, are kept.",
    ),
    "max_timers": _count("--max-timers", "Number of timers. Each takes some 500 bytes."),
    "max_timers_per_node": _count(
        "--max-timers-per-node", "Number of timers of a node, so that one run can't starve the others."
    ),
    "max_nodes": _count("--max-nodes", "Number of nodes, gone ones included until they are forgotten."),
    "max_scopes_per_run": _count(
        "--max-scopes-per-run", "Number of learning scopes of a run. Each takes some 500 bytes."
    ),
    "max_learned_runs": _count(
        "--max-learned-runs",
        "Number of runs with learned timeouts. One more replaces the run that ended first.",
    ),
}


def timer_options(command: Command) -> Command:
    """Add the flags of a timer service to a command.

    The command gets the arguments `settings`, a TimerSettings, and `learned`, the path of the file for learned
    timeouts, or None.
    """
    default = TimerSettings()

    def take(arguments: dict[str, Any]) -> None:
        settings = _take(default, _TIMER, arguments)
        arguments["settings"] = dataclasses.replace(settings, stall_after=settings.stall_after or None)
        arguments["learned"] = None if arguments["learned"] == NOTHING else Path(arguments["learned"])

    return command_with([_LEARNED, *_flags_of(default, _TIMER)], take)(command)
