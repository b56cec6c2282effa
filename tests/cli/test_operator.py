"""Operators' requests are answered or refused in bounded time, and a refusal is one line with the address."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from cli.cli_process import ABOUT_A_RUN, service
from rallypoint.cli.main import main


@pytest.fixture(scope="module")
def rendezvous() -> Iterator[str]:
    """A rendezvous service without runs."""
    with service("rendezvous", "--journal", "memory") as address:
        yield address


def refused(*arguments: str) -> str:
    """Return the line with which a command is refused."""
    result = CliRunner().invoke(main, list(arguments))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    return result.stderr.removeprefix("Error: ").strip()


OF_TIMERS = [
    ["timers"],
    ["timers", "run-1", "--expired"],
    ["scopes", "run-1"],
    ["scopes", "run-1", "--forget-all"],
    ["progress", "run-1"],
]


def _part_of_id(part: list[str] | str) -> str:
    return part if isinstance(part, str) else " ".join(part)


COMMANDS = [
    *((command, "rendezvous service", "--rdzv-endpoint") for command in (["status"], *ABOUT_A_RUN)),
    *((command, "timer service", "--timer-endpoint") for command in OF_TIMERS),
]


@pytest.mark.parametrize(("command", "name", "flag"), COMMANDS, ids=_part_of_id)
def test_a_refused_connection_is_reported_at_once(command: list[str], name: str, flag: str) -> None:
    """The line has the address, the reason, and the flag."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        told = refused(*command, flag, address)
    assert told.startswith(f"no {name} answers at {address}: ")
    assert "Connection refused" in told
    assert told.endswith(f"check {flag}")


@pytest.mark.parametrize(("command", "name", "flag"), COMMANDS, ids=_part_of_id)
def test_a_silent_host_is_reported_after_the_timeout(command: list[str], name: str, flag: str) -> None:
    """The command waits no longer than requested."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        told = refused(*command, flag, address, "--timeout", "0.3")
    assert told == f"no {name} answered at {address} within 0.3 s"


@pytest.mark.parametrize("command", OF_TIMERS, ids=" ".join)
def test_another_service_is_not_taken_for_a_timer_service(rendezvous: str, command: list[str]) -> None:
    """The two are easily mistaken for each other: their addresses differ in a digit."""
    told = refused(*command, "--timer-endpoint", rendezvous)
    assert told.startswith(f"the server at {rendezvous} is not a timer service (")
    assert told.endswith("check --timer-endpoint")


@pytest.mark.parametrize("command", ABOUT_A_RUN, ids=" ".join)
def test_an_unknown_run_is_reported(rendezvous: str, command: list[str]) -> None:
    """The line has its name, and the reason code to look up."""
    told = refused(*command, "--rdzv-endpoint", rendezvous)
    assert told == f"{rendezvous}: there is no run 'run-1' (RUN_NOT_FOUND)"


@pytest.mark.parametrize(("command", "name", "flag"), COMMANDS, ids=_part_of_id)
def test_an_invalid_endpoint_is_reported(command: list[str], name: str, flag: str) -> None:
    """The line states the expected form."""
    assert "endpoint 'here' has no port, expected host:port" in refused(*command, flag, "here")


def test_an_empty_list_of_runs_is_reported(rendezvous: str) -> None:
    """An empty table would be unclear; the environment names the service, too."""
    environment = {"RALLYPOINT_RDZV_ENDPOINT": rendezvous}
    assert CliRunner(env=environment).invoke(main, ["status"]).output == "no runs\n"
    shown = CliRunner(env=environment).invoke(main, ["status", "--json"]).output
    assert shown == '{\n  "runs": []\n}\n'
