"""`rallypoint progress`: the first lines show the slowest worker, and a stall of the run."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from cli.scripted_timers import ScriptedTimers, scripted_timers
from rallypoint.cli.main import main
from rallypoint.rpc.durations import to_duration
from rallypoint.timer.v1 import timer_service_pb2 as pb


def worker(rank: int, step: int, idle: float) -> pb.WorkerProgress:
    """Return the progress of a worker of node a or b."""
    return pb.WorkerProgress(
        node_id="ab"[rank // 2], worker_id=f"w{rank}", rank=rank, step=step, idle=to_duration(idle)
    )


@pytest.fixture
def timers() -> Iterator[ScriptedTimers]:
    """A service with a run whose rank 3 is behind."""
    with scripted_timers() as servicer:
        servicer.progress = pb.GetProgressResponse(
            workers=4,
            lowest_step=1200,
            highest_step=1207,
            idle=to_duration(0.5),
            slowest=[worker(3, 1200, 75.0), worker(0, 1206, 2.0), worker(1, 1207, 1.0), worker(2, 1207, 0.5)],
            stall_after=to_duration(600.0),
        )
        yield servicer


STALLED = pb.Stalled(idle=to_duration(605.0), first=worker(3, 1200, 680.0), workers=4, at_same_step=1)


def shown(servicer: ScriptedTimers, *arguments: str) -> Result:
    """Return the command's output."""
    result = CliRunner().invoke(
        main, ["progress", "digits", *arguments, "--timer-endpoint", servicer.address]
    )
    assert result.exit_code == 0, result.stderr
    return result


def test_the_slowest_comes_first(timers: ScriptedTimers) -> None:
    """The output has the run's step, the time to a stall, and for each worker its lag and the time since its step."""
    first, second, *table = shown(timers).stdout.splitlines()
    assert first == "run digits: 4 workers at steps 1200 to 1207, the last one advanced 0.500s ago"
    assert second == "it stalls if none advances for 10m00s"
    assert [line.split() for line in table] == [
        ["rank", "node", "worker", "step", "behind", "since"],
        ["3", "b", "w3", "1200", "7", "1m15s"],
        ["0", "a", "w0", "1206", "1", "2.000s"],
        ["1", "a", "w1", "1207", "0", "1.000s"],
        ["2", "b", "w2", "1207", "0", "0.500s"],
    ]
    assert len(shown(timers, "--limit", "2").stdout.splitlines()) == 5


def test_a_stall_names_the_worker_that_stopped_first(timers: ScriptedTimers) -> None:
    """The line has the number of workers at that step: in a collective many workers wait for one."""
    timers.progress.stalled.CopyFrom(STALLED)
    assert shown(timers).stdout.splitlines()[1] == (
        "the run STALLS: no worker has advanced for 10m05s; rank 3 on node b (worker w3) stopped first, "
        "11m20s ago at step 1200 (1 of 4 workers are at that step)"
    )


def test_a_run_that_is_not_watched_for_stalls_is_reported(timers: ScriptedTimers) -> None:
    """Without a line about stalls, a user would assume that there is none."""
    timers.progress.ClearField("stall_after")
    assert shown(timers).stdout.splitlines()[1] == "it is not watched for stalls (--stall-after 0)"


def test_a_run_without_progress_is_reported(timers: ScriptedTimers) -> None:
    """The line names the call that reports progress."""
    timers.progress = pb.GetProgressResponse()
    assert shown(timers).output == (
        "no worker of run digits reports progress; use `rallypoint.timer.progress(step)`\n"
    )


def test_programs_get_the_services_own_answer(timers: ScriptedTimers) -> None:
    """It includes zeros, and no stall if there is none."""
    fields = json.loads(shown(timers, "--json", "--limit", "1").stdout)
    assert (fields["workers"], fields["lowestStep"], fields["idle"]) == (4, "1200", "0.500s")
    assert [each["rank"] for each in fields["slowest"]] == [3]
    assert "stalled" not in fields
    timers.progress.stalled.CopyFrom(STALLED)
    stalled = json.loads(shown(timers, "--json").stdout)["stalled"]
    assert (stalled["over"], stalled["first"]["workerId"], stalled["atSameStep"]) == (False, "w3", 1)
