"""`make man`: a man page of each command, made from its help."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from rallypoint.cli.main import main

ROOT = Path(__file__).parents[2]


def commands(command: click.Command, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    """Yield a command and its subcommands, with the names of their pages."""
    yield context.command_path.replace(" ", "-"), command
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below, click.Context(below, context, name))


def test_each_command_has_a_page_with_its_flags(tmp_path: Path) -> None:
    """Commands of groups, which are imported when they are called, have pages too."""
    subprocess.run([sys.executable, str(ROOT / ".ci" / "man_pages.py"), str(tmp_path)], check=True)
    expected = dict(commands(main, click.Context(main, info_name="rallypoint", **main.context_settings)))
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.1" for name in expected}
    for name, command in expected.items():
        page = (tmp_path / f"{name}.1").read_text().replace("\\-", "-")
        options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
        assert [each.name for each in options if each.opts[0] not in page] == [], name
