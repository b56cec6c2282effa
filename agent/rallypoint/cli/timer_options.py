"""The options with which `serve timer` is told how it learns, when it reports, and what it may use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from rallypoint.cli.limit_flags import Flag, count, seconds
from rallypoint.serving.options import Finite, Setting
from rallypoint.timer.core.values import TimerSettings

_Command = TypeVar("_Command", bound=Callable[..., Any])

NOTHING = "none"
"""The value of --learned with which nothing is kept."""

_DEFAULT = TimerSettings()


def timer_options(command: _Command) -> _Command:
    """Gives a click command the flags of a timer service.

    It gets them as the keyword arguments `settings`, a TimerSettings, and `learned`, the path of the file in which
    is kept what was learned, or None.
    """

    @functools.wraps(command)
    def call(**arguments: Any) -> Any:
        take = arguments.pop
        settings = TimerSettings(
            reoffer_interval=take("reoffer_interval"),
            retention=take("expiry_retention"),
            max_timers_per_node=take("max_timers_per_node"),
            max_timers=take("max_timers"),
            max_nodes=take("max_nodes"),
            learn_warm_up=take("learn_warm_up"),
            learn_factor=take("learn_factor"),
            learn_least=take("learn_least"),
            max_scopes_per_run=take("max_scopes_per_run"),
            max_learned_runs=take("max_learned_runs"),
            learned_retention=take("learned_retention"),
            stall_after=take("stall_after") or None,
        )
        learned = take("learned")
        path = None if learned == NOTHING else Path(learned)
        return command(settings=settings, learned=path, **arguments)

    decorated: Callable[..., Any] = call
    for flag in reversed(_flags()):
        decorated = flag(decorated)
    return cast(_Command, decorated)


def _flags() -> list[Flag]:
    return [
        click.option(
            "--learned",
            cls=Setting,
            type=_File(),
            default="var/timer-learned.json",
            metavar="PATH",
            help='File in which is kept what runs have learned of how long their scopes take (after="auto"), or '
            f"{NOTHING} to forget it with the process.",
        ),
        count(
            "--learn-warm-up",
            _DEFAULT.learn_warm_up,
            "Completions of a scope, on all nodes of a run, before a timer that learns can run out. Higher guards "
            "later, lower judges by less.",
            most=10**9,
        ),
        click.option(
            "--learn-factor",
            cls=Setting,
            type=Finite(1, 1e6),
            default=_DEFAULT.learn_factor,
            metavar="FACTOR",
            help="A timer that learns runs out after so many times the longest completion. Lower finds hangs sooner, "
            "higher spares those that are only slow.",
        ),
        seconds(
            "--learn-least",
            _DEFAULT.learn_least,
            "The shortest duration that is learned. Lower finds hangs of short scopes sooner; a pause of the host "
            "must stay below it.",
            least=0.001,
        ),
        seconds(
            "--learned-retention",
            _DEFAULT.learned_retention,
            "How long what a run has learned is kept after the run's end, for its next start.",
        ),
        seconds(
            "--stall-after",
            _DEFAULT.stall_after or 0.0,
            "Report a run of which no worker has advanced for so long, if its agents don't say otherwise; 0: never. "
            "Nothing is killed for it.",
            least=0.0,
        ),
        seconds(
            "--reoffer-interval",
            _DEFAULT.reoffer_interval,
            "How long an expiry waits for its agent's acknowledgement before the agent is told again.",
            least=0.1,
        ),
        seconds(
            "--expiry-retention",
            _DEFAULT.retention,
            "How long an expiry that no agent has claimed, and a node without timers, are remembered.",
        ),
        count("--max-timers", _DEFAULT.max_timers, "Timers at a time. Each takes some 500 bytes."),
        count(
            "--max-timers-per-node",
            _DEFAULT.max_timers_per_node,
            "Timers of one node at a time, so that one run can't starve the others.",
        ),
        count("--max-nodes", _DEFAULT.max_nodes, "Nodes at a time, and gone ones until they are forgotten."),
        count(
            "--max-scopes-per-run",
            _DEFAULT.max_scopes_per_run,
            "Scopes of which one run may learn. Each takes some 500 bytes.",
        ),
        count(
            "--max-learned-runs",
            _DEFAULT.max_learned_runs,
            "Runs of which is kept what they learned. One more takes the place of the one that ended first.",
        ),
    ]


class _File(click.ParamType[str]):
    """The path of a file, or the word for none; not empty."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check."""
        if not str(value):
            self.fail(f"{str(value)!r} is no path; expected one, or {NOTHING}", param, ctx)
        return str(value)
