"""Values of torchrun's flags: what is sensible is taken, anything else named with what was expected."""

from __future__ import annotations

import os
import re

import click
import pytest
from click.testing import CliRunner

from rallypoint.cli.main import main
from rallypoint.cli.nodes import NodeCount, RendezvousConfType, Text, WorkerCount

BROKEN = b"a\xff".decode(errors="surrogateescape")  # as Python hands on what is no UTF-8


@pytest.mark.parametrize(
    ("text", "nodes"),
    [("1", (1, 1)), ("4", (4, 4)), ("2:4", (2, 4)), ("3:3", (3, 3)), ("100000", (100_000,) * 2)],
)
def test_node_counts_are_a_number_or_a_range(text: str, nodes: tuple[int, int]) -> None:
    """As torchrun has them."""
    assert NodeCount()(text) == nodes


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x", "'x' is not a number of nodes; expected N or MIN:MAX, as in 4 or 2:4"),
        ("", "expected N or MIN:MAX"),
        ("1:", "expected N or MIN:MAX"),
        (":2", "expected N or MIN:MAX"),
        ("1:2:3", "expected N or MIN:MAX"),
        ("1.5", "expected N or MIN:MAX"),
        ("3:1", "its maximum below its minimum; did you mean 1:3?"),
        ("0", "the least is 1"),
        ("0:2", "the least is 1"),
        ("-1", "the least is 1"),
        ("1:100001", "more than 100000 nodes"),
        ("99999999999999999999", "more than 100000 nodes"),
    ],
)
def test_other_node_counts_are_refused(text: str, told: str) -> None:
    """With what was expected."""
    with pytest.raises(click.BadParameter, match=re.escape(told)):
        NodeCount()(text)


@pytest.mark.parametrize("text", ["auto", "cpu"])
def test_workers_can_be_one_per_processor(text: str) -> None:
    """Those that this process may use: a container may have fewer than the host."""
    assert WorkerCount()(text) == len(os.sched_getaffinity(0))


def test_a_worker_count_is_a_number() -> None:
    """The usual case."""
    assert WorkerCount()("8") == 8


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0", "the least is 1"),
        ("-2", "the least is 1"),
        ("gpus", "'gpus' is not a number of workers; expected a number, auto or cpu"),
        ("16385", "more than the 16384"),
        ("99999999999999999999", "more than the 16384"),
    ],
)
def test_other_worker_counts_are_refused(text: str, told: str) -> None:
    """With what was expected."""
    with pytest.raises(click.BadParameter, match=re.escape(told)):
        WorkerCount()(text)


def test_rendezvous_settings_are_pairs() -> None:
    """Spaces and empty parts, as a shell script leaves them, don't matter."""
    convert = RendezvousConfType()
    assert convert(" join_timeout = 60 ,last_call_timeout=1,, ") == {
        "join_timeout": "60",
        "last_call_timeout": "1",
    }
    assert convert("") == {}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("join_timeout", "'join_timeout' is not of the form key=value"),
        ("=60", "'=60' is not of the form key=value"),
        ("timeout=60", "'timeout' is no setting; known: close_timeout, confirm_timeout"),
        ("join_timeout=long", "join_timeout='long' is not a number of seconds"),
    ],
)
def test_other_rendezvous_settings_are_refused(text: str, told: str) -> None:
    """With what was expected."""
    with pytest.raises(click.BadParameter, match=re.escape(told)):
        RendezvousConfType()(text)


def test_text_is_taken_as_it_is() -> None:
    """Of any script."""
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
def test_bytes_that_are_no_text_are_told_in_one_line(command: list[str], told: str) -> None:
    """With the flag or argument that has them."""
    result = CliRunner().invoke(main, command)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"Invalid value for '{told}" in result.stderr
    assert "'a\\udcff" in result.stderr
