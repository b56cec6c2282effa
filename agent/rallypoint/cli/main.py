"""`rallypoint …`: the command line."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from click.shell_completion import get_completion_class

# ---- What the command was started with: its environment, and its standard streams.
#
# Importing gRPC's chassis sets variables that tame gRPC in this process; workers must not inherit them.


ENVIRONMENT = dict(os.environ)


def complete_streams() -> None:
    """Put /dev/null where this program was started without a standard stream.

    The first socket that it opens would get the stream's number otherwise, and what workers print would go there.
    """
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)  # the programs that we start need it as much
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115 (for as long as we live)


complete_streams()
if isinstance(sys.stdout, io.TextIOWrapper):
    # Names come from users: what the terminal's encoding does not have must not end a command with a traceback.
    sys.stdout.reconfigure(errors="backslashreplace")

# First of all: what other modules do to the environment is not for workers to inherit.


class UsageMistake(click.ClickException):
    """A command line that can't be followed. One line, exit code 2."""

    exit_code = 2


@contextmanager
def _one_line_error() -> Iterator[None]:
    """Turns click's usage errors, which come with the usage above them, into the one line that matters.

    And Ctrl-C into the exit code that a shell gives it, where click has "Aborted!" and 1.
    """
    try:
        yield
    except click.UsageError as error:
        if type(error).show is not click.UsageError.show:  # a group without a command shows its help
            raise
        command = error.ctx.command_path if error.ctx is not None else "rallypoint"
        message = error.format_message().removesuffix(".")
        raise UsageMistake(f"{message} (`{command} --help` shows what there is)") from None
    except KeyboardInterrupt:  # while modules are loaded; whoever serves or runs handles Ctrl-C itself
        click.echo("Error: interrupted", err=True)
        raise SystemExit(130) from None


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used: `--help` and completion load no gRPC."""

    def __init__(self, *args: Any, lazy: dict[str, tuple[str, str]], **attributes: Any) -> None:
        """`lazy`: for each command its `module:attribute`, and the line that `--help` shows."""
        super().__init__(*args, **attributes)
        self._lazy = lazy

    def make_context(self, *args: Any, **attributes: Any) -> click.Context:
        """Parse the group's own part of the command line."""
        with _one_line_error():
            return super().make_context(*args, **attributes)

    def invoke(self, context: click.Context) -> Any:
        """Parse and run the command."""
        with _one_line_error():
            return super().invoke(context)

    def list_commands(self, context: click.Context) -> list[str]:
        """Names of the commands, in the order of the table."""
        return list(self._lazy)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """The command of that name."""
        if name not in self._lazy:
            return None
        module, _, attribute = self._lazy[name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_line) for name, (_, help_line) in self._lazy.items()])


@click.command(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    lazy={
        "run": ("rallypoint.cli.run:run", "Run a program on this host as part of a distributed job."),
        "submit": (
            "rallypoint.cli.submit:submit",
            "Run a program on the agents of several hosts, from here.",
        ),
        "serve": ("rallypoint.cli.serve:serve", "Serve rendezvous, timer or agent."),
        "status": ("rallypoint.cli.status:status", "Show runs, or one run with its nodes."),
        "replicas": (
            "rallypoint.cli.runs:replicas",
            "Show who serves rendezvous, and which of them owns a run.",
        ),
        "events": ("rallypoint.cli.events:events", "Show what happened to a run, and what happens."),
        "rounds": (
            "rallypoint.cli.rounds:rounds",
            "Show a run's rounds: why each ended, how long the next took.",
        ),
        "progress": (
            "rallypoint.cli.timers:progress",
            "Show how far a run's workers have come, and who stopped first.",
        ),
        "timers": ("rallypoint.cli.timers:timers", "Show workers' timers: what counts down, what ran out."),
        "scopes": ("rallypoint.cli.timers:scopes", "Show, or forget, how long scopes were seen to take."),
        "agent": (
            "rallypoint.cli.agent:agent",
            "Show and steer the jobs of one agent: logs, stacks, drain …",
        ),
        "restart": ("rallypoint.cli.runs:restart", "Start all workers of a run anew."),
        "evict": ("rallypoint.cli.runs:evict", "Take a node out of a run and keep it out."),
        "close": ("rallypoint.cli.runs:close", "End a run on all its hosts."),
        "completion": ("rallypoint.cli.main:completion", "Print the completion script for a shell."),
    },
)
@click.version_option(package_name="rallypoint")
def main() -> None:
    """Keep distributed training jobs alive while hosts and processes come and go.

    `rallypoint run` is used as torchrun is. On one host it needs nothing else:

        rallypoint run --standalone --nproc-per-node 2 train.py
    """


# ---- `rallypoint completion SHELL`.


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script for SHELL; for bash: eval "$(rallypoint completion bash)"."""
    root = context.find_root()
    script = get_completion_class(shell)
    assert script is not None, "click knows these shells"
    click.echo(script(root.command, {}, "rallypoint", "_RALLYPOINT_COMPLETE").source())
