"""`rallypoint …`: the command line."""

from __future__ import annotations

import gc
import importlib
import io
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import click
from click.shell_completion import get_completion_class

# ---- The process as it was started: its environment, and its standard streams.
#
# Importing gRPC's set-up code sets variables that restrict gRPC in this process; workers must not inherit them.


ENVIRONMENT = dict(os.environ)


def complete_streams() -> None:
    """Open /dev/null in place of each missing standard stream.

    Otherwise the first socket opened gets the stream's number, and the output of workers goes into it.
    """
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)  # child processes need it too
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115 (open until this process ends)


complete_streams()
if isinstance(sys.stdout, io.TextIOWrapper):
    # Users choose names: a character that the terminal's encoding lacks must not end a command with a traceback.
    sys.stdout.reconfigure(errors="backslashreplace")

# Runs before other imports: workers must not inherit changes that other modules make to the environment.


class UsageMistake(click.ClickException):
    """A wrong command line. One line, exit code 2."""

    exit_code = 2


class HostExhausted(click.ClickException):
    """This host lacks a resource. One line, exit code 3: another host may have it."""

    exit_code = 3


_FEWEST_FILES = 64
"""Least limit of open files. With less, some commands fail, and gRPC aborts the process where it can open none."""


def check_open_files() -> None:
    """Check the limit of open files.

    Raises:
        UsageMistake: It is too low for any command.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < _FEWEST_FILES:
        raise UsageMistake(
            f"the limit of open files is {limit}, of at least {_FEWEST_FILES}: raise it (ulimit -n 4096)"
        )


def check_installation() -> None:
    """Check that the packages rallypoint and rallypoint-worker, which share files, are of one version if both are here.

    Raises:
        UsageMistake: They are not: the files are those of the one that was installed last.
    """
    found = dict(
        path.stem.rsplit("-", 1) for path in Path(__file__).parents[2].glob("rallypoint*-*.dist-info")
    )
    worker = found.get("rallypoint_worker")
    if worker is not None and worker != found.get("rallypoint", worker):
        raise UsageMistake(
            f"rallypoint {found['rallypoint']} and rallypoint-worker {worker} are installed in one environment and "
            "have files in common: uninstall both, then install rallypoint, which contains the other"
        )


@contextmanager
def _one_line_error() -> Iterator[None]:
    """Print click's usage errors as one line, without the usage text; also errors of a full disk and the like.

    Ctrl-C gives the shell's exit code 130, where click prints "Aborted!" and exits with 1.
    """
    try:
        yield
    except click.UsageError as error:
        if type(error).show is not click.UsageError.show:  # a group without a command shows its help
            raise
        command = error.ctx.command_path if error.ctx is not None else "rallypoint"
        message = error.format_message().removesuffix(".")
        raise UsageMistake(f"{message} (`{command} --help` shows what there is)") from None
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("rallypoint"):
            raise
        raise UsageMistake(
            f"the module {error.name} is missing, perhaps because rallypoint-worker was uninstalled here; install "
            "rallypoint again (pip install --force-reinstall)"
        ) from None
    except OSError as error:
        from rallypoint.rpc.endpoint import host_exhausted  # noqa: PLC0415 (not for --help)

        if not host_exhausted(error):
            raise
        where = f": {error.filename}" if error.filename else ""
        raise HostExhausted(f"{error.strerror}{where}") from None
    except KeyboardInterrupt:  # while modules are loaded; `serve` and `run` handle Ctrl-C themselves
        click.echo("Error: interrupted", err=True)
        raise SystemExit(130) from None


@contextmanager
def importing() -> Iterator[None]:
    """Import modules without searching for garbage: no loaded object can be freed, now or later.

    The search takes a tenth of the import time, and another 10 ms afterwards if the objects are not set apart.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class LazyGroup(click.Group):
    """A group that imports a command when it is used: `--help` and completion load no gRPC."""

    def __init__(self, *args: Any, lazy: dict[str, tuple[str, str]], **attributes: Any) -> None:
        """`lazy`: for each command its `module:attribute`, and its line in `--help`."""
        super().__init__(*args, **attributes)
        self._lazy = lazy

    def make_context(self, *args: Any, **attributes: Any) -> click.Context:
        """Parse the group's own part of the command line."""
        with _one_line_error():
            return super().make_context(*args, **attributes)

    def invoke(self, context: click.Context) -> Any:
        """Parse and run the command."""
        with _one_line_error():
            check_open_files()
            check_installation()
            return super().invoke(context)

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names of the commands, in the order of the table."""
        return list(self._lazy)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Import and return the command, or None."""
        if name not in self._lazy:
            return None
        module, _, attribute = self._lazy[name][0].partition(":")
        with nullcontext() if module in sys.modules else importing():
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
            "Show the rendezvous replicas, and which one owns a run.",
        ),
        "events": ("rallypoint.cli.events:events", "Show the events of a run, past and new."),
        "rounds": (
            "rallypoint.cli.rounds:rounds",
            "Show a run's rounds: why each ended, and the time to the next.",
        ),
        "progress": (
            "rallypoint.cli.timers:progress",
            "Show the progress of a run's workers, slowest first.",
        ),
        "timers": ("rallypoint.cli.timers:timers", "Show the timers of workers, expired ones first."),
        "scopes": ("rallypoint.cli.timers:scopes", "Show, or forget, the learned timeouts of scopes."),
        "agent": (
            "rallypoint.cli.agent:agent",
            "Show and control the jobs of one agent: logs, stacks, drain …",
        ),
        "logs": ("rallypoint.cli.agent:run_logs", "Print the output of a run's workers on all its hosts."),
        "restart": ("rallypoint.cli.runs:restart", "Restart all workers of a run."),
        "evict": ("rallypoint.cli.runs:evict", "Remove a node from a run and refuse it."),
        "close": ("rallypoint.cli.runs:close", "End a run on all its hosts."),
        "delete": ("rallypoint.cli.runs:delete", "Forget a run that is over, so that its name is free."),
        "conformance": (
            "rallypoint.conformance.command:conformance",
            "Check an agent or a worker in any language.",
        ),
        "token": ("rallypoint.cli.credentials:token", "Make keys for tokens, issue and inspect tokens."),
        "tls": ("rallypoint.cli.credentials:tls", "Make certificates for a trial of mutual TLS."),
        "completion": ("rallypoint.cli.main:completion", "Print the completion script for a shell."),
    },
)
@click.version_option(package_name="rallypoint")
def main() -> None:
    """Keep distributed training jobs alive while hosts and processes come and go.

    Use `rallypoint run` like torchrun. A job on one host needs nothing else:

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


if __name__ == "__main__":
    main(prog_name="rallypoint")
