"""The start of a round is recorded once: when all have reported it, or when the round ends before that."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest

from rallypoint.rendezvous.core import commands, facts, starts
from rallypoint.rendezvous.core.apply import apply, restart_leases
from rallypoint.rendezvous.core.decide import settle
from rallypoint.rendezvous.core.snapshot import restore, take_snapshot
from rallypoint.rendezvous.core.starts import StartReport
from rallypoint.rendezvous.core.state import RecoveryParts
from rendezvous.core.scripted_run import ScriptedRun

SHORT = RecoveryParts(stopped=0.1, reformed=5.0, started=0.2)
LONG = RecoveryParts(stopped=4.0, reformed=1.0, started=0.3)


def run_of_three(**settings: object) -> ScriptedRun:
    run = ScriptedRun(3, 3, max_restarts=5, **settings)
    run.start("a", "b", "c")
    return run


def report(
    run: ScriptedRun, node_id: str, parts: RecoveryParts = SHORT, *, age: float = 0.0, round_: int = 0
) -> list[facts.Fact]:
    """Let a node report that its workers run; return the facts that follow."""
    due = starts.note(run.state, node_id, StartReport(round_ or run.state.round, parts, age), run.now)
    return run.resume() if due else []


def test_the_last_report_records_the_start_with_the_slowest_node() -> None:
    """The slowest took longest by itself: the others waited for it, and report that in `reformed`."""
    run = run_of_three()
    run.restart()
    run.later(2.0)
    run.confirm("a", "b", "c")
    assert report(run, "a") == []
    run.later(1.0)
    assert report(run, "b", LONG, age=0.5) == []
    (started,) = report(run, "c", age=0.75)
    assert started == facts.RoundStarted(2, 3, 3, "b", LONG, duration=2.5, age=0.5)


def test_a_report_that_repeats_or_concerns_another_round_changes_nothing() -> None:
    """A node repeats it after a broken stream, before and after the record."""
    run = run_of_three()
    for node_id, parts in (("a", SHORT), ("a", LONG), ("b", SHORT), ("b", LONG)):
        assert report(run, node_id, parts) == []
    assert report(run, "c", LONG, round_=7) == report(run, "c", LONG, round_=2) == []
    (started,) = report(run, "c")
    assert (started.slowest, started.parts) == ("a", SHORT)  # type: ignore[union-attr]
    for node_id in ("a", "b", "c"):
        assert report(run, node_id, LONG) == []
    run.restart()
    assert [report(run, node_id, round_=1) for node_id in ("a", "b", "c")] == [[], [], []]
    run.confirm("a", "b", "c")
    assert [report(run, node_id, round_=1) for node_id in ("a", "b", "c")] == [[], [], []]
    assert len(run.of_type(facts.RoundStarted)) == 1


def test_a_report_of_a_node_without_a_seat_is_ignored() -> None:
    """A spare, and an agent that joined under the name of a participant."""
    run = ScriptedRun(2, 2)
    run.start("a", "b")
    run.join("spare")
    assert report(run, "spare") == report(run, "a") == []
    run.state.nodes["b"].lease = run.state.fencing_token + 1
    assert report(run, "b") == []


@pytest.mark.parametrize(
    ("end", "ends_with"),
    [
        (lambda run: run.fail("a"), facts.WorkerFailed),
        (lambda run: run.leave("a"), facts.RoundEnded),
        (lambda run: run.restart(), facts.RoundEnded),
        (lambda run: run.do(commands.Close("enough")), facts.RunClosed),
        (lambda run: run.succeed("a", "b", "c"), facts.RunClosed),
        (lambda run: run.let_in("d"), facts.RoundEnded),
    ],
    ids=["failed", "left", "restarted", "closed", "succeeded", "grown"],
)
def test_a_round_that_ends_before_is_recorded_with_the_reports_so_far(end: object, ends_with: type) -> None:
    """Before its end, or its first failure. If no node has reported, there is nothing to record."""
    for reports in (0, 2):
        run = ScriptedRun(3, 4, max_restarts=5)
        run.start("a", "b", "c")
        for node_id in ("a", "b")[:reports]:
            report(run, node_id)
        end(run)  # type: ignore[operator]
        kinds = [type(fact) for fact in run.facts]
        assert kinds.count(facts.RoundStarted) == (reports > 0)
        if reports:
            (started,) = run.of_type(facts.RoundStarted)
            assert (started.reported_nodes, started.group_world_size) == (2, 3)
            assert kinds[kinds.index(facts.RoundStarted) + 1] is ends_with


def test_reports_of_a_round_that_failed_are_not_recorded() -> None:
    """While its end waits for its cause: older versions take the record for one of a round without a failure."""
    run = run_of_three()
    run.state.settings = replace(run.state.settings, max_restarts=0)
    run.fail("a")
    assert run.state.settling
    assert [report(run, node_id) for node_id in ("a", "b", "c")] == [[], [], []]
    run.lose("b")
    assert run.of_type(facts.RoundStarted) == []


def test_a_server_that_starts_again_records_no_start_twice_and_takes_reports_again() -> None:
    """It has the record in its snapshot; reports are no facts, and a duration that it did not measure is unknown."""
    run = run_of_three()
    report(run, "a", LONG)
    run.state = restore(take_snapshot(run.state), run.now)
    restart_leases(run.state, run.now)
    assert [report(run, node_id, age=3.0) for node_id in ("a", "b")] == [[], []]
    (started,) = report(run, "c", age=9.0)
    assert started == facts.RoundStarted(1, 3, 3, "a", SHORT, duration=0.0, age=3.0)
    run.state = restore(take_snapshot(run.state), run.now)
    assert [report(run, node_id) for node_id in ("a", "b", "c")] == [[], [], []]


def test_an_age_from_before_the_round_counts_as_its_beginning() -> None:
    """Also an absurd one: no recovery takes longer than the time since the previous round."""
    run = run_of_three()
    run.restart()
    run.later(2.0)
    run.confirm("a", "b", "c")
    run.later(1.0)
    for node_id in ("a", "b"):
        report(run, node_id, age=2e6)
    (started,) = report(run, "c", age=2e6)
    assert (started.duration, started.age) == (2.0, 1.0)  # type: ignore[union-attr]


def test_a_pause_of_the_server_counts() -> None:
    """Leases do not count it, but the recovery took that time."""
    run = run_of_three()
    run.restart()
    run.confirm("a", "b", "c")
    run.state.forgiven += 30.0
    report(run, "a")
    report(run, "b")
    (started,) = report(run, "c")
    assert started.duration == 30.0  # type: ignore[union-attr]


@pytest.mark.parametrize("lost", [False, True])
def test_to_an_older_version_it_changes_nothing(lost: bool) -> None:
    """It reads RoundFinalized once more, for a round that is FINAL, also if the round is about to end."""
    run = run_of_three()
    if lost:
        apply(run.state, facts.NodeLeft("a", "told to"), run.now)
    before = deepcopy(run.state)
    apply(run.state, facts.RoundFinalized(1), run.now)
    run.state.revision = before.revision
    assert run.state == before
    assert settle(run.state, run.now) == settle(before, run.now)


def test_a_report_costs_the_same_however_many_there_are() -> None:
    """At thousands of nodes: the participants are compared once, when as many have reported."""

    class Counted(set[str]):
        looks = 0

        def __contains__(self, key: object) -> bool:
            Counted.looks += 1
            return super().__contains__(key)

    nodes = [f"node{number}" for number in range(300)]
    run = ScriptedRun(300, 300)
    run.start(*nodes)
    run.state.started = Counted()
    for node_id in nodes[:-1]:
        assert report(run, node_id) == []
    assert len(report(run, nodes[-1])) == 1
    assert Counted.looks < 5 * len(nodes)
