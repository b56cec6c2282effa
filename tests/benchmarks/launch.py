"""`launch`: the time that an agent adds to that of its program."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.c10d import with_local_names
from benchmarks.clients.launching import LaunchOrder, LaunchResult
from benchmarks.figures import Figure
from benchmarks.processes import RALLYPOINT, client_command, driven
from benchmarks.session import Session
from benchmarks.trials import in_turns

SIZES = (2,)
_TIMES = 5  # per trial
_TIMEOUT = 300.0  # seconds, of a trial

# The least program that runs workers: it starts them and waits for them.
_BARE = (
    "import subprocess, sys\n"
    "workers = [subprocess.Popen([sys.executable, sys.argv[1]]) for _ in range(int(sys.argv[2]))]\n"
    "sys.exit(max(worker.wait() for worker in workers))\n"
)


@dataclass(frozen=True, slots=True)
class _Command:
    """The measured command, and the program alone, whose time is subtracted."""

    command: list[str]
    alone: list[str]


def launch(session: Session) -> Iterator[Figure]:
    """Measure; see docs/benchmarks.md."""
    program = session.folder / "noop.py"
    program.write_text("")
    for workers in session.sizes_or(SIZES):
        variants = {
            name: partial(_overhead, session, each) for name, each in _commands(session, program, workers)
        }
        found = in_turns(session, f"launch n={workers}", variants, lambda it: f"{it.seconds:.3f} s more")
        if not found.keys() >= {"ours", "floor"}:
            continue
        for what, quantity in (("overhead", "seconds"), ("cpu", "cpu")):
            of = {name: getattr(result, quantity) for name, result in found.items()}
            yield Figure(f"launch.{what}", workers, of["ours"], "s", of["floor"], of.get("torch"))


def _commands(session: Session, program: Path, workers: int) -> Iterator[tuple[str, _Command]]:
    alone = [sys.executable, str(program)]
    run = ["--standalone", "--nproc-per-node", str(workers), str(program)]
    yield "floor", _Command([sys.executable, "-c", _BARE, str(program), str(workers)], alone)
    yield "ours", _Command([str(RALLYPOINT), "run", *run], alone)
    if session.torch is not None:
        torchrun = [str(session.torch), "-m", "torch.distributed.run", *run]
        yield "torch", _Command(torchrun, [str(session.torch), str(program)])


def _overhead(session: Session, what: _Command) -> LaunchResult:
    whole, alone = (measured_launch(session, command) for command in (what.command, what.alone))
    return LaunchResult(whole.seconds - alone.seconds, whole.cpu - alone.cpu)


def measured_launch(session: Session, command: list[str]) -> LaunchResult:
    """Measure a command, from its start to its end; see `clients.launching`."""
    order = LaunchOrder(command, _TIMES, compiled(session))
    client = [*with_local_names(session.folder), *client_command("launching", order)]
    return LaunchResult(**driven(client, session.folder / "client-launching.log", _TIMEOUT))


def compiled(session: Session) -> str:
    """Return a folder for compiled Python files: an installed package has them, so the measured programs must too."""
    return str(session.folder / "compiled")
