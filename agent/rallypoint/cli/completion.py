"""`rallypoint completion SHELL`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script for SHELL; for bash: eval "$(rallypoint completion bash)"."""
    root = context.find_root()
    script = get_completion_class(shell)
    assert script is not None, "click knows these shells"
    click.echo(script(root.command, {}, "rallypoint", "_RALLYPOINT_COMPLETE").source())
