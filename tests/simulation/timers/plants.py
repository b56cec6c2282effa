"""Bugs to plant in the product: simulations of timers must find each of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rallypoint.agent.sockets.timer_tables import OpenTable, Tables
from rallypoint.agent.sockets.timers import TimerSocket
from rallypoint.rpc.clock import WatchClock
from rallypoint.timer.client.client import ExpiredTimer, NodeTimers
from rallypoint.timer.client.mirror import TimerMirror
from rallypoint.timer.core.core import TimerTable
from rallypoint.timer.core.countdown import Countdown
from rallypoint.timer.core.learning import Scope, ScopeBook
from rallypoint.timer.core.nodes import TimerNode
from rallypoint.timer.core.values import Subscription, TimerSettings
from simulation.plants import Plant, forgive_no_pause, refuse_a_late_first_message
from support.replacing import instead_of


def forget_to_register_again(patch: pytest.MonkeyPatch) -> None:
    """An agent assumes that its timers from the previous stream are known on a new stream."""

    def lazy(self: TimerMirror) -> None:
        self._gone.clear()
        self._acknowledged.clear()

    patch.setattr(TimerMirror, "restart", lazy)


def send_no_elapsed(patch: pytest.MonkeyPatch) -> None:
    """A timer that is sent again restarts from zero."""

    @instead_of(patch, TimerMirror, "take")
    def fresh(take: Any, self: TimerMirror, *args: Any) -> Any:
        actions = take(self, *args)
        for action in actions:
            if action.HasField("acquire"):
                action.acquire.ClearField("elapsed")
        return actions


def measure_elapsed_before_connecting(patch: pytest.MonkeyPatch) -> None:
    """The elapsed time of a timer is measured when the attempt to connect begins."""
    tell, now = NodeTimers._send, NodeTimers._changes

    async def hasty(self: NodeTimers, call: Any) -> None:
        early = [now(self)]
        self._changes = lambda: early.pop() if early else now(self)  # type: ignore[method-assign]
        await tell(self, call)

    patch.setattr(NodeTimers, "_send", hasty)


def obey_an_expiry_that_crossed_a_release(patch: pytest.MonkeyPatch) -> None:
    """An agent reaps every worker that the service reports, even if it has released the timer."""
    patch.setattr(NodeTimers, "holds", lambda self, expired: True)


def judge_without_a_look(patch: pytest.MonkeyPatch) -> None:
    """An agent reaps by its last read of the tables, without reading them again."""

    async def rash(self: TimerSocket, expired: ExpiredTimer) -> bool | None:
        async with self._judging.setdefault(expired.worker_id, asyncio.Lock()):
            if not self._timers.holds(expired):
                return None
            return await self._workers.reap(self._hang(expired))

    patch.setattr(TimerSocket, "_judge", rash)


def judge_two_at_once(patch: pytest.MonkeyPatch) -> None:
    """Two expired timers of a worker have it reaped twice."""

    @instead_of(patch, TimerSocket, "_judge")
    async def eager(judge: Any, self: TimerSocket, expired: ExpiredTimer) -> Any:
        self._judging.clear()
        return await judge(self, expired)


def acknowledge_before_it_is_dealt_with(patch: pytest.MonkeyPatch) -> None:
    """An expiry is acknowledged as soon as it arrives, before the reaping, which may fail."""

    @instead_of(patch, NodeTimers, "_handle")
    async def rash(handle: Any, self: NodeTimers, expired: ExpiredTimer) -> None:
        key = (expired.worker_id, expired.scope, expired.sequence)
        self._mirror.settle(*key, self._handling[key])
        self._batching.note()
        await handle(self, expired)


def take_a_failed_reaping_for_done(patch: pytest.MonkeyPatch) -> None:
    """A failed reaping is not retried."""

    @instead_of(patch, NodeTimers, "start")
    def begin(start: Any, self: NodeTimers, on_expired: Any, *args: Any) -> None:
        async def done(expired: ExpiredTimer) -> None:
            await on_expired(expired)

        start(self, done, *args)


def obey_though_our_host_was_paused(patch: pytest.MonkeyPatch) -> None:
    """An agent does not check by its own clock that a timer has expired."""
    patch.setattr(NodeTimers, "_ran_out", lambda self, expired: True)


def send_an_expiry_once(patch: pytest.MonkeyPatch) -> None:
    """An expiry that is not acknowledged is not sent again."""

    @instead_of(patch, TimerTable, "__init__")
    def once(begin: Any, self: TimerTable, now: float, settings: TimerSettings) -> None:
        begin(self, now, replace(settings, reoffer_interval=1e9))


def keep_expiries_from_a_new_stream(patch: pytest.MonkeyPatch) -> None:
    """Timers that expired while no agent was connected are not sent to the next agent."""

    def silent(self: Countdown, node: Any, now: float) -> None:
        self._queue.drop(node)

    patch.setattr(Countdown, "subscribed", silent)


def drop_registered_timers(patch: pytest.MonkeyPatch) -> None:
    """The end of a registration ends all timers of the node."""

    @instead_of(patch, TimerTable, "registered")
    def thorough(registered: Any, self: TimerTable, subscription: Subscription) -> None:
        registered(self, replace(subscription, number=subscription.number + 1))

    patch.setattr(
        "rallypoint.timer.core.nodes.Nodes.subscribed",
        lambda self, subscription: self.get(subscription.run_id, subscription.node_id),
    )


def keep_the_deadline_of_a_replaced_timer(patch: pytest.MonkeyPatch) -> None:
    """A timer that is acquired again keeps its former deadline."""

    def sticky(self: TimerMirror, worker_id: str, scope: str, after: float, since: float, *args: Any) -> None:
        former = self.find(worker_id, scope)
        if former is not None and former.after and after:
            since = former.since + former.after - after
        acquire(self, worker_id, scope, after, since, *args)

    acquire = TimerMirror.acquire
    patch.setattr(TimerMirror, "acquire", sticky)


def skip_the_last_look(patch: pytest.MonkeyPatch) -> None:
    """An agent does not read a table after the time until which its worker need not send a wake-up."""

    @instead_of(patch, OpenTable, "poll")
    def hasty(attend: Any, self: OpenTable) -> bool:
        return self._tables.clock() <= self._until and attend(self)


def count_a_table_again_after_a_reconnect(patch: pytest.MonkeyPatch) -> None:
    """A process that sends its table again is taken for a new one."""
    patch.setattr(Tables, "_remember", lambda self, worker_id, identity: {})


def send_completions_again_on_a_new_stream(patch: pytest.MonkeyPatch) -> None:
    """Completions that were sent are counted and sent again on a new stream."""

    @instead_of(patch, TimerMirror, "restart")
    def careful(restart: Any, self: TimerMirror) -> None:
        restart(self)
        for scope, seen in self._seen.items():
            seen.count += 1
            self._to_count[scope] = None


def add_the_counts_of_several_agents(patch: pytest.MonkeyPatch) -> None:
    """The counts that several agents report of the same completions are added."""
    patch.setattr(ScopeBook, "learn", ScopeBook.observe)


def ignore_the_warm_up(patch: pytest.MonkeyPatch) -> None:
    """One completion is enough to learn a timeout."""

    @instead_of(patch, ScopeBook, "__init__")
    def rash(begin: Any, self: ScopeBook[Any], settings: TimerSettings) -> None:
        begin(self, replace(settings, learn_warm_up=1))


def keep_the_first_learned_timeout(patch: pytest.MonkeyPatch) -> None:
    """A longer completion does not raise the learned timeout."""

    @instead_of(patch, ScopeBook, "_raise")
    def stubborn(grow: Any, self: ScopeBook[Any], scope: Scope[Any], *args: Any) -> Any:
        before = scope.after
        ripe = grow(self, scope, *args)
        scope.after = before if before is not None else scope.after
        return ripe


def compare_leases_of_all_lives(patch: pytest.MonkeyPatch) -> None:
    """A lease is superseded by any higher number, of any incarnation of the run."""
    patch.setattr(TimerNode, "began_again", lambda self, incarnation: False)


def give_up_when_refused(patch: pytest.MonkeyPatch) -> None:
    """An agent never retries after a refusal, not even with another lease."""

    @instead_of(patch, NodeTimers, "_rest")
    async def rest(wait: Any, self: NodeTimers, seconds: float) -> Any:
        if self.trouble.startswith(("FAILED_PRECONDITION", "ABORTED")):
            await asyncio.get_running_loop().create_future()
        return await wait(self, seconds)


def look_as_seldom_as_ever_after_a_pause(patch: pytest.MonkeyPatch) -> None:
    """The watch clock looks once a pulse, also right after a pause."""
    patch.setattr(WatchClock, "next_look", lambda self, now: now + self._settings.pulse)


_IN_VAIN = "nobody is reaped for a timer in time"
_NEVER = "who is late is reaped"
_UNGUARDED = "no agent gives up|who holds its lease is not refused"
_TWICE = "no completion is counted twice"

PLANTS: dict[Plant, str] = {
    forget_to_register_again: _NEVER,
    send_no_elapsed: _NEVER,
    measure_elapsed_before_connecting: _NEVER,
    obey_an_expiry_that_crossed_a_release: _IN_VAIN,
    judge_without_a_look: _IN_VAIN,
    judge_two_at_once: "one verdict at a time",
    acknowledge_before_it_is_dealt_with: f"{_NEVER}|no exception is left uncaught",
    take_a_failed_reaping_for_done: _NEVER,
    forgive_no_pause: _IN_VAIN,
    obey_though_our_host_was_paused: _IN_VAIN,
    send_an_expiry_once: _NEVER,
    keep_expiries_from_a_new_stream: _NEVER,
    drop_registered_timers: f"{_NEVER}|no exception is left uncaught",
    keep_the_deadline_of_a_replaced_timer: f"{_IN_VAIN}|{_NEVER}",
    skip_the_last_look: _NEVER,
    count_a_table_again_after_a_reconnect: _TWICE,
    send_completions_again_on_a_new_stream: _TWICE,
    add_the_counts_of_several_agents: _TWICE,
    ignore_the_warm_up: "nobody is reaped before enough was seen",
    compare_leases_of_all_lives: _UNGUARDED,
    give_up_when_refused: _UNGUARDED,
    refuse_a_late_first_message: "a service answers no INVALID_ARGUMENT",
    look_as_seldom_as_ever_after_a_pause: _IN_VAIN,
    keep_the_first_learned_timeout: "a learned duration is the factor times the longest",
}
"""By plant: a pattern of the invariants that it breaks."""
