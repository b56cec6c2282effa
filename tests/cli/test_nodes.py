"""Values of torchrun's flags: sensible values are accepted, others refused with the expected form."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import click
import pytest
from click.testing import CliRunner

from rallypoint.cli.main import main
from rallypoint.cli.values import NodeCount, Pairs, SignalList, Text, WorkerCount

BROKEN = b"a\xff".decode(errors="surrogateescape")  # as Python decodes bytes that are not UTF-8


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("1", (1, 1)), ("4", (4, 4)), ("2:4", (2, 4)), ("3:3", (3, 3)), ("100000", (100_000,) * 2)],
)
def test_node_counts_are_a_number_or_a_range(text: str, nodes: tuple[int, int]) -> None:
    """The forms are torchrun's."""
    assert NodeCount()(text) == nodes


@pytest.mark.parametrize("text", ["auto", "cpu"])
def test_workers_can_be_one_per_processor(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """It counts processors that this process may use: a container may have fewer. `auto` does so without GPUs."""
    monkeypatch.setattr("rallypoint.agent.health.gpu.count_gpus", lambda environment: 0)
    assert WorkerCount()(text) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("text", ["auto", "gpu"])
def test_workers_can_be_one_per_gpu(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Only GPUs that the workers would see are counted."""
    monkeypatch.setattr("rallypoint.agent.health.gpu.count_gpus", lambda environment: 6)
    assert WorkerCount()(text) == 6


def test_workers_can_be_one_per_xpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """XPUs are Intel's."""
    monkeypatch.setattr("rallypoint.agent.health.gpu.count_xpus", lambda environment: 3)
    assert WorkerCount()("xpu") == 3


@pytest.mark.parametrize("text", ["gpu", "xpu"])
def test_missing_devices_can_not_be_counted(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """torchrun refuses it too; no job is better than one on processors that the user did not request."""
    monkeypatch.setattr(f"rallypoint.agent.health.gpu.count_{text}s", lambda environment: 0)
    with pytest.raises(click.BadParameter, match=f"'{text}' asks for one worker per .*, and there is none"):
        WorkerCount()(text)


def test_a_worker_count_is_a_number() -> None:
    """The usual case."""
    assert WorkerCount()("8") == 8


def test_rendezvous_settings_are_pairs() -> None:
    """Spaces and empty parts, as a shell script leaves them, don't matter."""
    convert = Pairs()
    assert convert(" join_timeout = 60 ,last_call_timeout=1,, ") == {
        "join_timeout": "60",
        "last_call_timeout": "1",
    }
    assert convert("") == {}


def test_signals_have_names() -> None:
    """With or without SIG; torchrun's list has commas."""
    assert SignalList()("SIGTERM, int,SIGUSR1,") == (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        (NodeCount(), "x", "'x' is not a number of nodes; expected N or MIN:MAX, as in 4 or 2:4"),
        (NodeCount(), "", "expected N or MIN:MAX"),
        (NodeCount(), "1:", "expected N or MIN:MAX"),
        (NodeCount(), ":2", "expected N or MIN:MAX"),
        (NodeCount(), "1:2:3", "expected N or MIN:MAX"),
        (NodeCount(), "1.5", "expected N or MIN:MAX"),
        (NodeCount(), "3:1", "its maximum below its minimum; did you mean 1:3?"),
        (NodeCount(), "0", "the least is 1"),
        (NodeCount(), "0:2", "the least is 1"),
        (NodeCount(), "-1", "the least is 1"),
        (NodeCount(), "1:100001", "more than 100000 nodes"),
        (NodeCount(), "99999999999999999999", "more than 100000 nodes"),
        (WorkerCount(), "0", "the least is 1"),
        (WorkerCount(), "-2", "the least is 1"),
        (
            WorkerCount(),
            "gpus",
            "'gpus' is not a number of workers; expected a number, auto, cpu, gpu or xpu",
        ),
        (WorkerCount(), "16385", "more than the 16384"),
        (WorkerCount(), "99999999999999999999", "more than the 16384"),
        (Pairs(), "join_timeout", "'join_timeout' is not of the form key=value"),
        (Pairs(), "=60", "'=60' is not of the form key=value"),
        (SignalList(), "SIGTERM,SIGWHAT", "'SIGWHAT' is not a signal; expected names, as in SIGTERM,SIGUSR1"),
        (SignalList(), "SIGKILL", "'SIGKILL' can't be handled by any program"),
    ],
)
def test_other_values_are_refused(kind: click.ParamType[Any], text: str, told: str) -> None:
    """The error states the expected form."""
    with pytest.raises(click.BadParameter, match=re.escape(told)):
        kind(text)


def test_text_is_taken_as_it_is() -> None:
    """Text of any script is accepted."""
    assert Text()("训练 🚂") == "训练 🚂"
    with pytest.raises(click.BadParameter, match="not valid UTF-8"):
        Text()(BROKEN)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["run", "--rdzv-endpoint", "127.0.0.1:1", "--rdzv-id", BROKEN, __file__], "--rdzv-id"),
        (["run", "--standalone", "--node-id", BROKEN, __file__], "--node-id"),
        (["run", "--standalone", "--role", BROKEN, __file__], "--role"),
        (["run", "--standalone", "--local-addr", BROKEN, __file__], "--local-addr"),
        (["run", "--rdzv-endpoint", f"{BROKEN}:1", "--rdzv-id", "x", __file__], "--rdzv-endpoint"),
        (["status", BROKEN], "[RUN_ID]"),
        (["close", BROKEN], "RUN_ID"),
        (["close", "x", "--reason", BROKEN], "--reason"),
    ],
    ids=ascii,
)
def test_bytes_that_are_not_text_are_reported_in_one_line(command: list[str], told: str) -> None:
    """The line names the flag or argument that has them."""
    result = CliRunner().invoke(main, command)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"Invalid value for '{told}" in result.stderr
    assert "'a\\udcff" in result.stderr
