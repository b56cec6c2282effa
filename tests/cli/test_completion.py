"""`rallypoint completion`: a script for each shell, and completions that know commands and flags."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from click.testing import CliRunner

from cli.cli_process import RALLYPOINT, clean_environment, rallypoint, service
from rallypoint.cli.main import main
from support.marks import slow
from support.mortal import mortal
from support.waiting import wait_until


@pytest.mark.parametrize(
    ("shell", "loads"), [("bash", "complete -o"), ("zsh", "compdef"), ("fish", "complete")]
)
def test_there_is_a_script_for_each_shell(shell: str, loads: str) -> None:
    """It calls this program by its name, with the protocol of click."""
    if shell == "bash" and shutil.which("bash") is None:
        pytest.skip("click asks bash for its version")
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    assert loads in result.output
    assert f"_RALLYPOINT_COMPLETE={shell}_complete" in result.output


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("rallypoint s", ["submit", "serve", "status", "scopes"]),
        slow("rallypoint agent s", ["stacks", "stop"]),
        slow("rallypoint agent logs --f", ["--follow"]),
        slow("rallypoint submit --ag", ["--agents"]),
        slow("rallypoint serve r", ["rendezvous"]),
        slow("rallypoint run --nproc", ["--nproc-per-node"]),
        ("rallypoint timers --ex", ["--expired"]),
        ("rallypoint completion ", ["bash", "zsh", "fish"]),
    ],
)
def test_the_shell_is_offered_the_possible_next_words(words: str, offered: list[str]) -> None:
    """Commands, subcommands, flags and values are offered."""
    assert completed(words) == offered


def completed(words: str, **environment: str) -> list[str]:
    """Return the completions that bash gets for the last word."""
    position = str(len(words.split(" ")) - 1)
    asked = {"_RALLYPOINT_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": position}
    result = rallypoint(environment=environment | asked)
    assert result.stderr == ""
    # Without completions, click prints an empty line.
    return [line.partition(",")[2] for line in result.stdout.splitlines() if line]


def are_offered(names: list[str], words: str, **environment: str) -> None:
    """Wait for these completions: on a busy machine, a service may not reply within the completion's time limit."""
    wait_until(lambda: completed(words, **environment) == names, f"{words}is completed")


@pytest.fixture(scope="module")
def job() -> Iterator[dict[str, str]]:
    """A rendezvous service with a run of one node, and one whose name is a shell command; yields its variables."""
    with service("rendezvous", "--insecure", "--journal", "memory") as address, ExitStack() as stack:
        for run_id in ("job-17", "$(reboot)"):
            command = mortal(str(RALLYPOINT), "run", "--insecure", "--rdzv-endpoint", address)
            command += ["--rdzv-id", run_id, "--node-id", "node-a", "--no-python", "sleep", "600"]
            process = stack.enter_context(subprocess.Popen(command, env=clean_environment()))
            stack.callback(process.terminate)
        connection = {"RALLYPOINT_RDZV_ENDPOINT": address, "RALLYPOINT_INSECURE": "1"}
        wait_until(
            lambda: rallypoint("status", environment=connection).stdout.count("FINAL") == 2, "both run"
        )
        yield connection


@pytest.mark.parametrize(
    "command",
    [
        "status",
        "events",
        "rounds",
        "logs",
        "close",
        slow("delete"),
        slow("restart"),
        slow("evict"),
        slow("replicas --run"),
        slow("agent drain"),
    ],
)
def test_runs_are_offered(job: dict[str, str], command: str) -> None:
    """They are the runs of the service in the environment; a name that the shell would execute is left out."""
    are_offered(["job-17"], f"rallypoint {command} ", **job)


def test_runs_are_offered_with_the_flags_of_the_command(job: dict[str, str]) -> None:
    """The flags give the address and the security."""
    command = f"rallypoint status --insecure --rdzv-endpoint {job['RALLYPOINT_RDZV_ENDPOINT']} job"
    are_offered(["job-17"], command)
    assert completed(command.replace(" job", " other")) == []


def test_nodes_are_offered(job: dict[str, str]) -> None:
    """They are the nodes of the run named before."""
    are_offered(["node-a"], "rallypoint evict job-17 ", **job)
    assert completed("rallypoint evict job-18 ", **job) == []


@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "192.0.2.1:29400", "unix:/nowhere", "http://x"])
def test_without_a_service_there_is_no_completion(endpoint: str) -> None:
    """It prints no error either: the command itself reports it."""
    assert completed("rallypoint status ", RALLYPOINT_RDZV_ENDPOINT=endpoint, RALLYPOINT_INSECURE="1") == []
