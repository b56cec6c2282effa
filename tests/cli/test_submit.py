"""`rallypoint submit` takes the flags of `run`, makes one launch of them, and refuses senseless ones."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from click.testing import CliRunner

from cli.cli_process import rallypoint, refusal
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.cli.main import main
from rallypoint.rpc import logs
from rallypoint.submission import session
from rallypoint.submission.session import Submission
from support.marks import slow


class NeverRun:
    """Replaces a session: records the submission."""

    submissions: list[Submission]
    failure_report = ""
    launches: tuple[pb.LaunchJobResponse, ...] = (
        pb.LaunchJobResponse(node_id="node-a", rendezvous_endpoint="a:1"),
        pb.LaunchJobResponse(node_id="node-b", rendezvous_endpoint="a:1"),
    )

    def __init__(self, submission: Submission, *_: Any) -> None:
        self.submissions.append(submission)

    async def run(self) -> int:
        """Return success."""
        return 0


@pytest.fixture
def submissions(monkeypatch: pytest.MonkeyPatch) -> list[Submission]:
    """Record submissions instead of sending them."""
    NeverRun.submissions = []
    monkeypatch.setattr(session, "SubmissionSession", NeverRun)
    monkeypatch.setattr(logs, "configure_logs", lambda *_: None)  # they are those of the tests' process
    return NeverRun.submissions


def submitted(submissions: list[Submission], *arguments: str) -> Any:
    """Run a command line; return its submission."""
    result = CliRunner().invoke(main, ["submit", *arguments])
    assert result.exit_code == 0, result.output
    return submissions.pop()


def test_a_command_line_becomes_one_launch_for_all_agents(submissions: list[Submission]) -> None:
    """It is the job that `run` would start on each host: as many nodes as agents, which meet at the first agent."""
    submission = submitted(submissions, "--agents", "a:1,b:2", "/x/train.py", "--epochs", "3")
    assert submission.endpoints == ("a:1", "b:2")
    assert (submission.timeout, submission.detach, submission.security) == (60.0, False, None)
    spec = submission.launch.spec
    assert submission.launch.launch_id
    assert spec.run_id.startswith("train-")
    assert list(spec.command) == ["${python}", "-u", "/x/train.py", "--epochs", "3"]
    assert (spec.min_nodes, spec.max_nodes, spec.local_world_size) == (2, 2, 1)
    assert (spec.rendezvous_endpoint, spec.timer_endpoint, dict(spec.options)) == ("a:1", "", {})
    assert not spec.HasField("shutdown_timeout")


def test_a_script_gets_the_launched_run_and_its_agents(submissions: list[Submission]) -> None:
    """It gets JSON; without --json, the name of the run alone, for a shell variable."""
    order = ("submit", "--agents", "a:1,b:2", "--rdzv-id", "run-7", "--detach")
    assert CliRunner().invoke(main, [*order, "train.py"]).output == "run-7\n"
    assert json.loads(CliRunner().invoke(main, [*order, "--json", "train.py"]).output) == {
        "run_id": "run-7",
        "rendezvous_endpoint": "a:1",
        "agents": [{"endpoint": "a:1", "node_id": "node-a"}, {"endpoint": "b:2", "node_id": "node-b"}],
    }
    assert "add --detach" in refusal(rallypoint("submit", "--agents", "a:1", "--json", "train.py"))


def test_every_flag_finds_its_place(submissions: list[Submission]) -> None:
    """It becomes a field if there is one, else an option by name; underscores and abbreviations as for `run`."""
    spec: pb.JobSpec = submitted(
        submissions,
        *("--agents", "a:1,b:2", "--nnodes", "1:4", "--nproc_per_node", "gpu", "--max-restarts", "3"),
        *("--rdzv-endpoint", "r:29400", "--rdzv-id", "run-7", "--rdzv-conf", "join_timeout=60"),
        *("--timer-endpoint", "t:29410", "--role", "reader", "--log-dir", "/logs", "--cwd", "/x"),
        *("--shutdown-timeout", "1.5", "--env", "A=1=2", "--env", "PATH", "--tee", "3"),
        *("--virtual-local-rank", "--health-check", "command:/c a,b", "--health-check", "gpu"),
        *("--warn-sig", "USR1", "--log-max-size", "1MiB", "--drain-timeout", "2.5", "--master-port", "2950"),
        *("--require-watchdog", "-m", "my.module", "-x"),
    ).launch.spec
    assert list(spec.command) == ["${python}", "-u", "-m", "my.module", "-x"]
    assert (spec.min_nodes, spec.max_nodes, spec.local_world_size, spec.max_restarts) == (1, 4, 0, 3)
    assert (spec.rendezvous_endpoint, spec.timer_endpoint, spec.run_id) == ("r:29400", "t:29410", "run-7")
    assert dict(spec.rendezvous_settings) == {"join_timeout": "60"}
    assert (spec.role, spec.log_dir, spec.working_directory) == ("reader", "/logs", "/x")
    assert spec.shutdown_timeout.ToMilliseconds() == 1500
    assert dict(spec.environment) == {"A": "1=2", "PATH": os.environ["PATH"]}
    assert dict(spec.options) == {"nproc-per-node": "gpu", "tee": "3"}
    assert spec.drain_timeout.ToMilliseconds() == 2500
    assert (spec.warn_signal, spec.log_max_size, spec.master_port) == ("SIGUSR1", 2**20, 2950)
    assert (spec.virtual_local_rank, spec.require_watchdog) == (True, True)
    assert list(spec.health_checks) == ["command:/c a,b", "gpu"]


@pytest.mark.parametrize(
    ("flags", "command"),
    [
        (("--no-python",), ["train.py", "-x"]),
        (("--run-path",), ["${python}", "-u", "-m", "rallypoint.worker.run_path", "train.py", "-x"]),
    ],
)
def test_programs_are_started_as_by_run(
    submissions: list[Submission], flags: tuple[str, ...], command: list[str]
) -> None:
    """A program of any kind, or a script by its path, is possible."""
    spec = submitted(submissions, "--agents", "a:1", *flags, "train.py", "-x").launch.spec
    assert list(spec.command) == command
    assert not spec.rendezvous_endpoint  # the only agent uses its own address, which it knows best


MISTAKES: list[tuple[Any, str]] = [
    (("train.py",), "no agent of this user runs on this host"),
    (("--agents", "", "train.py"), "names no agent"),
    (("--agents", "a", "train.py"), "endpoint 'a' has no port"),
    (("--agents", "a:1,a:1", "train.py"), "'a:1' is listed twice"),
    (("--agents", "127.0.0.1:1,b:1", "train.py"), "b:1 can't reach the first agent at 127.0.0.1:1"),
    (("--agents", "a:1", "--nnodes", "2", "train.py"), "2 nodes are more than the 1 agents"),
    (("--agents", "a:1", "--nproc-per-node", "0", "train.py"), "'0' is not a number of workers"),
    (("--agents", "a:1", "--nproc-per-node", "tpu", "train.py"), "none of auto, cpu, gpu, xpu"),
    (("--agents", "a:1", "--env", "=1", "train.py"), "is not of the form NAME=VALUE"),
    (("--agents", "a:1", "--env", "NOT_SET_ANYWHERE", "train.py"), "NOT_SET_ANYWHERE is not set here"),
    (("--agents", "a:1", "--tee", "9", "train.py"), "'9' names no stream"),
    (("--agents", "a:1", "--rdzv-conf", "join=1", "train.py"), "'join' is not a setting"),
    (("--agents", "a:1", "--rdzv-endpoint", "r", "train.py"), "endpoint 'r' has no port"),
    (("--agents", "a:1", "-m", "--no-python", "train.py"), "contradict each other"),
    (("--agents", "a:1", "--standalone", "train.py"), "No such option"),
    (("--agents", "a:1", "--node-rank", "1", "train.py"), "No such option"),
    (("--agents", "a:1"), "Missing argument 'PROGRAM'"),
]


@pytest.mark.parametrize(
    ("arguments", "told"), [*MISTAKES[:3], *(slow(*mistake) for mistake in MISTAKES[3:])]
)
def test_invalid_arguments_are_refused_in_one_line(arguments: tuple[str, ...], told: str) -> None:
    """No request is sent to an agent before."""
    assert told in refusal(rallypoint("submit", *arguments))
