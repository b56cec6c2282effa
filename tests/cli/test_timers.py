"""`rallypoint timers`: expired timers come first, then the next to expire; omissions are always reported."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import grpc
import pytest
from click.testing import CliRunner, Result

from cli.cli_process import service
from cli.scripted_timers import ScriptedTimers, scripted_timers, timer
from rallypoint.cli.main import main
from rallypoint.rpc.durations import to_duration
from rallypoint.timer.v1 import timer_service_pb2 as pb
from rallypoint.timer.v1 import timer_service_pb2_grpc as pb_grpc
from support.waiting import PATIENCE


@pytest.fixture
def timers() -> Iterator[ScriptedTimers]:
    """A service with a timer in each state, and one of another run and node."""
    with scripted_timers() as servicer:
        servicer.timers = [
            timer("checkpoint", pb.TIMER_STATE_COUNTING, 42.0),
            timer("load", pb.TIMER_STATE_LEARNING, 0, learned_as="load", after=None),
            timer("reduce", pb.TIMER_STATE_OFFERED, -3.5, offers=2, node_id="b"),
            timer("step", pb.TIMER_STATE_COUNTING, 7.0, learned_as="step", after=to_duration(90.0)),
            timer("wait", pb.TIMER_STATE_UNCLAIMED, -70.0, run_id="other"),
        ]
        yield servicer


def shown(servicer: ScriptedTimers, *arguments: str) -> Result:
    """Return the command's output."""
    result = CliRunner().invoke(main, ["timers", *arguments, "--timer-endpoint", servicer.address])
    assert result.exit_code == 0, result.stderr
    return result


def words(text: str) -> list[list[str]]:
    """Return the words of each line."""
    return [line.split() for line in text.splitlines()]


def test_expired_timers_come_first_then_the_next_to_expire(timers: ScriptedTimers) -> None:
    """Marked timers that expired, the oldest first; then the next to expire; last those without a deadline."""
    assert words(shown(timers).stdout) == [
        ["run", "node", "worker", "scope", "after", "remaining", "state", "offers"],
        ["!", "other", "a", "w0", "wait", "1m00s", "-1m10s", "UNCLAIMED", "-"],
        ["!", "digits", "b", "w0", "reduce", "1m00s", "-3.500s", "OFFERED", "2"],
        ["digits", "a", "w0", "step", "1m30s", "(learned)", "7.000s", "COUNTING", "-"],
        ["digits", "a", "w0", "checkpoint", "1m00s", "42.000s", "COUNTING", "-"],
        ["digits", "a", "w0", "load", "learning", "-", "LEARNING", "-"],
    ]


@pytest.mark.parametrize(
    ("arguments", "scopes"),
    [
        (["digits"], ["reduce", "step", "checkpoint", "load"]),
        (["digits", "--expired"], ["reduce"]),
        (["--expired"], ["wait", "reduce"]),
        (["--node", "b"], ["reduce"]),
        (["digits", "--node", "a", "--expired"], []),
        (["nobody"], []),
    ],
)
def test_only_the_requested_timers_are_shown(
    timers: ScriptedTimers, arguments: list[str], scopes: list[str]
) -> None:
    """The filter is a run, a node, or expired timers; with a run's name, the run is no column."""
    result = shown(timers, *arguments, "--json")
    assert [each["scope"] for each in json.loads(result.stdout)["timers"]] == scopes
    for_people = shown(timers, *arguments).stdout
    if scopes:
        assert ("run" in for_people.split()) == (arguments[0].startswith("--"))
    else:
        assert for_people == ("no expired timers\n" if "--expired" in arguments else "no timers\n")


def test_programs_get_the_services_own_answer(timers: ScriptedTimers) -> None:
    """Durations are in the protocol's form; unknown ones are left out."""
    first, *_, last = json.loads(shown(timers, "--json").stdout)["timers"]
    assert (first["state"], first["after"], first["remaining"]) == ("TIMER_STATE_UNCLAIMED", "60s", "-70s")
    assert (last["state"], last["learnedAs"], "after" in last) == ("TIMER_STATE_LEARNING", "load", False)


def test_omissions_are_reported_and_never_hide_expired_timers(timers: ScriptedTimers) -> None:
    """That holds for any number of timers and pages."""
    timers.page = 3
    timers.timers[:0] = [timer(f"early{n:02}", pb.TIMER_STATE_COUNTING, 1.0) for n in range(20)]
    result = shown(timers, "--limit", "4", "--json")
    assert "--limit shows more" in result.stderr
    found = json.loads(result.stdout)["timers"]
    assert [each["scope"] for each in found] == ["wait", "reduce", "early00", "early01"]
    assert shown(timers, "--limit", "25").stderr == ""
    assert len(shown(timers, "--limit", "25").stdout.splitlines()) == 1 + 25
    assert "--limit shows more" in shown(timers, "--limit", "24").stderr


def test_a_timer_that_runs_out_while_it_is_listed_is_shown_once(timers: ScriptedTimers) -> None:
    """Its present state is shown; it must not be missed between two requests."""
    timers.runs_out = [timers.timers[0]]
    found = json.loads(shown(timers, "digits", "--json").stdout)["timers"]
    assert [each["scope"] for each in found].count("checkpoint") == 1
    assert next(each["state"] for each in found if each["scope"] == "checkpoint") == "TIMER_STATE_OFFERED"


def test_a_scope_can_do_nothing_to_the_terminal(timers: ScriptedTimers) -> None:
    """Workers name scopes: a timer is one line, without colours, bells or markup."""
    timers.timers = [timer("[red]a\nb\x1b[31m", pb.TIMER_STATE_COUNTING, 1.0)]
    _, line = shown(timers, "digits").stdout.splitlines()
    assert "[red]a b [31m" in line


def test_the_environment_names_the_service(timers: ScriptedTimers) -> None:
    """The environment can set every option."""
    environment = {"RALLYPOINT_TIMER_ENDPOINT": timers.address}
    assert "checkpoint" in CliRunner(env=environment).invoke(main, ["timers", "digits"]).stdout


@pytest.mark.integration
def test_a_real_services_timers_are_shown() -> None:
    """First no timers, with a line instead of an empty table; then an expired one that no agent receives."""
    with service("timer", "--learned", "none") as address:
        for arguments in (["timers"], ["timers", "digits", "--node", "a"]):
            result = CliRunner().invoke(main, [*arguments, "--timer-endpoint", address])
            assert (result.exit_code, result.output) == (0, "no timers\n")
        with grpc.insecure_channel(address) as channel:
            stub: pb_grpc.TimerServiceStub = pb_grpc.TimerServiceStub(channel)
            for scope, after in (("slow", 3600.0), ("hung", 0.01)):
                request = pb.AcquireTimerRequest(
                    run_id="digits", node_id="a", worker_id="0@1", scope=scope, after=to_duration(after)
                )
                stub.AcquireTimer(request, timeout=PATIENCE)
        expired = ["timers", "digits", "--expired", "--timer-endpoint", address]
        gives_up = time.monotonic() + PATIENCE
        while "UNCLAIMED" not in (told := CliRunner().invoke(main, expired).output):
            assert time.monotonic() < gives_up, told
        line = told.splitlines()[1].split()
        assert line[:5] == ["!", "a", "0@1", "hung", "0.010s"]
        assert line[5].startswith("-")
        everything = CliRunner().invoke(main, ["timers", "--timer-endpoint", address]).output
        assert [row.split()[-2] for row in everything.splitlines()[1:]] == ["UNCLAIMED", "COUNTING"]
