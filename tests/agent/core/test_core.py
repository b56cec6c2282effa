"""The agent's decisions: workers run in agreed rounds only, never two groups at once, and every job ends."""

from __future__ import annotations

import inspect
import random
import sys
from collections import Counter
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from rallypoint.agent.core import core
from rallypoint.agent.core.core import AgentState, Workers, decide
from rallypoint.rendezvous.core.state import Phase

WHY = "node b was lost: its connection broke"


def seat(round_: int) -> core.Assignment:
    """The node's assignment in a round."""
    return core.Assignment(
        round=round_,
        group_rank=0,
        group_world_size=2,
        base_rank=0,
        world_size=4,
        base_role_rank=0,
        role_world_size=4,
        master_address="10.0.0.1",
        master_port=5000,
        fencing_token=100 + round_,
    )


def joinable(detail: str = WHY) -> core.RunUpdated:
    """An update: a round is being formed."""
    return core.RunUpdated(Phase.JOINABLE, detail=detail)


def frozen(round_: int) -> core.RunUpdated:
    """An update: a round waits for the confirmations of all its nodes."""
    return core.RunUpdated(Phase.FROZEN, seat(round_), detail=WHY)


def final(round_: int, restart_count: int = 0) -> core.RunUpdated:
    """An update: a round is final."""
    return core.RunUpdated(Phase.FINAL, seat(round_), restart_count, WHY)


CLOSED = core.RunUpdated(Phase.CLOSED)


def play(*events: core.Event, state: AgentState | None = None) -> tuple[AgentState, list[core.Effect]]:
    """Feed the events in turn; return the state after them, and the effects of the last."""
    effects: list[core.Effect] = []
    state = state or AgentState()
    for event in events:
        state, effects = decide(state, event)
    return state, effects


RUNNING, _ = play(frozen(1), final(1))


def test_a_round_is_confirmed_when_frozen_and_started_when_final() -> None:
    """A round has two steps: confirm that no old worker is alive, then start."""
    state, effects = play(frozen(1))
    assert effects == [core.SendConfirm(1)]
    state, effects = play(final(1, restart_count=3), state=state)
    assert effects == [core.StartWorkers(seat(1), 3)]
    assert state.workers is Workers.RUNNING


def test_a_repeated_update_has_no_effect() -> None:
    """Updates are states, not steps: an update without a difference has no effect."""
    assert play(frozen(1), frozen(1))[1] == []
    assert play(frozen(1), final(1), final(1))[1] == []


def test_a_final_round_that_was_never_confirmed_here_is_not_started() -> None:
    """Old workers may be alive on a node that has not confirmed."""
    assert play(final(1))[1] == []
    assert play(frozen(1), final(2))[1] == []


def test_a_spare_starts_nothing() -> None:
    """A spare waits, in all phases of the round."""
    assert play(core.RunUpdated(Phase.FROZEN), core.RunUpdated(Phase.FINAL))[1] == []


def test_a_new_round_stops_the_workers_and_is_confirmed_once_they_are_gone() -> None:
    """A confirmation means that no worker of an earlier round is alive."""
    state, effects = play(joinable(), state=RUNNING)
    assert effects == [core.StopWorkers(WHY)]
    state, effects = play(frozen(2), state=state)
    assert effects == []
    state, effects = play(core.GroupStopped(), state=state)
    assert effects == [core.SendConfirm(2)]
    assert play(final(2), state=state)[1] == [core.StartWorkers(seat(2), 0)]


def test_a_node_that_slept_through_the_joinable_phase_stops_all_the_same() -> None:
    """Only the latest state is sent: the next round may be frozen or final before a slow node receives an update."""
    assert play(frozen(2), state=RUNNING)[1] == [core.StopWorkers(WHY)]
    state, effects = play(final(2), state=RUNNING)
    assert effects == [core.StopWorkers(WHY)]
    assert play(core.GroupStopped(), state=state)[1] == []


def test_the_phases_of_the_round_that_runs_change_nothing() -> None:
    """A reconnect repeats the current state."""
    assert play(final(1), final(1), state=RUNNING) == (replace(RUNNING, detail=WHY), [])


def test_a_failure_is_reported_before_the_others_here_are_stopped() -> None:
    """All nodes are down until the report arrives."""
    _, effects = play(core.GroupFailed(), state=RUNNING)
    assert effects == [core.SendFailure(1), core.StopWorkers("a worker failed")]


def test_a_failure_that_the_end_of_its_round_has_overtaken_is_reported_all_the_same() -> None:
    """Another host reported its consequence first: without this report, that one is taken for the cause."""
    state, _ = play(joinable(), state=RUNNING)
    state, effects = play(core.GroupFailed(), state=state)
    assert effects == [core.SendFailure(1)]
    assert state.health is core.Health.SUSPECT


@pytest.mark.parametrize(
    "event",
    [
        core.StopRequested("got SIGTERM"),
        core.NodeUnhealthy("process 7 outlived SIGKILL"),
        core.LeaseEnded("it expired"),
        CLOSED,
        core.MembershipEnded(),
    ],
)
def test_a_failure_after_the_end_of_its_lease_or_run_is_ignored(event: core.Event) -> None:
    """A node that leaves must not cost the others a restart, and no other server would accept the report."""
    state, _ = play(event, state=RUNNING)
    assert play(core.GroupFailed(), state=state) == (state, [])


def test_a_failure_of_stopped_workers_is_ignored() -> None:
    """It would be attributed to a round that has not begun, or is forgotten."""
    state, _ = play(joinable(), core.GroupStopped(), state=RUNNING)
    assert play(core.GroupFailed(), state=state) == (state, [])


def test_after_a_failure_nothing_starts_before_the_next_round() -> None:
    """The round that failed is still the latest that the node has received."""
    assert play(core.GroupFailed(), core.GroupStopped(), final(1), state=RUNNING)[1] == []


def test_success_is_reported_and_the_node_waits_for_the_others() -> None:
    """The run closes when all nodes have succeeded."""
    state, effects = play(core.GroupSucceeded(), state=RUNNING)
    assert effects == [core.SendSuccess(1)]
    assert (state.workers, state.succeeded) == (Workers.ABSENT, 1)
    assert play(final(1), state=state)[1] == []


def test_workers_run_again_after_success_if_the_round_re_forms() -> None:
    """The workers of a lost node did not finish, and all ranks start together."""
    state, _ = play(core.GroupSucceeded(), joinable(), state=RUNNING)
    assert play(frozen(2), final(2), state=state)[1] == [core.StartWorkers(seat(2), 0)]


def test_leaving_departs_stops_then_leaves() -> None:
    """The others are informed at once; the lease is returned when no worker is alive."""
    state, effects = play(core.StopRequested("got SIGTERM"), state=RUNNING)
    assert effects == [core.SendDeparture("got SIGTERM"), core.StopWorkers("got SIGTERM")]
    state, effects = play(core.GroupStopped(), state=state)
    assert effects == [core.SendLeave("got SIGTERM")]
    state, effects = play(core.MembershipEnded(), state=state)
    assert effects == [core.Finish()]
    assert state.finished


def test_a_second_stop_request_changes_nothing() -> None:
    """A second request changes neither the reason nor the sequence."""
    assert play(core.StopRequested("a"), core.StopRequested("b"), state=RUNNING)[1] == []


def test_a_node_without_workers_leaves_at_once() -> None:
    """It has no workers to stop while it waits for a round."""
    assert play(core.StopRequested("got SIGINT"))[1] == [
        core.SendDeparture("got SIGINT"),
        core.SendLeave("got SIGINT"),
    ]


def test_a_node_that_leaves_takes_no_part_in_the_next_round() -> None:
    """The others would wait for it in vain."""
    state, _ = play(core.StopRequested("got SIGTERM"), core.GroupStopped(), state=RUNNING)
    assert play(frozen(2), final(2), state=state)[1] == []


def test_a_closed_run_stops_the_workers_and_ends_the_job() -> None:
    """The workers and the membership may end in either sequence."""
    state, effects = play(CLOSED, state=RUNNING)
    assert effects == [core.StopWorkers("the run is closed")]
    assert play(core.MembershipEnded(), core.GroupStopped(), state=state)[1] == [core.Finish()]
    assert play(core.GroupStopped(), core.MembershipEnded(), state=state)[1] == [core.Finish()]


def test_a_membership_that_ends_by_itself_stops_the_workers() -> None:
    """A refused node must not run on beside the others."""
    state, effects = play(core.MembershipEnded("another took its name"), state=RUNNING)
    assert effects == [core.StopWorkers("another took its name")]
    assert play(core.GroupStopped(), state=state)[1] == [core.Finish()]


def test_a_lost_lease_stops_the_workers_and_the_node_starts_over() -> None:
    """As a new member it has confirmed nothing, even if the round number is the same."""
    state, effects = play(core.LeaseEnded("no heartbeat for 15 s"), state=RUNNING)
    assert effects == [core.StopWorkers("no heartbeat for 15 s")]
    state, _ = play(core.GroupStopped(), state=state)
    assert play(frozen(1), state=state)[1] == [core.SendConfirm(1)]
    assert play(frozen(1), final(1), state=state)[1] == [core.StartWorkers(seat(1), 0)]


def test_nothing_happens_after_the_end() -> None:
    """A finished job stays finished."""
    state, _ = play(core.MembershipEnded())
    assert state.finished
    assert play(frozen(1), final(1), core.StopRequested("late"), state=state) == (state, [])


class Violation(AssertionError):
    """An invariant does not hold."""


class World:
    """A shell that carries out the effects of the core, and checks the invariants."""

    def __init__(self, decisions: ModuleType, seed: int) -> None:
        """Build a world; `decisions` is the core, or a broken copy."""
        self.core = decisions
        self.random = random.Random(seed)
        # Half of the hosts have health checks.
        self.checks = bool(seed % 2)
        self.state = decisions.AgentState(checks=self.checks)
        self.examining = self.warned = self.draining = False
        self.healthy_since = -1  # the last start of workers before which the host was found healthy
        self.running = 0  # the round of the living workers; 0: none
        self.stopping = False
        self.confirmed = 0
        self.departed = self.left = self.out = self.unfit = False
        self.succeeded = 0  # the round in which the workers here succeeded
        self.finished = 0
        self.done: Counter[str] = Counter()

    def next_event(self) -> Any:
        """Return the next event: half of the time a step of a normal round, else any possible event."""
        core, choose = self.core, self.random
        if self.running and choose.random() < 0.07:
            return core.DrainRequested("maintenance")
        if choose.random() < 0.5:
            if self.stopping:
                return core.GroupStopped()
            if self.examining:
                return core.HealthChecked()
            if self.confirmed and self.state.phase is Phase.FROZEN:
                return self.told(Phase.FINAL, self.confirmed)
            return self.told(Phase.FROZEN, self.confirmed + 1)
        return choose.choices(
            [
                self.told(Phase.FROZEN, choose.randint(1, 9)),
                self.told(Phase.FINAL, choose.choice([self.running, choose.randint(1, 9)])),
                self.told(Phase.JOINABLE),
                self.told(choose.choice([Phase.FROZEN, Phase.FINAL])),  # a spare's
                core.GroupStopped(),
                core.HealthChecked(),
                core.NodeUnhealthy("process 7 outlived SIGKILL"),
                core.GroupFailed(),
                core.GroupSucceeded(),
                core.LeaseEnded("it expired"),
                self.told(Phase.CLOSED),
                core.StopRequested("got SIGTERM"),
                core.DrainRequested("maintenance"),
                core.DrainOver("they had their time"),
                core.MembershipEnded(),
            ],
            weights=[4, 6, 4, 2, 4, 3, 0.8, 4, 5, 2, 0.7, 0.7, 0.4, 1, 0.7],
        )[0]

    def told(self, phase: Any, round_: int = 0) -> Any:
        """Return an update, with an assignment in a round if that is given."""
        place = self.core.Assignment(round_, 0, 2, 0, 4, 0, 4, "10.0.0.1", 5000, 7) if round_ else None
        passed = phase is Phase.FINAL and self.random.random() < 0.3
        settling = phase is Phase.FINAL and round_ == self.running
        return self.core.RunUpdated(phase, place, exit_barrier_passed=passed, settling=settling)

    def can_happen(self, event: Any) -> bool:
        """Return True if this event is possible now."""
        core = self.core
        if isinstance(event, core.GroupStopped):
            # A group that is stopped twice, as in a hurry, reports its end twice.
            return bool(self.stopping or (self.departed and not self.running))
        if isinstance(event, core.RunUpdated | core.LeaseEnded):
            return not self.out
        if isinstance(event, core.HealthChecked):
            return self.examining
        if isinstance(event, core.DrainOver):
            return self.draining
        if isinstance(event, core.NodeUnhealthy):
            # A process can outlive its kill only after a start, and until the end of all workers is confirmed.
            return bool(self.done["StartWorkers"] or self.examining)
        return True

    def happen(self, event: Any) -> None:
        """Apply an event, if it is possible now."""
        core = self.core
        if not self.can_happen(event):
            return
        if isinstance(event, core.GroupStopped):
            self.running, self.stopping = 0, False
        elif isinstance(event, core.GroupSucceeded) and self.running and not self.stopping:
            self.running = 0
        elif isinstance(event, core.LeaseEnded):
            self.confirmed = 0
        elif isinstance(event, core.MembershipEnded):
            self.out = True
        elif isinstance(event, core.HealthChecked):
            self.examining, self.healthy_since = False, self.done["StartWorkers"]
        elif isinstance(event, core.DrainRequested):
            self.draining = True
        elif isinstance(event, core.NodeUnhealthy):
            self.unfit = True
        self.state, effects = core.decide(self.state, event)
        for effect in effects:
            self.take(effect)
        self.check_answer(event, effects)

    def check_answer(self, event: Any, effects: list[Any]) -> None:
        """Check the effects of an event."""
        core = self.core
        kinds = [type(effect).__name__ for effect in effects]
        going = self.departed or self.left or self.out
        if isinstance(event, core.DrainOver):
            self.check(going, "stayed when all was done")
        if self.draining and not self.running and self.state.phase is not Phase.CLOSED:
            self.check(going, "waits for nothing")
        if "SendFailure" in kinds:
            self.check(self.out or not self.draining, "a restart used up by a node that goes")
            first = next(kind for kind in kinds if kind in ("SendFailure", "StopWorkers"))
            self.check(self.stopping and first == "SendFailure", "a failure reported late")

    def check(self, holds: bool, what: str) -> None:
        """Raise Violation if an invariant does not hold; `what` describes the violation."""
        if not holds:
            raise Violation(what)

    def take(self, effect: Any) -> None:
        """Carry an effect out, and check it against the previous ones."""
        kind = type(effect).__name__
        self.done[kind] += 1
        self.check(not self.finished, "something to do after the end")
        if kind in ("StartWorkers", "SendConfirm", "SendLeave", "Finish"):
            self.check(not self.running, f"{kind} while workers are alive")
        match kind:
            case "StartWorkers":
                self.check(
                    effect.assignment.round == self.confirmed, "a round started that was not confirmed"
                )
                self.check(not (self.departed or self.out), "workers started by a node that goes, or is out")
                self.check(not self.unfit, "workers started beside what can't be killed")
                self.running = effect.assignment.round
            case "WarnWorkers":
                self.check(self.draining and bool(self.running) and not self.stopping, "a warning to nobody")
                self.check(not self.warned, "warned twice")
                self.warned = True
            case "CheckHealth":
                self.check(self.checks and not self.running, "examined without need")
                self.check(not self.examining, "examined twice at once")
                self.examining = True
            case "StopWorkers":
                self.check(bool(self.running) and not self.stopping, "a stop of nothing")
                self.stopping = True
            case "CollectFailures":
                self.check(bool(self.running) and not self.stopping, "a look at nobody")
            case "SendConfirm":
                self.check(not self.unfit, "confirmed while something lives that can't be killed")
                found = self.healthy_since == self.done["StartWorkers"]
                self.check(found or not self.checks, "confirmed by a host that nobody has looked at")
                self.confirmed = effect.round
            case "SendSuccess":
                self.succeeded = effect.round
            case "SendDeparture":
                self.check(not self.departed, "departed twice")
                self.check(not self.left, "departed when it had left")
                self.departed = True
            case "SendLeave":
                self.check(not self.left, "left twice")
                self.check(self.departed or self.may_go(), "left without departing, or before it might")
                self.left = True
            case "Finish":
                self.check(self.out, "finished while still in the run")
                self.finished += 1

    def may_go(self) -> bool:
        """Return True if the exit barrier no longer keeps this node."""
        state = self.state
        seat = state.assignment
        let_go = state.exit_barrier_passed or self.draining
        done = let_go and seat is not None and self.succeeded == seat.round
        return done or state.phase is Phase.CLOSED

    def play(self) -> None:
        """Play a whole history, and then the end that every job must reach."""
        for _ in range(50):
            self.happen(self.next_event())
        self.happen(self.core.MembershipEnded())
        self.happen(self.core.GroupStopped())
        self.check(self.finished == 1 and self.state.finished, "no end")


HISTORIES = 1000


def play_histories(decisions: ModuleType) -> Counter[str]:
    """Play one history for each seed; return the number of effects of each kind."""
    done: Counter[str] = Counter()
    for seed in range(HISTORIES):
        world = World(decisions, seed)
        try:
            world.play()
        except Violation as violation:
            raise Violation(f"seed {seed}: {violation}") from None
        done += world.done
    return done


def test_the_invariants_hold_in_any_history_and_every_job_ends() -> None:
    """This holds for any sequence of updates and a shell that carries out all effects."""
    done = play_histories(core)
    # A check that no history reaches proves nothing.
    rare = {kind: count for kind, count in done.items() if count < HISTORIES / 10}
    assert not rare
    assert len(done) == len(core.Effect.__args__)


REVERSED = 'StopWorkers("a worker failed"), SendFailure(state.started)'
IF_OUT = "if state.out:\n        return state.detail"
LET_GO = "let_go = state.exit_barrier_passed or state.draining is not None"
ANY_ROUND = "let_go and state.succeeded != 0"
BUDGET = "if state.draining is not None and not _is_leaving(state):"
UNLESS_RUNNING = "if state.workers is not Workers.RUNNING:\n                return state, []\n            "


@pytest.mark.parametrize(
    ("whole", "broken", "seen"),
    [
        ("state.workers is not Workers.ABSENT:", "False:", "while workers are alive|without need"),
        ("        and state.confirmed == assignment.round\n", "", "not confirmed"),
        ("confirmed=0, started=0, succeeded=0", "succeeded=0", "not confirmed"),
        ('SendFailure(state.started), StopWorkers("a worker failed")', REVERSED, "reported late"),
        ("[SendDeparture(detail)]", "[]", "without departing"),
        ("case StopRequested() if not _is_leaving(state):", "case StopRequested():", "departed"),
        ("case DrainOver() if not _is_leaving(state) and", "case DrainOver() if", "departed"),
        ("is not None or state.left or state.out\n", "is not None or state.out\n", "when it had left"),
        (LET_GO, "let_go = True", "before it might"),
        (
            "let_go and assignment is not None and state.succeeded == assignment.round",
            ANY_ROUND,
            "before it might",
        ),
        (IF_OUT, IF_OUT.replace("state.out", "False"), "no end"),
        (UNLESS_RUNNING + "done", "done", "while workers are alive|without need"),
        ("unhealthy = state.unhealthy is not None and not", "unhealthy = False and not", "can't be killed"),
        ("unhealthy = replace(state, unhealthy=event.detail)", "unhealthy = state", "can't be killed"),
        (
            "if _is_leaving(state):\n        return unhealthy",
            "if state.out:\n        return unhealthy",
            "departed",
        ),
        (
            "and state.confirmed != assignment.round and fit:",
            "and state.confirmed != assignment.round:",
            "nobody has looked",
        ),
        ("if state.checks and", "if", "examined without need"),
        (BUDGET, "if False:", "a restart used up"),
        ("if state.draining is not None and _has_drained", "if False and _has_drained", "waits for nothing"),
        ("if state.workers is Workers.RUNNING else []", "if True else []", "a warning to nobody"),
        ("not _is_leaving(state) and state.draining is None:", "not _is_leaving(state):", "warned twice"),
    ],
)
def test_a_broken_core_is_caught(monkeypatch: pytest.MonkeyPatch, whole: str, broken: str, seen: str) -> None:
    """The checks are worth nothing if they can't distinguish a broken core from a correct one."""
    mutant = ModuleType("mutant")
    monkeypatch.setitem(sys.modules, "mutant", mutant)
    source = inspect.getsource(core)
    assert whole in source
    exec(source.replace(whole, broken), mutant.__dict__)  # noqa: S102 (a copy of ours, broken on purpose)
    with pytest.raises(Violation, match=seen):
        play_histories(mutant)


# ---- the exit barrier


def test_past_the_exit_barrier_a_node_that_succeeded_leaves() -> None:
    """It waits as long as the barrier holds, and then leaves normally."""
    state, effects = play(core.GroupSucceeded(), final(1), state=RUNNING)
    assert effects == []
    state, effects = play(replace(final(1), exit_barrier_passed=True), state=state)
    assert effects == [core.SendLeave("its workers succeeded, and the exit barrier is over")]
    state, effects = play(joinable(), frozen(2), state=state)
    assert effects == []  # it has left; the server sent this update before it received that
    _, effects = play(core.MembershipEnded(), state=state)
    assert effects == [core.Finish()]


def test_a_passed_exit_barrier_does_not_stop_running_workers() -> None:
    """A node with running workers goes on, and leaves once they have succeeded."""
    state, effects = play(replace(final(1), exit_barrier_passed=True), state=RUNNING)
    assert effects == []
    _, effects = play(core.GroupSucceeded(), state=state)
    assert effects == [
        core.SendSuccess(1),
        core.SendLeave("its workers succeeded, and the exit barrier is over"),
    ]


def test_a_node_that_left_past_the_exit_barrier_leaves_only_once() -> None:
    """A signal after that would only withdraw the report of its success."""
    state, _ = play(core.GroupSucceeded(), replace(final(1), exit_barrier_passed=True), state=RUNNING)
    assert state.left
    after, effects = play(core.StopRequested("got SIGTERM"), state=state)
    assert (effects, after.leaving) == ([], None)


def test_an_exit_barrier_of_another_round_releases_no_node() -> None:
    """The work of the round before has to be done again."""
    state, _ = play(core.GroupSucceeded(), joinable(), frozen(2), state=RUNNING)
    _, effects = play(replace(final(2), exit_barrier_passed=True), state=state)
    assert effects == [core.StartWorkers(seat(2), 0)]


# ---- a host on which a process outlives SIGKILL

UNFIT = core.NodeUnhealthy("process 7 outlived SIGKILL")


def test_a_worker_that_outlives_its_kill_is_reported_and_the_node_leaves() -> None:
    """The failure and the departure are reported before the remaining workers here are stopped."""
    state, effects = play(core.GroupFailed(), state=RUNNING)
    assert effects == [core.SendFailure(1), core.StopWorkers("a worker failed")]
    state, effects = play(UNFIT, state=state)
    assert effects == [core.SendDeparture(UNFIT.detail)]
    state, effects = play(joinable(), frozen(2), core.GroupStopped(), state=state)
    assert effects == [core.SendLeave(UNFIT.detail)]
    state, effects = play(core.MembershipEnded(), state=state)
    assert (effects, state.finished, state.unhealthy) == ([core.Finish()], True, UNFIT.detail)


def test_a_process_that_outlives_a_stop_makes_the_node_leave_too() -> None:
    """The next round is never confirmed beside it, although it is frozen already."""
    state, effects = play(joinable(), frozen(2), UNFIT, state=RUNNING)
    assert effects == [core.SendDeparture(UNFIT.detail)]
    assert play(core.GroupStopped(), state=state)[1] == [core.SendLeave(UNFIT.detail)]


def test_workers_beside_an_unkillable_process_are_stopped() -> None:
    """The process is found before any worker has failed."""
    assert play(UNFIT, state=RUNNING)[1] == [core.SendDeparture(UNFIT.detail), core.StopWorkers(UNFIT.detail)]


def test_an_unkillable_process_is_reported_once() -> None:
    """Both the kill and the stop find it."""
    state, _ = play(core.GroupFailed(), UNFIT, state=RUNNING)
    assert play(UNFIT, core.NodeUnhealthy("another"), state=state) == (state, [])


def test_success_stands_with_processes_left_behind() -> None:
    """A node that left then would cost the others a round; a run that has ended stays ended."""
    state, effects = play(core.GroupSucceeded(), UNFIT, state=RUNNING)
    assert effects == []
    closed, effects = play(final(1), CLOSED, state=state)
    assert effects == [core.SendLeave("the run is closed, and no worker is left here")]
    assert play(core.MembershipEnded(), state=closed)[1] == [core.Finish()]
    assert play(CLOSED, core.MembershipEnded(), state=state)[1] == [core.Finish()]
    barrier = replace(final(1), exit_barrier_passed=True)
    assert play(barrier, state=state)[1] == [
        core.SendLeave("its workers succeeded, and the exit barrier is over")
    ]


@pytest.mark.parametrize("event", [joinable(), frozen(2), final(2), core.LeaseEnded("it expired")])
def test_after_success_an_unhealthy_node_leaves_if_the_round_re_forms(event: core.Event) -> None:
    """The round re-forms without this host, because a node was lost."""
    state, _ = play(core.GroupSucceeded(), UNFIT, state=RUNNING)
    assert play(event, state=state)[1] == [core.SendDeparture(UNFIT.detail), core.SendLeave(UNFIT.detail)]


def test_a_leaving_node_only_records_that_it_is_unhealthy() -> None:
    """The exit code shows it to the caller; the run receives one reason."""
    leaving, _ = play(core.StopRequested("got SIGTERM"), state=RUNNING)
    state, effects = play(UNFIT, state=leaving)
    assert (effects, state.leaving, state.unhealthy) == ([], "got SIGTERM", UNFIT.detail)
    assert play(core.GroupStopped(), state=state)[1] == [core.SendLeave("got SIGTERM")]


def test_an_unhealthy_node_outside_the_run_reports_nothing() -> None:
    """The node has no connection left to report it."""
    out, _ = play(CLOSED, core.MembershipEnded(), state=RUNNING)
    state, effects = play(UNFIT, core.GroupStopped(), state=out)
    assert (effects, state.unhealthy) == ([core.Finish()], UNFIT.detail)
