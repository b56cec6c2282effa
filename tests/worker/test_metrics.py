"""Workers send measurements: never blocked, never stopped, and at no cost without a sink."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.worker import metrics
from rallypoint.worker.metrics import METRICS_VARIABLE, Measurement, configure, put, timed, timing


@pytest.fixture
def taken() -> Iterator[list[Measurement]]:
    """The measurements that a sink of the program receives."""
    found: list[Measurement] = []
    configure(found.append)
    yield found
    configure(None)


class Loader:
    """Has a method."""

    @timed
    def batch(self, size: int, *, double: bool = False) -> int:
        """Of so many."""
        return 2 * size if double else size


@timed
def fail() -> None:
    """Raises."""
    raise KeyError("gone")


def test_calls_are_timed_under_their_names_and_return_what_they_do(taken: list[Measurement]) -> None:
    """A decorator that changed anything else could not be left in."""
    assert Loader().batch(3, double=True) == 6
    with pytest.raises(KeyError, match="gone"):
        fail()
    assert [(each.name, each.raised, each.value) for each in taken] == [
        ("Loader.batch", False, None),
        ("test_metrics.fail", True, None),
    ]
    assert all(each.seconds is not None and each.seconds >= 0 for each in taken)
    assert Loader.batch.__doc__ == "Of so many."


def test_names_of_ones_own_blocks_and_values(taken: list[Measurement]) -> None:
    """Code that is no function can be measured too."""

    @timed(name="checkpoint")
    def save() -> str:
        return "saved"

    assert save() == "saved"
    with timing("load"):
        pass
    put("queue_depth", 7)
    assert [each.name for each in taken] == ["checkpoint", "load", "queue_depth"]
    assert taken[-1] == Measurement("queue_depth", value=7.0)


def test_a_sink_that_raises_stops_no_worker() -> None:
    """Training is worth more than its metrics."""

    def broken(measurement: Measurement) -> None:
        raise OSError("no")

    configure(broken)
    try:
        assert Loader().batch(1) == 1
    finally:
        configure(None)


def test_measurements_go_to_the_agent_that_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are dropped, without waiting, if it has no room; a child process measures as well."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as agent:
        agent.bind(str(tmp_path / "metrics"))
        monkeypatch.setenv(METRICS_VARIABLE, str(tmp_path / "metrics"))
        monkeypatch.setenv("RANK", "5")
        configure(None)
        put("loss", 0.5)
        assert json.loads(agent.recv(4096)) == {
            "name": "loss",
            "seconds": None,
            "raised": False,
            "value": 0.5,
            "rank": 5,
        }
        if not (child := os.fork()):
            put("of a child", 1)
            os._exit(0)
        os.waitpid(child, 0)
        assert json.loads(agent.recv(4096))["name"] == "of a child"
        for number in range(10_000):  # more than any socket holds
            put("flood", number)
    put("nobody", 1)
    monkeypatch.delenv(METRICS_VARIABLE)
    configure(None)
    put("nobody", 1)
    assert os.environ.get(METRICS_VARIABLE) is None


def test_the_public_names_are_documented() -> None:
    """Users find them by `help`."""
    assert all(getattr(metrics, name).__doc__ for name in metrics.__all__ if name != "METRICS_VARIABLE")
