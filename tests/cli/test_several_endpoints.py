"""Operators name all replicas, and one that answers is enough."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result

from cli.cli_process import ABOUT_A_RUN, rallypoint, refusal, service
from rallypoint.cli.main import main
from serving.fleet import refusing


@pytest.fixture(scope="module")
def places() -> Iterator[str]:
    """Two replicas that are not there, and between them one that is."""
    (one, first), (two, second) = refusing(), refusing()
    with one, two, service("rendezvous", "--journal", "memory") as here:
        yield f"{first},{here},{second}"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


# The first replica is chosen at random.
@pytest.mark.parametrize("_time", range(3))
def test_any_running_replica_answers_a_query(places: str, _time: int) -> None:
    assert invoke("status", "--rdzv-endpoint", places).stdout == "no runs\n"


@pytest.mark.parametrize("command", ABOUT_A_RUN, ids=" ".join)
def test_a_refusal_names_all_given_endpoints(places: str, command: list[str]) -> None:
    """It does not matter which replica replied: the refusal is the service's."""
    result = invoke(*command, "--rdzv-endpoint", places)
    assert result.stderr == f"Error: {places}: there is no run 'run-1' (RUN_NOT_FOUND)\n"


@pytest.mark.parametrize("command", [["status"], ["restart", "r"], ["events", "r", "--follow"]], ids=" ".join)
def test_missing_replicas_are_reported_at_once(command: list[str]) -> None:
    (one, first), (two, second) = refusing(), refusing()
    with one, two:
        told = invoke(*command, "--rdzv-endpoint", f"{first},{second}").stderr
    assert told.startswith(f"Error: no rendezvous service answers at {first},{second}: ")
    assert told.endswith("check --rdzv-endpoint\n")
    assert told.count("\n") == 1


@pytest.mark.parametrize("command", [["status"], ["run", "--rdzv-id", "x", __file__]], ids=["status", "run"])
def test_a_mistake_in_the_list_is_reported_with_its_part(command: list[str]) -> None:
    # It runs in its own process: `run` configures the logs of its process.
    result = rallypoint(command[0], "--rdzv-endpoint", "a:29400,b", *command[1:])
    assert result.returncode == 2
    assert "endpoint 2 of 2: endpoint 'b' has no port, expected host:port" in result.stderr


@pytest.mark.parametrize(
    "command",
    [["status"], ["close", "x"], ["replicas"], ["events", "x"], ["submit", "--agents", "a:1", __file__]],
    ids=lambda command: str(command[0]),
)
def test_the_url_of_an_etcd_is_no_address_of_a_service(command: list[str]) -> None:
    """`rallypoint run` accepts it, so users give it here too; a part that may be a password is not shown."""
    told = refusal(rallypoint(command[0], "--rdzv-endpoint", "etcd://me:hid,hid/hid@a/job", *command[1:]))
    assert "--rdzv-endpoint" in told
    assert "this command needs the address of a rendezvous replica (host:port)" in told
    assert "hid" not in told
