"""`rallypoint scopes`: learned timeouts, the progress of learning, and deletion of exactly the requested scopes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from cli.scripted_timers import ScriptedTimers, scripted_timers
from rallypoint.cli.main import main
from rallypoint.rpc.durations import to_duration
from rallypoint.timer.v1 import timer_service_pb2 as pb


@pytest.fixture
def timers() -> Iterator[ScriptedTimers]:
    """A service that has learned of three scopes in one run, and one in another."""
    with scripted_timers() as servicer:
        servicer.scopes.scopes.extend(
            [
                pb.Scope(run_id="digits", scope="load", count=7, longest=to_duration(0.25), timers=4),
                pb.Scope(run_id="digits", scope="save", count=0, timers=1),
                pb.Scope(
                    run_id="digits",
                    scope="step",
                    count=1200,
                    longest=to_duration(14.5),
                    after=to_duration(72.5),
                ),
                pb.Scope(
                    run_id="other", scope="step", count=20, longest=to_duration(1.0), after=to_duration(60.0)
                ),
            ]
        )
        yield servicer


def run(servicer: ScriptedTimers, *arguments: str) -> Result:
    """Run the command; return its result."""
    return CliRunner().invoke(main, ["scopes", *arguments, "--timer-endpoint", servicer.address])


def words(text: str) -> list[list[str]]:
    """Return the words of each line."""
    return [line.split() for line in text.splitlines()]


def test_learned_timeouts_and_missing_samples_are_shown(timers: ScriptedTimers) -> None:
    """All pages are shown, and the rule that computes a timeout."""
    *table, rule = run(timers, "digits").stdout.splitlines()
    assert words("\n".join(table)) == [
        ["scope", "seen", "longest", "timeout", "timers"],
        ["load", "7", "0.250s", "7", "of", "20", "seen", "4"],
        ["save", "0", "-", "0", "of", "20", "seen", "1"],
        ["step", "1200", "14.500s", "1m12s", "0"],
    ]
    assert rule == "a timeout is 5 times the longest, at least 1m00s, after 20 completions"


def test_all_runs_are_shown_by_name(timers: ScriptedTimers) -> None:
    """That is without a run's name."""
    lines = words(run(timers).stdout)
    assert [line[0] for line in lines[:-1]] == ["run", "digits", "digits", "digits", "other"]


def test_programs_get_the_services_own_answer(timers: ScriptedTimers) -> None:
    """All pages are put into one."""
    shown = json.loads(run(timers, "digits", "--json").stdout)
    assert (shown["warmUp"], shown["factor"], shown["least"]) == ("20", 5.0, "60s")
    assert [(each["scope"], each.get("after")) for each in shown["scopes"]] == [
        ("load", None),
        ("save", None),
        ("step", "72.500s"),
    ]
    assert "nextPageToken" not in shown


def test_missing_learned_timeouts_are_reported(timers: ScriptedTimers) -> None:
    """The line names the option that learns them."""
    assert run(timers, "nobody").stdout == 'no learned timeouts; use `expires(after="auto")` to learn them\n'


@pytest.mark.parametrize(
    ("flags", "told", "left"),
    [
        (
            ["--forget", "step"],
            "run digits has forgotten the scope step and learns it again\n",
            ["load", "save"],
        ),
        (
            ["--forget", "step", "--forget", "stpe"],
            "run digits has forgotten the scope step and learns it again\n"
            "run digits had learned nothing of the scope stpe, so there was nothing to forget\n",
            ["load", "save"],
        ),
        (["--forget-all"], "run digits has forgotten 3 scopes and learns again\n", []),
    ],
)
def test_forgotten_scopes_are_reported(
    timers: ScriptedTimers, flags: list[str], told: str, left: list[str]
) -> None:
    """No other scope of the run, and none of another run, is forgotten."""
    assert run(timers, "digits", *flags).output == told
    remaining = [(each.run_id, each.scope) for each in timers.scopes.scopes]
    assert remaining == [*(("digits", scope) for scope in left), ("other", "step")]
    again = run(timers, "digits", "--forget-all", "--json")
    assert json.loads(again.stdout) == {"forgotten": len(left)}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--forget", "step"], "--forget needs RUN_ID"),
        (["--forget-all"], "--forget-all needs RUN_ID"),
        (["", "--forget-all"], "--forget-all needs RUN_ID"),
        (["digits", "--forget", "step", "--forget-all"], "contradict each other"),
        (["digits", "--forget", "step", "--forget", ""], "needs the name of a scope"),
    ],
)
def test_a_slip_forgets_nothing(timers: ScriptedTimers, arguments: list[str], told: str) -> None:
    """Above all it does not forget every scope: on the wire, an empty name means that."""
    result = run(timers, *arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert told in result.stderr
    assert timers.asked == []
