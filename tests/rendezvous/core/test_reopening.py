"""A join reopens a closed run: the conditions, the nodes that may do it, and the state that is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rallypoint.rendezvous.core import commands, facts
from rallypoint.rendezvous.core.apply import apply, disconnect, renew, restart_leases
from rallypoint.rendezvous.core.commands import NodeIsEvicted, RunIsClosed, RunIsEnding, RunNotFound
from rallypoint.rendezvous.core.decide import check_lease, next_deadline
from rallypoint.rendezvous.core.snapshot import restore, take_reopened, take_snapshot
from rallypoint.rendezvous.core.state import Eviction, Outcome, Phase, Reopen, RunSettings
from rendezvous.core.scripted_run import ScriptedRun


def closed(outcome: Outcome = Outcome.FAILED, **settings: object) -> ScriptedRun:
    """Return a run of the nodes a and b that came to this end in its first round."""
    run = ScriptedRun(2, 2, **settings)
    run.start("a", "b")
    run.state.incarnation = "first"
    match outcome:
        case Outcome.SUCCEEDED:
            run.succeed("a", "b")
        case Outcome.FAILED:
            run.fail("a", permanent=True)
            run.later(1)
        case Outcome.CANCELLED:
            run.do(commands.Close("enough"))
    assert run.state.run_end is not None
    assert run.state.run_end.outcome is outcome
    return run


def join(run: ScriptedRun, node_id: str = "a", incarnation: str = "second", **more: Any) -> list[facts.Fact]:
    command = commands.Join(
        node_id, run.settings, f"{node_id}.cluster", 1, "trainer", incarnation=incarnation, **more
    )
    return run.do(command)


def leave(run: ScriptedRun, *node_ids: str) -> None:
    """Let nodes of the closed run leave, after they have stopped their workers."""
    for node_id in node_ids:
        assert run.do(commands.Leave(node_id, run.state.lingering[node_id].lease, "no worker is left")) == []


@pytest.mark.parametrize(
    ("outcome", "reopen", "opens"),
    [
        (Outcome.FAILED, Reopen.FAILED, True),
        (Outcome.CANCELLED, Reopen.FAILED, True),
        (Outcome.SUCCEEDED, Reopen.FAILED, False),
        (Outcome.FAILED, Reopen.NEVER, False),
        (Outcome.CANCELLED, Reopen.NEVER, False),
        (Outcome.SUCCEEDED, Reopen.ALWAYS, True),
    ],
)
def test_the_setting_of_the_run_decides(outcome: Outcome, reopen: Reopen, *, opens: bool) -> None:
    """Not that of the joining node, which becomes the setting of the next incarnation."""
    run = closed(outcome, reopen=reopen)
    leave(run, "a", "b")
    run.settings = replace(run.settings, reopen=Reopen.ALWAYS if reopen is Reopen.NEVER else Reopen.NEVER)
    if opens:
        join(run)
        assert (run.phase, run.state.settings) == (Phase.JOINABLE, run.settings)
        assert run.state.incarnation not in ("", "first")
    else:
        with pytest.raises(RunIsClosed, match=outcome.name):
            join(run)


def test_failed_is_the_default() -> None:
    """A scheduler that requeues a job starts it under the same name."""
    assert RunSettings().reopen is Reopen.FAILED


def test_numbers_continue() -> None:
    """Rounds, revisions, leases and fencing tokens of the later incarnation are above all of the earlier one."""
    run = closed()
    round_, revision, token = run.round, run.state.revision, run.state.fencing_token
    leave(run, "a", "b")
    assert [type(each) for each in join(run)] == [facts.RunCreated, facts.NodeJoined]
    assert run.lease("a") == run.state.revision == revision + 2
    run.join("b")
    run.run_round()
    assert run.round == round_ + 1
    assert run.state.fencing_token > revision > token > 0


def test_budgets_begin_again() -> None:
    """Restarts of the run and of nodes, back-off, probation, and evictions by the service, which enforced them."""
    run = ScriptedRun(1, 2, max_restarts=2, max_restarts_per_node=1, restart_backoff=30.0)
    run.start("a", "b")
    run.fail("a")
    run.run_round()
    run.fail("a")
    run.later(1)
    assert run.state.evicted["a"].by_service
    run.do(commands.Evict("c", "its disk is broken"))
    run.do(commands.Close("enough"))
    run.later(15)
    join(run)
    state = run.state
    assert (state.restart_count, state.restarts, state.quick_restarts) == (0, [], 0)
    assert (state.last_round_end, state.run_end, state.former_size) == (None, None, 0)
    assert (state.newcomers, state.former_ranks, state.failure) == (set(), {}, None)
    assert list(state.evicted) == ["c"]


def test_a_node_that_an_operator_evicted_opens_nothing() -> None:
    """It may once it is readmitted, also while the run is closed."""
    run = closed(Outcome.CANCELLED)
    run.state.evicted["a"] = Eviction("its disk is broken")
    leave(run, "a", "b")
    with pytest.raises(NodeIsEvicted):
        join(run)
    assert run.state.run_end is not None
    run.do(commands.Readmit("a", "repaired"))
    join(run)
    assert run.phase is Phase.JOINABLE


class TestNodesThatLinger:
    """The run can be reopened when the last node that was in it at its end has gone."""

    def test_it_waits_for_each(self) -> None:
        """Their workers may be alive."""
        run = closed()
        for gone in ((), ("a",)):
            leave(run, *gone)
            with pytest.raises(RunIsEnding, match="did not leave yet: the run can be opened again"):
                join(run)
        leave(run, "b")
        join(run)

    def test_one_that_is_silent_is_gone_with_its_lease(self) -> None:
        """And one that sends heartbeats stays, for as long as it does."""
        run = closed()
        for _ in range(3):
            run.later(10)
            renew(run.state, "b", run.now)
            with pytest.raises(RunIsEnding) as caught:
                join(run)
        assert caught.value.node_ids == ("b",)
        assert next_deadline(run.state) is not None
        run.later(15)
        join(run)

    def test_one_whose_stream_broke_has_its_grace(self) -> None:
        """As in a run that is open."""
        run = closed(disconnect_grace=2.0)
        leave(run, "b")
        disconnect(run.state, "a", run.now)
        run.later(1.9)
        with pytest.raises(RunIsEnding):
            join(run)
        run.later(0.2)
        join(run)

    def test_they_have_no_rights(self) -> None:
        """They can only leave."""
        run = closed()
        lease = run.state.lingering["a"].lease
        with pytest.raises(RunIsClosed):
            check_lease(run.state, "a", lease)
        for command in (
            commands.Confirm("a", lease, 1, 1),
            commands.ReportSuccess("a", lease, 1),
            commands.ReportFailure("a", lease, run.failure("a")),
            commands.Depart("a", lease, "bye"),
            commands.Leave("a", lease + 1, "bye"),
        ):
            with pytest.raises(RunIsClosed):
                run.do(command)
        assert run.state.nodes == {}

    @pytest.mark.parametrize("by", ["records", "snapshot"])
    def test_a_server_that_starts_again_waits_for_them_too(self, by: str) -> None:
        """It does not know which of them have gone: each gets a full term."""
        run = closed()
        if by == "records":
            again = type(run.state)("run")
            for fact in run.facts:
                apply(again, fact, run.now)
        else:
            again = restore(take_snapshot(run.state), run.now)
        restart_leases(again, run.now)
        run.state = again
        with pytest.raises(RunIsEnding):
            join(run)
        run.later(15)
        join(run)


class TestFence:
    """Nothing of an earlier incarnation is accepted in a later one."""

    def reopened(self) -> tuple[ScriptedRun, int]:
        """Return a run that node b reopened, and the previous lease of node a."""
        run = closed(Outcome.CANCELLED)
        lease = run.state.lingering["a"].lease
        leave(run, "a", "b")
        join(run, "b")
        return run, lease

    @pytest.mark.parametrize("is_back", [False, True])
    def test_a_lease(self, *, is_back: bool) -> None:
        """The refusal has the end of its own run, and does not blame another agent of its name."""
        run, lease = self.reopened()
        if is_back:
            join(run, "a")
        for command in (
            commands.Confirm("a", lease, run.round, 1),
            commands.ReportFailure("a", lease, run.failure("a")),
            commands.ReportSuccess("a", lease, run.round),
            commands.Depart("a", lease, "bye"),
            commands.Leave("a", lease, "bye"),
        ):
            revision = run.state.revision
            with pytest.raises(RunIsClosed, match="CANCELLED"):
                run.do(command)
            assert run.state.revision == revision
        with pytest.raises(RunIsClosed):
            check_lease(run.state, "a", lease)

    def test_an_agent_that_had_lost_its_lease(self) -> None:
        """It neither opens the run in which it was, nor joins the one after it."""
        run = closed()
        run.later(15)
        with pytest.raises(RunIsClosed, match="FAILED"):
            join(run, "c", former_incarnation="first")
        join(run, "b")
        with pytest.raises(RunIsClosed, match="FAILED"):
            join(run, "c", former_incarnation="first")
        join(run, "c", former_incarnation="of a run that nobody remembers")

    def test_a_close(self) -> None:
        """A close of the earlier incarnation finds it closed."""
        run, _ = self.reopened()
        assert run.do(commands.Close("late", "first")) == []
        with pytest.raises(RunNotFound):
            run.do(commands.Close("late", "unknown"))
        assert run.state.run_end is None
        run.do(commands.Close("in time", run.state.incarnation))
        assert run.phase is Phase.CLOSED

    def test_over_many_incarnations(self) -> None:
        """Each lease belongs to its own."""
        run, first = self.reopened()
        run.do(commands.Close("enough"))
        second = run.state.lingering["b"].lease
        leave(run, "b")
        join(run, "c", incarnation="third")
        assert [run.state.ended_before(lease) for lease in (first, second, run.lease("c"))] == [
            *run.state.ended_incarnations,
            None,
        ]
        for _ in range(40):
            run.do(commands.Close("enough"))
            run.later(15)
            join(run, "c", incarnation="made by a clock that stands")
        names = [each.incarnation for each in run.state.ended_incarnations]
        assert len({*names, run.state.incarnation}) == len(names) + 1
        assert len(run.state.ended_incarnations) == 16


def test_an_older_version_reads_it_as_a_new_run() -> None:
    """The snapshot before the fact is that of a forgotten run; with it, the fold is the same as without."""
    run = closed()
    leave(run, "a", "b")
    begin = restore(take_reopened(run.state), run.now)
    assert take_reopened(run.state).forgotten
    for fact in join(run):
        apply(begin, fact, run.now)
    assert take_snapshot(begin) == take_snapshot(run.state)
