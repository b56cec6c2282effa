"""docs/hangs.md matches the command line: each setting of the timer service, with its default."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from rallypoint.cli.serve import serve

PAGE = (Path(__file__).parents[2] / "docs" / "hangs.md").read_text()


def options(command: str) -> dict[str, click.Option]:
    """Return a role's options, by flag."""
    group = serve
    return {each.opts[0]: each for each in group.commands[command].params if isinstance(each, click.Option)}


def test_the_table_has_each_setting_and_its_default() -> None:
    """The settings of every server are in docs/operating.md."""
    own = options("timer").keys() - options("agent").keys()
    told: dict[str, str] = {}
    for line in re.findall(r"^\| (`--.*)$", PAGE, re.MULTILINE):
        flags, defaults, *_ = line.split(" | ")
        names = re.findall(r"`(--[a-z-]+)`", flags)
        told |= zip(names, re.split(r", ", defaults.strip("`")), strict=True)
    assert told.keys() == own
    for flag, value in told.items():
        default = options("timer")[flag].default
        assert value.replace(",", "") == (default if isinstance(default, str) else f"{default:.15g}"), flag


@pytest.mark.parametrize("option", ["--evidence-timeout", "--stall-after", "--timer-endpoint"])
def test_options_of_run_that_the_page_names_exist(option: str) -> None:
    """Readers try them."""
    from rallypoint.cli.run import run

    assert option in PAGE
    assert option in {name for each in run.params for name in each.opts}


def test_the_calls_on_the_page_exist() -> None:
    """The methods of the service exist too."""
    from rallypoint.timer.v1 import timer_service_pb2 as pb

    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["TimerService"].methods}
    named = {"BatchUpdateTimers", "ClearTimers", "ListTimers", "AcquireTimer", "ReleaseTimer"}
    assert named <= methods
    assert [name for name in named if name not in PAGE] == []
