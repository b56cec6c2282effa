"""`rallypoint status`: a run with its nodes for people, the whole answer as JSON for programs."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any

import pytest
from click.testing import CliRunner

from cli.scripted_timers import ScriptedTimers, scripted_timers
from rallypoint.cli import operator
from rallypoint.cli.main import main
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import to_duration
from rallypoint.timer.v1 import timer_service_pb2 as timer_pb
from support.waiting import PATIENCE


def run_message(**more: Any) -> pb.Run:
    """Return a run of two nodes that is in its third round."""
    run = pb.Run(run_id="digits", revision=21, phase=pb.PHASE_FINAL, round=3, world_size=4, restart_count=1)
    run.settings.MergeFrom(pb.RunSettings(min_nodes=1, max_nodes=3, max_restarts=2))
    run.last_round_end.MergeFrom(pb.RoundEnd(round=2, detail="node c was lost: its connection broke"))
    for rank, name in enumerate(("a", "b")):
        node = run.nodes.add(node_id=name, role="trainer", local_world_size=2, address=f"10.0.0.{rank}")
        node.state, node.connected = pb.NODE_STATE_RUNNING, rank == 0
        node.assignment.MergeFrom(pb.Assignment(round=3, group_rank=rank, base_rank=2 * rank))
    run.nodes.add(
        node_id="spare", role="trainer", local_world_size=2, state=pb.NODE_STATE_WAITING, connected=True
    )
    run.node_count = 3
    run.MergeFrom(pb.Run(**more))
    return run


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, list[str]], str]:
    """Runs `status` with a scripted response of a rendezvous service; returns its output."""
    real = operator.call

    def show(response: Any, arguments: list[str]) -> str:
        answers = chain([response], repeat(([], None)))  # after the first call: no events

        def scripted(service: Any, *asked: Any, **preferred: Any) -> Any:
            return next(answers) if service is operator.RENDEZVOUS else real(service, *asked, **preferred)

        monkeypatch.setattr(operator, "call", scripted)
        monkeypatch.setattr(operator, "other_version", lambda *_: "")
        result = CliRunner().invoke(main, ["status", *arguments])
        assert (result.exit_code, result.stderr) == (0, "")
        return result.output

    return show


def words(text: str) -> list[list[str]]:
    """Return the words of each line."""
    return [line.split() for line in text.splitlines()]


def test_a_run_is_shown_with_its_nodes(answer: Callable[..., str]) -> None:
    """The output has the nodes with their ranks, the nodes that wait, and why the last round ended."""
    lines = answer(pb.GetRunResponse(run=run_message()), ["digits"]).splitlines()
    assert lines[:2] == [
        "run digits: FINAL, round 3, 4 workers on 2 nodes (3 joined, 1:3 wanted), 1 of 2 restarts used, revision 21",
        "round 2 ended: node c was lost: its connection broke",
    ]
    assert words("\n".join(lines[2:])) == [
        ["node", "state", "group", "rank", "ranks", "role", "address", "connected"],
        ["a", "RUNNING", "0", "0-1", "trainer", "10.0.0.0", "yes"],
        ["b", "RUNNING", "1", "2-3", "trainer", "10.0.0.1", "no"],
        ["spare", "WAITING", "-", "-", "trainer", "yes"],
    ]


def test_nodes_without_a_watchdog_are_shown(answer: Callable[..., str]) -> None:
    """The line has the reason; of very many nodes it names the first."""
    run = run_message()
    run.nodes[1].watchdog_trouble = "the timer service does not answer"
    last = answer(pb.GetRunResponse(run=run), ["digits"]).splitlines()[-1]
    assert last == "no watchdog guards the workers of b: the timer service does not answer"
    for number in range(21):
        run.nodes.add(node_id=f"n{number}", watchdog_trouble="refused")
    last = answer(pb.GetRunResponse(run=run), ["digits"]).splitlines()[-1]
    assert last == "nor those of 2 other nodes"


def test_a_closed_run_is_shown_with_its_end(answer: Callable[..., str]) -> None:
    """The output has its outcome and its reason."""
    end = pb.RunEnd(outcome=pb.OUTCOME_FAILED, detail="worker of rank 1 on node a failed")
    run = pb.Run(run_id="digits", phase=pb.PHASE_CLOSED, round=1, run_end=end)
    assert answer(pb.GetRunResponse(run=run), ["digits"]).splitlines() == [
        "run digits: CLOSED FAILED, round 1, 0 workers on 0 nodes (0 joined, 0 wanted), "
        "0 of 0 restarts used, revision 0",
        "run ended: worker of rank 1 on node a failed",
    ]


def test_spares_and_topologies_are_shown(answer: Callable[..., str]) -> None:
    """The output has the number of spares, and each node's topology if known."""
    run = run_message()
    run.nodes[0].topology, run.nodes[1].topology = "hall1/rack2", "hall1/rack3"
    run.nodes[2].state = pb.NODE_STATE_SPARE
    first, _, *table = answer(pb.GetRunResponse(run=run), ["digits"]).splitlines()
    assert "(3 joined, 1 of them spare, 1:3 wanted)" in first
    assert words("\n".join(table)) == [
        ["node", "state", "group", "rank", "ranks", "role", "address", "connected", "topology"],
        ["a", "RUNNING", "0", "0-1", "trainer", "10.0.0.0", "yes", "hall1/rack2"],
        ["b", "RUNNING", "1", "2-3", "trainer", "10.0.0.1", "no", "hall1/rack3"],
        ["spare", "SPARE", "-", "-", "trainer", "yes", "-"],
    ]


def test_budgets_of_restarts_are_shown(answer: Callable[..., str]) -> None:
    """Counted restarts of the run and of each node that has any, most first; and the delay of the next round."""
    run = run_message(counted_restarts=2, restart_count=7)
    run.settings.max_restarts, run.settings.max_restarts_per_node = 5, 3
    run.settings.restart_window.seconds = 600
    for node, count in zip(run.nodes, (1, 2, 0), strict=True):
        node.counted_restarts = count
    run.held_back.seconds = 4
    lines = answer(pb.GetRunResponse(run=run), ["digits"]).splitlines()
    assert (
        "2 of 5 restarts used in the last 600 s (7 in all), 2 of 3 by node b, 1 of 3 by node a, revision"
        in lines[0]
    )
    assert lines[2] == "restart delayed by 4 s (back-off after repeated failures)"
    assert "2/5" in answer(pb.ListRunsResponse(runs=[run]), [])


def test_nodes_that_were_taken_out_are_shown(answer: Callable[..., str]) -> None:
    """Their names are shown, since --readmit needs them; but not a thousand of them."""
    run = run_message(evicted_node_ids=["x", "y"])
    lines = answer(pb.GetRunResponse(run=run), ["digits"]).splitlines()
    assert lines[2] == "evicted, and refused (`rallypoint events` shows why): x, y"
    run.evicted_node_ids.extend(f"n{number}" for number in range(98))
    line = answer(pb.GetRunResponse(run=run), ["digits"]).splitlines()[2]
    assert line.endswith(" n16, n17 and 80 others")


@pytest.mark.parametrize(
    ("passed", "told"),
    [
        (False, "1 of 2 nodes succeeded; they wait for the others, 300 s at most"),
        (True, "1 of 2 nodes succeeded; the exit barrier is over: they no longer wait for the others"),
    ],
)
def test_a_run_that_is_ending_is_shown_so(answer: Callable[..., str], passed: bool, told: str) -> None:
    """Nodes that have finished wait: that is no hang. Once the run is over, its end is shown instead."""
    run = run_message(succeeded_count=1, exit_barrier_passed=passed)
    run.settings.exit_barrier_timeout.seconds = 300
    assert answer(pb.GetRunResponse(run=run), ["digits"]).splitlines()[2] == told
    run.run_end.detail = "all participants succeeded"
    assert told not in answer(pb.GetRunResponse(run=run), ["digits"])


def test_runs_are_listed(answer: Callable[..., str]) -> None:
    """Each run is a line."""
    one = run_message()
    shown = words(answer(pb.ListRunsResponse(runs=[one, pb.Run(run_id="x", phase=pb.PHASE_JOINABLE)]), []))
    assert shown[0][:3] == ["run", "phase", "round"]
    assert shown[1][:8] == ["digits", "FINAL", "3", "3", "of", "1:3", "4", "1/2"]
    assert shown[-1] == ["x", "JOINABLE", "0", "0", "of", "0", "0", "0/0", "-"]


@pytest.mark.parametrize("text", ["[/b]", "[red]x[/red]", ":smile:", "[link=x"])
def test_names_and_reasons_are_shown_as_they_are(answer: Callable[..., str], text: str) -> None:
    """Users choose names, and exceptions quote any text: none of it is markup."""
    run = run_message(run_id=text, last_round_end=pb.RoundEnd(detail=f"failed: {text}"))
    run.nodes[0].node_id = text
    shown = answer(pb.GetRunResponse(run=run), [text])
    assert [f"run {text}: FINAL" in shown, f"failed: {text}" in shown, f"\n {text}" in shown] == [True] * 3
    listed = answer(pb.ListRunsResponse(runs=[run]), [])
    assert listed.count(text) == 2


@pytest.mark.parametrize("arguments", [["digits", "--json"], ["--json"]])
def test_programs_get_the_whole_answer(answer: Callable[..., str], arguments: list[str]) -> None:
    """It is the protocol's own JSON, with fields that are zero."""
    run = run_message()
    response = pb.GetRunResponse(run=run) if len(arguments) > 1 else pb.ListRunsResponse(runs=[run])
    shown = json.loads(answer(response, arguments))
    seen = shown["run"] if len(arguments) > 1 else shown["runs"][0]
    assert (seen["runId"], seen["phase"], seen["restartCount"]) == ("digits", "PHASE_FINAL", 1)
    assert seen["nodes"][0]["assignment"]["baseRank"] == 0


def test_a_run_is_one_line_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line has the full name, and the whole reason of its end."""
    name, detail = "r" * 256, "worker of rank 1 failed: " + "much to say " * 80 + "and the end"
    run = pb.Run(run_id=name, phase=pb.PHASE_CLOSED, run_end=pb.RunEnd(detail=detail))
    monkeypatch.setattr(operator, "call", lambda *_: pb.ListRunsResponse(runs=[run]))
    monkeypatch.setattr(operator, "other_version", lambda *_: "")
    _, line = CliRunner().invoke(main, ["status"]).output.splitlines()
    assert line.startswith(f" {name} ")
    assert line.rstrip().endswith(detail)


@pytest.fixture
def timers() -> Iterator[ScriptedTimers]:
    """A timer service with a run whose rank 3 is behind."""
    slowest = timer_pb.WorkerProgress(node_id="b", worker_id="w3", rank=3, step=1200, idle=to_duration(75.0))
    with scripted_timers() as servicer:
        servicer.progress = timer_pb.GetProgressResponse(
            workers=4, lowest_step=1200, highest_step=1207, idle=to_duration(0.5), slowest=[slowest]
        )
        yield servicer


SLOWEST = "slowest worker: rank 3 on node b (worker w3), at step 1200 for 1m15s (7 behind the fastest)"


def test_the_slowest_worker_is_shown_if_the_timer_service_is_named(
    answer: Callable[..., str], timers: ScriptedTimers
) -> None:
    """It is below the nodes; a stall names the worker that stopped first."""
    response, asking = pb.GetRunResponse(run=run_message()), ["digits", "--timer-endpoint", timers.address]
    plain = answer(response, ["digits"])
    assert timers.asked == []
    assert answer(response, asking) == f"{plain}{SLOWEST}\n"
    assert timers.asked == [timer_pb.GetProgressRequest(run_id="digits", page_size=1)]
    timers.progress.stalled.MergeFrom(
        timer_pb.Stalled(idle=to_duration(605), first=timers.progress.slowest[0], workers=4, at_same_step=2)
    )
    stall = (
        "the run STALLS: no worker has advanced for 10m05s; rank 3 on node b (worker w3) stopped first, "
        "1m15s ago at step 1200 (2 of 4 workers are at that step)"
    )
    assert answer(response, asking) == f"{plain}{SLOWEST}\n{stall}\n"
    fields = json.loads(answer(response, [*asking, "--json"]))
    assert (fields["run"]["runId"], fields["progress"]["stalled"]["atSameStep"]) == ("digits", 2)


def test_a_run_without_progress_is_reported(answer: Callable[..., str], timers: ScriptedTimers) -> None:
    """Without a line, users could not know if the timer service was asked."""
    timers.progress = timer_pb.GetProgressResponse()
    shown = answer(pb.GetRunResponse(run=run_message()), ["digits", "--timer-endpoint", timers.address])
    assert shown.splitlines()[-1] == "no worker reports progress"


def test_a_list_of_runs_asks_no_timer_service(answer: Callable[..., str], timers: ScriptedTimers) -> None:
    """The environment may name one, but that would be a request for each run."""
    answer(pb.ListRunsResponse(runs=[run_message()]), ["--timer-endpoint", timers.address])
    assert timers.asked == []


@pytest.mark.parametrize("endpoint", ["nobody", "mute", "here"])
def test_a_run_is_shown_without_an_answer_of_the_timer_service(
    answer: Callable[..., str], endpoint: str
) -> None:
    """The run is shown as usual; one more line has the reason for the missing progress."""
    response = pb.GetRunResponse(run=run_message())
    plain = answer(response, ["digits"])
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = {"mute": mute, "nobody": nobody}.get(endpoint, mute).getsockname()[1]
        address = "here" if endpoint == "here" else f"127.0.0.1:{port}"
        timeout = "0.3" if endpoint == "mute" else str(PATIENCE)
        asking = ["digits", "--timeout", timeout, "--timer-endpoint", address]
        shown = answer(response, asking)
        fields = json.loads(answer(response, [*asking, "--json"]))
    assert shown.startswith(plain)
    (line,) = shown.removeprefix(plain).splitlines()
    reason = {
        "nobody": f"no timer service answers at {address}: ",
        "mute": f"no timer service answered at {address} within 0.3 s",
        "here": "endpoint 'here' has no port, expected host:port",
    }[endpoint]
    assert line.startswith(f"progress of the workers is unknown: {reason}")
    assert (fields["run"]["runId"], fields["progress"]) == ("digits", None)
    assert fields["progressError"].startswith(reason)
