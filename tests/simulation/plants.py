"""Bugs to plant in the product: simulations must find each of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from rallypoint.agent.core import core as agent_core
from rallypoint.rendezvous.base.cooperative import LatestValue
from rallypoint.rendezvous.client import Membership
from rallypoint.rendezvous.core import apply, decide, facts, failures, snapshot
from rallypoint.rendezvous.core.state import LossReason, Phase, RunState
from rallypoint.rendezvous.journal.commit_loop import CommitLoop
from rallypoint.rendezvous.journal.journal import JournalError, Recovered
from rallypoint.rendezvous.runs import engine, recovery, runs
from rallypoint.rendezvous.runs.engine import RendezvousEngine
from rallypoint.rendezvous.runs.run import HostedRun, LeaseClock, Member
from rallypoint.rendezvous.store.service import StoreService
from rallypoint.rpc.clock import WatchClock
from rallypoint.rpc.errors import ServiceError, invalid
from rallypoint.serving.flow import UnopenedStreams
from support.replacing import instead_of

Plant = Callable[[pytest.MonkeyPatch], None]


def skip_the_fence(patch: pytest.MonkeyPatch) -> None:
    """A request with any lease is accepted for the node that it names, in the core and in the engine."""

    def lax(state: RunState, node_id: str, lease: int, token: bytes | None = None) -> None:
        if node_id not in state.nodes:
            original(state, node_id, lease)

    original = decide.check_lease
    patch.setattr(decide, "check_lease", lambda *_: None)
    patch.setattr(HostedRun, "holds_lease", lambda self, node_id, *_: node_id in self.state.nodes)
    patch.setattr(engine, "check_lease", lax)


def tell_before_commit(patch: pytest.MonkeyPatch) -> None:
    """Facts are published while the journal still writes them."""
    publish_before_commit(patch, RendezvousEngine)


def publish_before_commit(patch: pytest.MonkeyPatch, of: type[CommitLoop[Any]]) -> None:
    """The commit loop continues while the journal still writes."""

    async def rash(append: Any, entries: Any) -> None:
        asyncio.get_running_loop().create_task(append(entries))

    _append_with(patch, rash, of)


def take_a_failed_commit_for_durable(patch: pytest.MonkeyPatch) -> None:
    """The commit loop publishes a batch whose append failed."""

    async def deaf(append: Any, entries: Any) -> None:
        with suppress(JournalError):
            await append(entries)

    _append_with(patch, deaf)


def _append_with(patch: pytest.MonkeyPatch, wrong: Callable[..., Any], of: type[Any] = CommitLoop) -> None:

    @instead_of(patch, CommitLoop, "__init__")
    def wrongly(begin: Any, self: CommitLoop[Any], journal: Any, *args: Any, **more: Any) -> None:
        planted = SimpleNamespace(append=partial(wrong, journal.append))
        begin(self, planted if isinstance(self, of) else journal, *args, **more)


def forget_round_numbers_in_a_crash(patch: pytest.MonkeyPatch) -> None:
    """A restarted service counts the rounds from the beginning."""

    def forgetful(*args: Any) -> Any:
        found = yield from recover(*args)
        for run in found.runs.values():
            run.state.round = run.state.round if run.state.seats else 0
        return found

    recover = recovery.recover_runs
    patch.setattr(runs, "recover_runs", forgetful)


def forget_the_numbers_of_forgotten_runs(patch: pytest.MonkeyPatch) -> None:
    """A run that is created again after it was forgotten begins at revision 1: its last numbers are not kept."""
    patch.setattr(recovery.Numbers, "with_those", lambda self, other: self)


def reuse_the_number_of_a_burnt_round(patch: pytest.MonkeyPatch) -> None:
    """The number of a round that never became FINAL is used again for the next."""

    def thrifty(fold: Any, fact: facts.RoundEnded, state: RunState, now: float) -> None:
        burnt = state.phase is Phase.FROZEN
        fold(fact, state, now)
        state.round -= burnt

    _fold_with(patch, facts.RoundEnded, thrifty)


def _fold_with(patch: pytest.MonkeyPatch, kind: type[Any], wrong: Callable[..., None]) -> None:

    @instead_of(patch, apply, "_apply")
    def fold(right: Any, fact: object, state: RunState, now: float) -> None:
        if isinstance(fact, kind):
            wrong(right, fact, state, now)
        else:
            right(fact, state, now)


def reopen_over_nodes_that_are_there(patch: pytest.MonkeyPatch) -> None:
    """A closed run is opened again at once, even if its nodes still stop their workers."""

    @instead_of(patch, decide, "_reopen")
    def rash(reopen: Any, command: Any, state: RunState) -> Any:
        lingering, state.lingering = state.lingering, {}
        try:
            return reopen(command, state)
        finally:
            state.lingering = lingering


def count_rounds_from_the_beginning_when_reopened(patch: pytest.MonkeyPatch) -> None:
    """A run that is opened again starts at its first round number."""
    again = apply.reopened

    def forgetful(state: RunState, last: int) -> RunState:
        return replace(again(state, last), round=0)

    patch.setattr(apply, "reopened", forgetful)
    patch.setattr(snapshot, "reopened", forgetful)


def let_the_agents_of_an_ended_run_in(patch: pytest.MonkeyPatch) -> None:
    """An agent that lost its lease before its run was closed can open the run again, or join the next of that name."""
    patch.setattr(decide, "end_of", lambda state, incarnation: None)


def keep_the_restart_count_when_reopened(patch: pytest.MonkeyPatch) -> None:
    """A run that is opened again keeps its restart count."""
    again = apply.reopened

    def strict(state: RunState, last: int) -> RunState:
        return replace(again(state, last), restart_count=state.restart_count)

    patch.setattr(apply, "reopened", strict)
    patch.setattr(snapshot, "reopened", strict)


def keep_the_store_when_reopened(patch: pytest.MonkeyPatch) -> None:
    """A run that is opened again keeps the keys of its store."""
    patch.setattr(StoreService, "is_empty", lambda self, run_id: True)


def forget_lingering_nodes_in_a_crash(patch: pytest.MonkeyPatch) -> None:
    """A restarted service assumes that all nodes of a closed run have gone."""

    @instead_of(patch, apply, "restart_leases")
    def forgetful(restart: Any, state: RunState, now: float, *least: float) -> None:
        state.lingering.clear()
        restart(state, now, *least)


def forget_the_confirm_phase(patch: pytest.MonkeyPatch) -> None:
    """A round is FINAL as soon as it is FROZEN."""
    patch.setitem(decide._IN_PHASE, Phase.FROZEN, lambda state, now: facts.RoundFinalized(state.round))


def drop_the_last_record(patch: pytest.MonkeyPatch) -> None:
    """Recovery omits the last record."""

    def careless(recovered: Recovered, *args: Any) -> Any:
        return recover(replace(recovered, records=recovered.records[:-1]), *args)

    recover = recovery.recover_runs
    patch.setattr(runs, "recover_runs", careless)


def forget_restarts_in_a_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint omits the restart count."""

    def careless(taken: Any, *clocks: float) -> RunState:
        return restore(replace(taken, restart_count=0), *clocks)

    restore = snapshot.restore
    patch.setattr(recovery, "restore", careless)


def forget_that_a_start_is_recorded(patch: pytest.MonkeyPatch) -> None:
    """A checkpoint omits that the start of its round is recorded."""

    def careless(taken: Any, *clocks: float) -> RunState:
        return restore(replace(taken, start_recorded=False), *clocks)

    restore = snapshot.restore
    patch.setattr(recovery, "restore", careless)


def give_no_new_term_to_leases(patch: pytest.MonkeyPatch) -> None:
    """A restarted service does not extend leases for the time in which it was down."""

    @instead_of(patch, apply, "restart_leases")
    def strict(restart: Any, state: RunState, now: float, *least: float) -> None:
        restart(state, now, *least)
        state.lease_queue = []
        for node in state.nodes.values():
            node.lease_deadline = now + 0.3
            apply.enqueue(state, node)


def forgive_no_pause(patch: pytest.MonkeyPatch) -> None:
    """A service that was paused does not extend leases by the pause."""
    patch.setattr(WatchClock, "observe", lambda self, now, due: 0.0)


def lease_out_of_heartbeats(patch: pytest.MonkeyPatch) -> None:
    """Heartbeats do not renew leases."""
    patch.setattr(RendezvousEngine, "renew", lambda self, *_: None)


def never_lose_a_node(patch: pytest.MonkeyPatch) -> None:
    """A lease never expires."""
    patch.setattr(decide, "_expired_lease", lambda state, now: None)


def let_an_old_stream_end_the_new(patch: pytest.MonkeyPatch) -> None:
    """The end of a stream disconnects the node, even if a newer stream has replaced it."""

    @instead_of(patch, RendezvousEngine, "disconnect")
    def rash(disconnect: Any, self: RendezvousEngine, member: Member) -> None:
        run = self._runs.get(member.run_id)
        disconnect(self, run.members.get(member.node_id, member) if run is not None else member)


def keep_the_oldest_state(patch: pytest.MonkeyPatch) -> None:
    """A slow subscriber gets the oldest state that it has not taken, and none of the later ones."""

    @instead_of(patch, LatestValue, "put")
    def polite(put: Any, self: LatestValue[Any], value: Any) -> None:
        if self._value is None:
            put(self, value)


def tell_no_node_that_its_round_ended(patch: pytest.MonkeyPatch) -> None:
    """Nodes receive the next round, but not the end of their current one."""
    told = tuple(kind for kind in runs._SENT_TO_NODES if kind is not facts.RoundEnded)
    patch.setattr(runs, "_SENT_TO_NODES", told)


def send_nothing_again_on_a_new_stream(patch: pytest.MonkeyPatch) -> None:
    """Messages that were sent on a broken stream are not sent again on the next."""

    @instead_of(patch, Membership, "_live")
    async def forgetful(live: Any, self: Membership, *args: Any) -> None:
        self._latest = self._success = None
        self._failures.clear()
        await live(self, *args)


def keep_the_seat_of_a_superseded_lease(patch: pytest.MonkeyPatch) -> None:
    """A node that joins again under its name keeps the ranks of its old lease."""

    def careless(fold: Any, fact: facts.NodeLost, state: RunState, now: float) -> None:
        if fact.reason is LossReason.SUPERSEDED:
            del state.nodes[fact.node_id]
            state.departing.pop(fact.node_id, None)
        else:
            fold(fact, state, now)

    _fold_with(patch, facts.NodeLost, careless)


def one_token_for_all_rounds(patch: pytest.MonkeyPatch) -> None:
    """All rounds of a run have the same fencing token."""

    def constant(fold: Any, fact: facts.RoundFrozen, state: RunState, now: float) -> None:
        fold(fact, state, now)
        state.fencing_token = 1

    _fold_with(patch, facts.RoundFrozen, constant)


def open_the_store_to_every_round(patch: pytest.MonkeyPatch) -> None:
    """The store still accepts writes of the first round in later rounds."""

    @instead_of(patch, HostedRun, "keep_writable_round")
    def lax(keep: Any, self: HostedRun) -> None:
        keep(self)
        self.writable_round = min(self.writable_round or 0, 1)


def confirm_while_workers_stop(patch: pytest.MonkeyPatch) -> None:
    """An agent confirms a round as soon as it receives it."""

    @instead_of(patch, agent_core, "_next_step")
    def hasty(next_step: Any, state: agent_core.AgentState) -> Any:
        step = next_step(state)
        seat = state.assignment
        waits = step is None and seat is not None and state.phase is Phase.FROZEN
        if seat is not None and waits and state.confirmed != seat.round and not state.left:
            return replace(state, confirmed=seat.round), agent_core.SendConfirm(seat.round)
        return step


def blame_the_last_report(patch: pytest.MonkeyPatch) -> None:
    """The last report is recorded as the first failure."""

    @instead_of(patch, failures, "take")
    def hasty(take: Any, *args: Any, **more: Any) -> facts.WorkerFailed | None:
        fact = take(*args, **more)
        return None if fact is None else replace(fact, earliest=True)


def end_a_run_at_once(patch: pytest.MonkeyPatch) -> None:
    """The first report ends a run that has no restart left."""
    patch.setattr(failures, "is_settled", lambda state, now: True)


def restart_what_cant_be_mended(patch: pytest.MonkeyPatch) -> None:
    """The `permanent` flag of a worker's failure is ignored."""

    @instead_of(patch, apply, "_apply")
    def deaf(fold: Any, fact: object, state: RunState, now: float) -> None:
        fold(fact, state, now)
        state.permanent_failure = None


def let_a_node_fail_for_ever(patch: pytest.MonkeyPatch) -> None:
    """The restart budget of a node is never exhausted."""
    patch.setattr(failures, "_wears_out", lambda state, node_id: False)


def hold_nothing_back(patch: pytest.MonkeyPatch) -> None:
    """Failed rounds are restarted without a back-off."""
    patch.setattr(apply, "_keep_hold", lambda state, now: None)


def count_no_restart_in_its_window(patch: pytest.MonkeyPatch) -> None:
    """Restarts are never counted in the restart window."""
    patch.setattr(failures, "note", lambda state, round_, node_id, at: None)


def count_restarts_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Restarts never leave the restart window."""
    patch.setattr(failures, "forget_old", lambda state, now: None)
    patch.setattr(failures, "next_to_be_forgotten", lambda state: None)
    patch.setattr(snapshot, "forget_old", lambda state, now: None)


def keep_workers_of_a_lost_lease(patch: pytest.MonkeyPatch) -> None:
    """An agent whose lease ended does not stop its workers, and treats them as stopped."""

    @instead_of(patch, agent_core, "_note")
    def calm(note: Any, state: agent_core.AgentState, event: agent_core.Event) -> Any:
        if isinstance(event, agent_core.LeaseEnded):
            return replace(state, workers=agent_core.Workers.ABSENT, confirmed=0, started=0), []
        return note(state, event)


def refuse_a_late_first_message(patch: pytest.MonkeyPatch) -> None:
    """A stream whose first message comes late is refused as malformed."""

    @instead_of(patch, UnopenedStreams, "first")
    async def strict(first: Any, self: UnopenedStreams, requests: Any) -> Any:
        try:
            return await first(self, requests)
        except ServiceError:
            raise invalid("message", "expected join or resume") from None


def give_no_time_after_a_pause(patch: pytest.MonkeyPatch) -> None:
    """After a pause, a service gives nodes whose streams broke in the meantime only the usual grace to reconnect."""
    for module in (apply, decide):
        patch.setattr(module, "spared_until", lambda state: -math.inf)


def put_failures_to_the_clock_of_leases(patch: pytest.MonkeyPatch) -> None:
    """The age of a failure is measured by the lease clock, which leaves out pauses."""

    def forgiving(step: Callable[..., Any]) -> Callable[..., Any]:
        def carry_out(state: RunState, *args: Any) -> Any:
            state.forgiven = 0.0
            return step(state, *args)

        return carry_out

    for name in ("carry_out", "settle"):
        patch.setattr(runs, name, forgiving(getattr(runs, name)))


def take_commits_for_pauses(patch: pytest.MonkeyPatch) -> None:
    """The engine checks for pauses only between its steps, so that a long commit counts as a pause."""
    look, watch, patience = LeaseClock._check, LeaseClock.watch, LeaseClock.timeout

    def between_steps(self: LeaseClock, *, wanted: bool) -> None:
        look(self)
        watch(self, wanted=wanted)

    def short(self: LeaseClock, deadline: float | None) -> float | None:
        seconds = patience(self, deadline)
        return None if seconds is None else min(seconds, self._lag.pulse)

    patch.setattr(LeaseClock, "_check", lambda self: None)
    patch.setattr(LeaseClock, "watch", between_steps)
    patch.setattr(LeaseClock, "timeout", short)


_AGREE = "all live nodes agree on one FINAL round"
_ALONE = "trouble of the server alone"
_OVER = "nothing is written under a lease that is over"

# By plant: a pattern of the invariants that it breaks.
PLANTS: dict[Plant, str] = {
    skip_the_fence: f"workers run on a participant|holder|durable|{_AGREE}|whoever waits, waits|{_OVER}",
    tell_before_commit: "durable",
    take_a_failed_commit_for_durable: "durable",
    forget_round_numbers_in_a_crash: "a round number is never given out twice",
    forget_the_numbers_of_forgotten_runs: "a run that comes again goes on from its numbers|revisions are 1, 2, 3",
    reuse_the_number_of_a_burnt_round: "a round number is never given out twice",
    reopen_over_nodes_that_are_there: "no run is opened again while a node of it is there",
    count_rounds_from_the_beginning_when_reopened: "a round number is never given out twice",
    keep_the_store_when_reopened: "a run that is opened again has an empty store",
    forget_the_confirm_phase: "FINAL when every participant confirmed",
    drop_the_last_record: f"revisions are 1, 2, 3|no revision is forgotten|a lease that stands is honoured|{_ALONE}",
    forget_restarts_in_a_checkpoint: "restarts are counted",
    forget_that_a_start_is_recorded: f"the start of a round is recorded once|{_ALONE}",
    give_no_new_term_to_leases: _ALONE,
    forgive_no_pause: _ALONE,
    lease_out_of_heartbeats: f"{_ALONE}|forms a round|{_AGREE}",
    never_lose_a_node: f"{_AGREE}|whoever waits, waits",
    let_an_old_stream_end_the_new: f"{_AGREE}|told at once|left open by mistake",
    keep_the_oldest_state: f"{_AGREE}|told at once|forms a round",
    tell_no_node_that_its_round_ended: "told at once",
    send_nothing_again_on_a_new_stream: f"{_AGREE}|a run that is over ends",
    keep_the_seat_of_a_superseded_lease: "an assignment goes to the lease",
    one_token_for_all_rounds: "one fencing token per round",
    open_the_store_to_every_round: "the store takes nothing of a round that is over",
    confirm_while_workers_stop: "has no workers",
    blame_the_last_report: "the earliest failure is the first",
    end_a_run_at_once: "waits for what others have to report",
    restart_what_cant_be_mended: "no restart can mend",
    let_a_node_fail_for_ever: "the budget of a node is kept",
    hold_nothing_back: "held back where rounds fail soon",
    count_no_restart_in_its_window: "the budget of restarts is kept|the budget of a node is kept",
    count_restarts_for_ever: "no restart is left|the whole of its budget",
    refuse_a_late_first_message: "never answers INVALID_ARGUMENT",
    give_no_time_after_a_pause: _ALONE,
    put_failures_to_the_clock_of_leases: "the earliest failure is the first|for a round that a lost host ended",
    take_commits_for_pauses: f"ends in its time|{_ALONE}",
    keep_workers_of_a_lost_lease: "has no workers|workers of one round at a time",
}
