"""The options of `serve timer` reach the service, and a wrong one is refused in one line."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.cli_process import rallypoint, refusal, service
from cli.serving import Serving
from rallypoint.cli.main import main
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.durations import to_duration
from rallypoint.timer.core.values import TimerSettings
from rallypoint.timer.v1 import timer_service_pb2 as pb
from rallypoint.timer.v1 import timer_service_pb2_grpc as pb_grpc
from support.waiting import PATIENCE

# Every setting that has a flag, with a value that no default has.
SETTINGS: dict[str, int | float] = {
    "--learn-warm-up": 11,
    "--learn-factor": 2.5,
    "--learn-least": 0.5,
    "--learned-retention": 14.5,
    "--stall-after": 15.5,
    "--reoffer-interval": 0.25,
    "--expiry-retention": 17.5,
    "--max-timers": 18,
    "--max-timers-per-node": 19,
    "--max-nodes": 20,
    "--max-scopes-per-run": 21,
    "--max-learned-runs": 22,
}
EXPECTED = TimerSettings(
    learn_warm_up=11,
    learn_factor=2.5,
    learn_least=0.5,
    learned_retention=14.5,
    stall_after=15.5,
    reoffer_interval=0.25,
    retention=17.5,
    max_timers=18,
    max_timers_per_node=19,
    max_nodes=20,
    max_scopes_per_run=21,
    max_learned_runs=22,
)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Serving:
    return Serving("timer", monkeypatch)


def test_without_flags_the_settings_are_those_of_the_service(chosen: Serving) -> None:
    """The defaults are defined once, where they are explained; and learned timeouts are kept."""
    assert chosen()[1:] == (TimerSettings(), Path("var/timer-learned.json"))


def test_every_setting_can_be_set(chosen: Serving, tmp_path: Path) -> None:
    """By flag, in the environment, in a file; each sets the setting that it is named for."""
    given = chosen.in_each_way(SETTINGS, tmp_path / "config.toml")
    assert [settings for _, settings, _ in given] == [EXPECTED] * 3


def test_the_learned_file_and_stall_reports_can_be_turned_off(chosen: Serving) -> None:
    """The values for that are a word, and a zero."""
    _, settings, learned = chosen("--learned", "none", "--stall-after", "0")
    assert (settings.stall_after, learned) == (None, None)
    assert chosen("--learned", "/a/b.json")[2] == Path("/a/b.json")


@pytest.mark.parametrize("flag", SETTINGS)
@pytest.mark.parametrize("value", ["-1", "nan", "inf", "many", ""])
def test_an_invalid_setting_is_reported_in_one_line(flag: str, value: str) -> None:
    """The line has the flag and its value."""
    result = CliRunner().invoke(
        main, ["serve", "timer", "--port", "0", "--learned", "none", f"{flag}={value}"]
    )
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert flag in result.stderr
    assert value in result.stderr


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--learn-factor", "0.9"), ("--learn-least", "0"), ("--max-timers", "0"), ("--learned", "")],
)
def test_values_that_make_no_sense_are_refused(flag: str, value: str) -> None:
    """A factor below one would expire timers of workers that are as fast as ever."""
    result = CliRunner().invoke(main, ["serve", "timer", "--port", "0", "--learned", "none", flag, value])
    assert result.exit_code == 2
    assert flag in result.stderr


@pytest.mark.parametrize("content", ["", "no JSON", '{"format": 9}'])
def test_an_unreadable_file_is_reported_in_one_line_and_not_touched(tmp_path: Path, content: str) -> None:
    """A user who wants to rescue its content finds every byte unchanged."""
    file = tmp_path / "learned.json"
    file.write_text(content)
    told = refusal(rallypoint("serve", "timer", "--port", "0", "--learned", file))
    assert told.startswith(f"the file of learned durations {file} is ")
    assert "was not touched" in told
    assert file.read_text() == content


async def observe(address: str, *, count: int) -> None:
    """Report to a service, as an agent would, that workers of run "run" left scope "step" so many times."""
    async with open_channel(address) as channel:
        call = pb_grpc.TimerServiceStub(channel).Supervise(timeout=PATIENCE)
        actions = [
            pb.SuperviseAction(subscribe=pb.Subscribe(run_id="run", node_id="a")),
            pb.SuperviseAction(observe=pb.Observe(scope="step", count=count, longest=to_duration(4))),
        ]
        await call.write(pb.SuperviseRequest(actions=actions))
        await call.done_writing()
        async for _ in call:
            pass


async def scopes(address: str) -> list[pb.Scope]:
    async with open_channel(address) as channel:
        answer = await pb_grpc.TimerServiceStub(channel).ListScopes(pb.ListScopesRequest(), timeout=PATIENCE)
        return list(answer.scopes)


@pytest.mark.slow
@pytest.mark.integration
async def test_learned_durations_outlive_the_process(tmp_path: Path) -> None:
    """It is in the file that the flag names; a second service at the same file is refused."""
    file = tmp_path / "folder" / "learned.json"
    with service("timer", "--learned", file, "--learn-factor", "3") as address:
        await observe(address, count=30)
        second = refusal(rallypoint("serve", "timer", "--port", "0", "--learned", file))
        assert "is in use by another process" in second
    with service("timer", "--learned", file, "--learn-factor", "3") as address:
        (scope,) = await scopes(address)
    assert (scope.run_id, scope.scope, scope.count) == ("run", "step", 30)
    assert (scope.longest, scope.after) == (to_duration(4), to_duration(12))


@pytest.mark.integration
def test_a_service_that_keeps_nothing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no file, no folder and no lock."""
    monkeypatch.chdir(tmp_path)
    with service("timer", "--learned", "none") as address:
        asyncio.run(observe(address, count=30))
    assert list(tmp_path.iterdir()) == []
