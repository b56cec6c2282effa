"""`rallypoint events` beside a real service: past events, new events, and a clean end of either."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner, Result
from google.protobuf.duration_pb2 import Duration

from cli.cli_process import RALLYPOINT, clean_environment, rallypoint, refusal, service
from rallypoint.cli import events as events_module
from rallypoint.cli.main import main
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.channel import open_channel
from support.waiting import PATIENCE

# Nodes that send no heartbeat are lost only after these tests.
SETTINGS = pb.RunSettings(
    min_nodes=1,
    max_nodes=1,
    max_restarts=3,
    keep_alive_interval=Duration(seconds=600),
    disconnect_grace=Duration(seconds=600),
)
STORY = [
    "RUN_CREATED",
    "NODE_JOINED",
    "ROUND_FROZEN",
    "NODE_CONFIRMED",
    "ROUND_FINALIZED",
    "WORKER_FAILED",
    "ROUND_ENDED",
    "ROUND_FROZEN",
    "NODE_CONFIRMED",
    "ROUND_FINALIZED",
    "NODE_SUCCEEDED",
    "RUN_CLOSED",
]


async def play(address: str, run_id: str, until: str = "RUN_CLOSED") -> None:
    """A node joins, one of its workers fails, and then all succeed; stops after the kind of event in `until`."""
    channel = open_channel(address)
    stub: pb_grpc.RendezvousServiceAsyncStub = pb_grpc.RendezvousServiceStub(channel)
    call = stub.Join(timeout=PATIENCE)
    join = pb.JoinRun(run_id=run_id, node_id="a", settings=SETTINGS, address="host-a", local_world_size=2)
    await call.write(pb.JoinRequest(join=join))
    while isinstance(response := await call.read(), pb.JoinResponse):
        update = response.update
        round_ = update.assignment.round
        if update.phase == pb.PHASE_FROZEN:
            await call.write(pb.JoinRequest(confirm=pb.ConfirmRound(round=round_, master_port=29500)))
        elif update.phase == pb.PHASE_FINAL and until == "ROUND_FINALIZED":
            break
        elif update.phase == pb.PHASE_FINAL and round_ == 1:
            failure = pb.WorkerFailure(round=1, rank=1, message="it broke", traceback="Traceback …")
            await call.write(pb.JoinRequest(worker_failed=failure))
        elif update.phase == pb.PHASE_FINAL:
            await call.write(pb.JoinRequest(succeeded=pb.ReportSuccess(round=round_)))
    await channel.close()


@pytest.fixture(scope="module")
def rendezvous() -> Iterator[str]:
    """A service with a run that is over."""
    with service("rendezvous", "--journal", "memory") as address:
        asyncio.run(play(address, "digits"))
        yield address


def shown(address: str, *arguments: str) -> Result:
    """Return the command's output about the run."""
    return CliRunner().invoke(main, ["events", "digits", "--rdzv-endpoint", address, *arguments])


def kinds(lines: str) -> list[str]:
    """Return the kind of event on each line."""
    return [next(word for word in line.split() if word in events_module.KINDS) for line in lines.splitlines()]


def test_events_are_shown_oldest_first(rendezvous: str) -> None:
    """The reasons are shown too."""
    result = shown(rendezvous)
    assert (result.exit_code, result.stderr) == (0, "")
    assert kinds(result.stdout) == STORY
    told = "round 1 ended: worker of rank 1 on node a failed: it broke (restart 1 of 3)"
    assert result.stdout.splitlines()[6].endswith(told)


LATER = (datetime.now(UTC) + timedelta(days=1)).isoformat()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--round", "2"], STORY[7:11]),
        (["--round", "1", "--round", "2", "--kind", "round-frozen"], ["ROUND_FROZEN"] * 2),
        (["--kind", "worker_failed", "--kind", "RUN_CLOSED"], ["WORKER_FAILED", "RUN_CLOSED"]),
        (["--node", "a", "--kind", "node-joined"], ["NODE_JOINED"]),
        (["--since", "1h", "--until", LATER, "--limit", "2000"], STORY),
        (["--until", "1h"], []),
        (["--node", "nobody"], []),
    ],
)
def test_only_the_requested_events_are_shown(rendezvous: str, flags: list[str], expected: list[str]) -> None:
    """If there is no such event, a line reports it."""
    result = shown(rendezvous, *flags)
    assert (kinds(result.stdout), result.exit_code) == (expected, 0)
    assert result.stderr == ("" if expected else "no such events\n")


def test_the_last_events_are_shown_with_a_notice_of_older_ones(rendezvous: str) -> None:
    """No operator wants 50,000 lines, or should believe that these are all."""
    result = shown(rendezvous, "--limit", "2")
    assert kinds(result.stdout) == STORY[-2:]
    assert result.stderr == "(older events are left out; --limit 2 shows the last 2)\n"
    assert shown(rendezvous, "--limit", str(len(STORY))).stderr == ""


def test_programs_get_a_line_of_json_for_each(rendezvous: str) -> None:
    """It has the values that the sentence is made of."""
    events = [json.loads(line) for line in shown(rendezvous, "--json").stdout.splitlines()]
    assert [event["kind"].removeprefix("EVENT_KIND_") for event in events] == STORY
    assert events[5]["failure"]["traceback"] == "Traceback …"
    assert events[2]["worldSize"] == 2


def test_following_a_closed_run_ends(rendezvous: str) -> None:
    """The command shows all events and exits with code 0."""
    result = shown(rendezvous, "--follow")
    assert (kinds(result.stdout), result.exit_code) == (STORY, 0)
    last = shown(rendezvous, "-f", "--limit", "1", "--json")
    assert [json.loads(line)["kind"] for line in last.stdout.splitlines()] == ["EVENT_KIND_RUN_CLOSED"]


@contextmanager
def following(address: str, run_id: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command with `--follow`."""
    process = subprocess.Popen(
        [str(RALLYPOINT), "events", run_id, "-f", "--rdzv-endpoint", address, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(PYTHONUNBUFFERED="1"),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read(process: subprocess.Popen[str], expected: Sequence[str]) -> None:
    """Read lines of these kinds."""
    assert process.stdout is not None
    for kind in expected:
        assert kinds(process.stdout.readline()) == [kind]


def test_new_events_are_shown_as_they_happen(rendezvous: str) -> None:
    """Operators' actions too, with their names; Ctrl-C ends it quietly, with the shell's exit code for it."""
    asyncio.run(play(rendezvous, "live", until="ROUND_FINALIZED"))
    with following(rendezvous, "live", "--kind", "ROUND_FINALIZED", "--kind", "NODE_EVICTED") as process:
        read(process, ["ROUND_FINALIZED"])
        out = rallypoint(
            *("evict", "live", "b", "--force", "--rdzv-endpoint", rendezvous, "--reason", "bad memory")
        ).stdout
        assert out == "node b is refused from now on; it is not in run live\n"
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "node b, which was not in the run, was barred by an operator: bad memory (operator " in line
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, out, err) == (130, "", "")


@pytest.mark.slow
def test_a_pipe_that_closes_ends_it(rendezvous: str) -> None:
    """`rallypoint events … -f | head`: no traceback."""
    asyncio.run(play(rendezvous, "piped", until="ROUND_FINALIZED"))
    with following(rendezvous, "piped") as process:
        read(process, STORY[:5])
        assert process.stdout is not None
        process.stdout.close()
        for _ in range(2):
            rallypoint("evict", "piped", "b", "--force", "--rdzv-endpoint", rendezvous)
            rallypoint("evict", "piped", "b", "--readmit", "--rdzv-endpoint", rendezvous)
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(timeout=PATIENCE) == 1


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--kind", "HAPPENED"], "'HAPPENED' is not one of"),
        (["--since", "yesterday"], "'yesterday' is not a time; expected an age, as in 90s"),
        (["--since", "1m", "--until", "2m"], "--since is after --until"),
        (["--round", "0"], "0 is not in the range x>=1"),
    ],
)
def test_an_invalid_command_line_is_refused_in_one_line(flags: list[str], told: str) -> None:
    """No request is sent before."""
    assert told in refusal(rallypoint("events", "digits", "--rdzv-endpoint", "127.0.0.1:1", *flags))


def test_rounds_are_put_together_from_a_real_run(rendezvous: str) -> None:
    """The first round has its cause, and the last the outcome of the run."""
    out = CliRunner().invoke(main, ["rounds", "digits", "--rdzv-endpoint", rendezvous, "--json"]).stdout
    first, second = json.loads(out)["rounds"]
    assert (first["cause"], first["nodeId"], first["workers"]) == ("WORKER_FAILED", "a", 2)
    assert (second["cause"], second["nodes"]) == ("SUCCEEDED", 1)
    assert second["gapSeconds"] >= 0


def test_a_requested_restart_is_done_and_reported(rendezvous: str) -> None:
    """The command and the run's events show it."""
    asyncio.run(play(rendezvous, "again", until="ROUND_FINALIZED"))
    arguments = ["again", "--rdzv-endpoint", rendezvous]
    result = CliRunner().invoke(main, ["restart", *arguments, "--reason", "new data"])
    assert result.output == "run again: round 1 ended, all workers restart\n"
    told = CliRunner().invoke(main, ["events", *arguments, "--kind", "restart-requested"]).output
    assert "an operator requested a restart of round 1: new data (operator " in told
