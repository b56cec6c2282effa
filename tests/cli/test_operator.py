"""What operators ask is answered or refused in bounded time, and a refusal is one line that names the place."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from cli.cli_process import service
from rallypoint.cli.main import main


@pytest.fixture(scope="module")
def rendezvous() -> Iterator[str]:
    """A rendezvous service that knows no run."""
    with service("rendezvous", "--journal", "memory") as address:
        yield address


def refused(*arguments: str) -> str:
    """The line with which a command is refused."""
    result = CliRunner().invoke(main, list(arguments))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    return result.stderr.removeprefix("Error: ").strip()


ABOUT_A_RUN = [
    ["status", "run-1"],
    ["events", "run-1"],
    ["events", "run-1", "--follow"],
    ["rounds", "run-1"],
    ["restart", "run-1"],
    ["evict", "run-1", "node-1"],
    ["close", "run-1"],
]
COMMANDS = [["status"], *ABOUT_A_RUN]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_nobody_there_is_told_at_once(command: list[str]) -> None:
    """With the address, the reason, and the flag."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        told = refused(*command, "--rdzv-endpoint", address)
    assert told.startswith(f"no rendezvous service answers at {address}: ")
    assert "Connection refused" in told
    assert told.endswith("check --rdzv-endpoint")


def test_a_host_that_says_nothing_is_told_after_the_timeout() -> None:
    """It is waited for no longer than was asked."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        told = refused("status", "--rdzv-endpoint", address, "--timeout", "0.3")
    assert told == f"no rendezvous service answered at {address} within 0.3 s"


@pytest.mark.parametrize("command", ABOUT_A_RUN, ids=" ".join)
def test_an_unknown_run_is_told(rendezvous: str, command: list[str]) -> None:
    """By name; the reason is there for whoever looks it up."""
    told = refused(*command, "--rdzv-endpoint", rendezvous)
    assert told == f"{rendezvous}: there is no run 'run-1' (RUN_NOT_FOUND)"


def test_a_wrong_endpoint_is_told() -> None:
    """With what is expected."""
    assert "endpoint 'here' has no port, expected host:port" in refused("status", "--rdzv-endpoint", "here")


def test_a_service_without_runs_says_so(rendezvous: str) -> None:
    """An empty table would leave one wondering; the environment names the service, too."""
    environment = {"RALLYPOINT_RDZV_ENDPOINT": rendezvous}
    assert CliRunner(env=environment).invoke(main, ["status"]).output == "no runs\n"
    shown = CliRunner(env=environment).invoke(main, ["status", "--json"]).output
    assert shown == '{\n  "runs": []\n}\n'
