"""Health checks of a host are found by name, and an unusable one is reported before the job begins."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from rallypoint.agent.health.checks import ENTRY_POINTS, CheckContext, HealthCheckError, parse_health_check


def plug_in(value: str, name: str = "ipmi") -> metadata.EntryPoint:
    """An entry point as a package would announce it."""
    return metadata.EntryPoint(name, value, ENTRY_POINTS)


def says_what_it_was_given(argument: str) -> str | None:
    """A plug-in that returns its argument."""
    return f"asked for {argument!r}" if argument != "fine" else None


@pytest.fixture
def plug_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two installed plug-ins; one of them is broken."""
    installed = [
        plug_in("agent.health.test_health:says_what_it_was_given"),
        plug_in("agent.health.test_health:no_such_function", "broken"),
    ]
    monkeypatch.setattr(metadata, "entry_points", lambda group: installed if group == ENTRY_POINTS else [])


def test_disks_and_memory_are_checked(tmp_path: Path) -> None:
    """A requirement of 0 % is always met, one of 100 % never."""
    for name in ("disk", "memory"):
        assert parse_health_check(f"{name}:0%").check is not None
        for amount, healthy in (("0%", True), ("100%", False)):
            look = parse_health_check(f"{name}:{amount}").check
            assert look is not None
            assert (look(CheckContext((tmp_path,))) is None) is healthy


def test_a_command_is_split_as_a_shell_does() -> None:
    """Its program is found on the job's PATH."""
    check = parse_health_check("command:sh -c 'exit 0'", os.environ["PATH"])
    assert (check.program, check.check) == (("sh", "-c", "exit 0"), None)


def test_a_plug_in_gets_the_text_after_its_name(plug_ins: None) -> None:
    """It gets the whole text after the first colon, or an empty one."""
    for text, why in (("ipmi", "''"), ("ipmi:a:b", "'a:b'")):
        look = parse_health_check(text).check
        assert look is not None
        assert look(CheckContext()) == f"asked for {why}"
    look = parse_health_check("ipmi:fine").check
    assert look is not None
    assert look(CheckContext()) is None


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("disk", "health check 'disk': '' is not a quantity; expected as in disk:2% or disk:10GiB"),
        ("disk:2", "health check 'disk:2': '2' has no unit; expected as in disk:2% or disk:10GiB"),
        (
            "memory:x",
            "health check 'memory:x': 'x' is not a quantity; expected as in memory:5% or memory:1GiB",
        ),
        ("command:", "health check 'command:' names no program; expected as in command:/opt/check --all"),
        ("command:'x", 'health check "command:\'x": no closing quotation; check its quotes'),
        ("command:/none", "health check 'command:/none': '/none' does not exist"),
        (
            "gpu:0",
            "there is no health check 'gpu:0'; expected one of disk, memory, gpu, command, broken, ipmi, as in",
        ),
        (
            "dsk:2%",
            "there is no health check 'dsk:2%'; expected one of disk, memory, gpu, command, broken, ipmi, as",
        ),
        ("broken", "health check 'broken' can't be loaded: AttributeError("),
    ],
)
def test_an_invalid_check_is_a_one_line_error(plug_ins: None, text: str, error: str) -> None:
    """The error has the valid forms."""
    with pytest.raises(HealthCheckError) as raised:
        parse_health_check(text)
    assert str(raised.value).startswith(error)


def test_gpus_without_their_library_are_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the user would believe that the host is checked."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(HealthCheckError, match=r"health check 'gpu': .* pip install nvidia-ml-py"):
        parse_health_check("gpu")
