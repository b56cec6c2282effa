"""Writes a man page of each command from its help, with click-man: `make man`.

Usage: man_pages.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
from click_man.core import write_man_pages

from rallypoint.cli.main import main
from rallypoint.serving.info import VERSION


def load_commands(group: click.Group, parent: click.Context | None = None) -> None:
    """Import the commands of a group, and of its groups: click-man sees none that is imported at its call."""
    context = click.Context(group, parent, group.name)
    for name in group.list_commands(context):
        command = group.commands[name] = group.get_command(context, name)
        if isinstance(command, click.Group):
            load_commands(command, context)


folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
load_commands(main)
write_man_pages("rallypoint", main, version=VERSION, target_dir=str(folder))
