"""Options of `serve rendezvous`: limits of the service and of each run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from rallypoint.cli.values import Flag, count, seconds, size
from rallypoint.rendezvous.base.limits import Limits, RendezvousLimits, StateLimits, StoreLimits
from rallypoint.rendezvous.core.state import MOST_NODES
from rallypoint.serving.options import Finite, Setting
from rallypoint.timer.core.values import TimerSettings

_Command = TypeVar("_Command", bound=Callable[..., Any])


_DEFAULT = Limits()


def limit_options(command: _Command) -> _Command:
    """Add the flags of all limits to a command, which gets them as the argument `limits`, a Limits."""

    @functools.wraps(command)
    def call(**arguments: Any) -> Any:
        take = arguments.pop
        limits = Limits(
            RendezvousLimits(
                runs=take("max_runs"),
                runs_per_client=take("max_runs_per_client"),
                nodes_per_run=take("max_nodes_per_run"),
                subscribers_per_run=take("max_subscribers_per_run"),
                events_per_run=take("max_events_per_run"),
                event_bytes_per_run=take("max_event_bytes_per_run"),
                event_bytes=take("max_event_bytes"),
                run_ttl=take("run_ttl"),
                messages_per_second=take("message_rate"),
                message_burst=take("message_burst"),
            ),
            StoreLimits(
                all_bytes=take("max_store_bytes"),
                client_bytes=take("max_store_bytes_per_client"),
                run_bytes=take("max_store_bytes_per_run"),
                run_keys=take("max_store_keys_per_run"),
                waiters=take("max_store_waiters_per_run"),
                waited_keys=take("max_store_waited_keys_per_run"),
                queued_bytes=take("max_store_queued_bytes_per_run"),
            ),
            StateLimits(
                states=take("max_states"),
                states_per_client=take("max_states_per_client"),
                state_bytes=take("max_state_bytes"),
                client_bytes=take("max_state_bytes_per_client"),
                queued_bytes=take("max_state_queued_bytes"),
                watchers=take("max_state_watchers"),
            ),
            take("state_ttl"),
        )
        return command(limits=limits, **arguments)

    decorated: Callable[..., Any] = call
    for flag in reversed(_flags()):
        decorated = flag(decorated)
    return cast(_Command, decorated)


def _flags() -> list[Flag]:
    rendezvous, store, state = _DEFAULT.rendezvous, _DEFAULT.store, _DEFAULT.state
    return [
        count(
            "--max-runs",
            rendezvous.runs,
            "Number of runs, ended ones included until they expire. Each takes some 10 KB.",
        ),
        count(
            "--max-runs-per-client",
            rendezvous.runs_per_client,
            "Number of them that one client has created: a name in a token, or in a certificate under a policy, else a "
            "host. Lower: a client leaves more room for others.",
        ),
        count(
            "--max-nodes-per-run",
            rendezvous.nodes_per_run,
            "Number of nodes of a run, spares included. Each takes some 40 KB.",
            most=MOST_NODES,
        ),
        count(
            "--max-subscribers-per-run",
            rendezvous.subscribers_per_run,
            "Number of streams that watch a run or its events. Each change is sent to all of them.",
        ),
        count(
            "--max-events-per-run",
            rendezvous.events_per_run,
            "Number of events of a run that are kept, in memory. Two rounds of 8,000 nodes have 32,000.",
        ),
        size("--max-event-bytes-per-run", rendezvous.event_bytes_per_run, "Bytes of the events of a run."),
        size("--max-event-bytes", rendezvous.event_bytes, "Bytes of the events of all runs, in memory."),
        seconds(
            "--run-ttl",
            rendezvous.run_ttl,
            "How long a run without nodes is kept. Longer lets a job come back later, and keeps more runs.",
        ),
        click.option(
            "--message-rate",
            cls=Setting,
            type=Finite(1, 1e9),
            default=rendezvous.messages_per_second,
            metavar="N",
            help="Messages per second that a node may send on its stream; a node that sends more is disconnected. An "
            "agent sends a heartbeat every 5 s.",
        ),
        count(
            "--message-burst",
            rendezvous.message_burst,
            "Messages that a node may send on its stream at once.",
        ),
        size(
            "--max-store-bytes",
            store.all_bytes,
            "Bytes of keys and values in the stores of all runs, in memory and on disk.",
        ),
        size(
            "--max-store-bytes-per-client",
            store.client_bytes,
            "Bytes in the stores of the runs that one client has created.",
        ),
        size(
            "--max-store-bytes-per-run",
            store.run_bytes,
            "Maximum bytes of keys and values in a run's store, in memory and on disk.",
        ),
        count(
            "--max-store-keys-per-run",
            store.run_keys,
            "Number of keys in a run's store. A million take 4 s to recover.",
        ),
        count(
            "--max-store-waiters-per-run",
            store.waiters,
            "Number of requests that wait for keys of a run. Each is an open call of some 10 KB.",
        ),
        count(
            "--max-store-waited-keys-per-run",
            store.waited_keys,
            "Number of keys in all waiting requests of a run together. Each takes some 200 bytes.",
        ),
        size(
            "--max-store-queued-bytes-per-run",
            store.queued_bytes,
            "Writes of a run that wait for a commit. Higher: a slow disk uses more memory; lower: bursts are refused.",
        ),
        count("--max-states", state.states, "Number of runs that have a fenced state."),
        count(
            "--max-states-per-client", state.states_per_client, "Number of them that one client has created."
        ),
        size("--max-state-bytes", state.state_bytes, "Bytes of all fenced states, in memory and on disk."),
        size(
            "--max-state-bytes-per-client", state.client_bytes, "Bytes of those that one client has created."
        ),
        size(
            "--max-state-queued-bytes",
            state.queued_bytes,
            "Fenced states that wait for a commit. Higher: a slow disk uses more memory; lower: bursts are refused.",
        ),
        count(
            "--max-state-watchers",
            state.watchers,
            "Number of streams that watch a fenced state. Each takes some 40 KB.",
        ),
        seconds(
            "--state-ttl",
            _DEFAULT.state_ttl,
            "How long a fenced state is kept without a read, write or watcher. Longer keeps more of them.",
        ),
    ]


# ---- Options of `serve timer`: learning, reports, and limits.


NOTHING = "none"
"""The value of --learned with which nothing is stored."""

_TIMER_DEFAULT = TimerSettings()


def timer_options(command: _Command) -> _Command:
    """Add the flags of a timer service to a command.

    The command gets the arguments `settings`, a TimerSettings, and `learned`, the path of the file for learned
    timeouts, or None.
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
    for flag in reversed(_timer_flags()):
        decorated = flag(decorated)
    return cast(_Command, decorated)


def _timer_flags() -> list[Flag]:
    return [
        click.option(
            "--learned",
            cls=Setting,
            type=_File(),
            default="var/timer-learned.json",
            metavar="PATH",
            help='File for learned timeouts of scopes (after="auto"), or '
            f"{NOTHING} to lose them with the process.",
        ),
        count(
            "--learn-warm-up",
            _TIMER_DEFAULT.learn_warm_up,
            "Completions of a scope, on all nodes of a run, before a learning timer can expire. Higher: watched later; "
            "lower: learned from fewer samples.",
            most=10**9,
        ),
        click.option(
            "--learn-factor",
            cls=Setting,
            type=Finite(1, 1e6),
            default=_TIMER_DEFAULT.learn_factor,
            metavar="FACTOR",
            help="A learned timeout is this many times the longest completion. Lower: hangs are found sooner; higher: "
            "slow workers are spared.",
        ),
        seconds(
            "--learn-least",
            _TIMER_DEFAULT.learn_least,
            "Shortest learned timeout. Lower: hangs of short scopes are found sooner; a pause of the host must stay "
            "below it.",
            least=0.001,
        ),
        seconds(
            "--learned-retention",
            _TIMER_DEFAULT.learned_retention,
            "How long the learned timeouts of a run are kept after its end, for its next start.",
        ),
        seconds(
            "--stall-after",
            _TIMER_DEFAULT.stall_after or 0.0,
            "Report a run as stalled if no worker has advanced for this long, unless its agents set another time; 0: "
            "never. No worker is killed for it.",
            least=0.0,
        ),
        seconds(
            "--reoffer-interval",
            _TIMER_DEFAULT.reoffer_interval,
            "Time to wait for an agent to acknowledge an expired timer before it is sent again.",
            least=0.1,
        ),
        seconds(
            "--expiry-retention",
            _TIMER_DEFAULT.retention,
            "How long an expired timer that no agent has claimed, and a node without timers, are kept.",
        ),
        count("--max-timers", _TIMER_DEFAULT.max_timers, "Number of timers. Each takes some 500 bytes."),
        count(
            "--max-timers-per-node",
            _TIMER_DEFAULT.max_timers_per_node,
            "Number of timers of a node, so that one run can't starve the others.",
        ),
        count(
            "--max-nodes",
            _TIMER_DEFAULT.max_nodes,
            "Number of nodes, gone ones included until they are forgotten.",
        ),
        count(
            "--max-scopes-per-run",
            _TIMER_DEFAULT.max_scopes_per_run,
            "Number of learning scopes of a run. Each takes some 500 bytes.",
        ),
        count(
            "--max-learned-runs",
            _TIMER_DEFAULT.max_learned_runs,
            "Number of runs with learned timeouts. One more replaces the run that ended first.",
        ),
    ]


class _File(click.ParamType[str]):
    """The path of a file, or the word for none; not empty."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the value."""
        if not str(value):
            self.fail(f"{str(value)!r} is not a path; expected one, or {NOTHING}", param, ctx)
        return str(value)
