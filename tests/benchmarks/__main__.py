"""`python -m benchmarks`: measure, print a table, write `bench.json`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click
from rich.console import Console

from benchmarks.c10d import find_torch, torch_handlers
from benchmarks.etcd import etcd
from benchmarks.expires import expires
from benchmarks.failover import failover
from benchmarks.fanout import fanout
from benchmarks.figures import Figure, show_figures, write_figures
from benchmarks.flood import flood
from benchmarks.heartbeat import heartbeat
from benchmarks.idle import idle
from benchmarks.journal import journal
from benchmarks.launch import launch
from benchmarks.processes import BenchmarkError
from benchmarks.reap import reap
from benchmarks.regroup import newcomer, restart
from benchmarks.rendezvous import rendezvous, security
from benchmarks.session import Benchmark, Session
from benchmarks.store import store
from benchmarks.timer_requests import timer_requests
from benchmarks.torch_store import torch_store
from benchmarks.watchdog import watchdog

BENCHMARKS: dict[str, Benchmark] = {
    "rendezvous": rendezvous,
    "security": security,
    "fanout": fanout,
    "failover": failover,
    "heartbeat": heartbeat,
    "store": store,
    "torch-store": torch_store,
    "torch-handlers": torch_handlers,
    "journal": journal,
    "etcd": etcd,
    "expires": expires,
    "reap": reap,
    "watchdog": watchdog,
    "timer-requests": timer_requests,
    "launch": launch,
    "restart": restart,
    "newcomer": newcomer,
    "idle": idle,
    "flood": flood,
}
_WIDTH = 150  # columns of the table, if stdout is not a terminal
ROOT = Path(__file__).parent.parent.parent


def _chosen(_: click.Context, __: click.Parameter, names: tuple[str, ...]) -> list[str]:
    """Accept `--only a --only b` and `--only a,b`."""
    chosen = [name for part in names for name in part.replace(",", " ").split()]
    for name in chosen:
        if name not in BENCHMARKS:
            raise click.BadParameter(f"no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    return chosen or list(BENCHMARKS)


def _sizes(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> tuple[int, ...]:
    """Accept `--n 256 --n 1024` and `--n 256,1024`."""
    sizes = []
    for value in (part for each in values for part in each.replace(",", " ").split()):
        if not value.isdecimal() or not 2 <= int(value) <= 100_000:
            raise click.BadParameter(f"{value!r} is no number from 2 to 100000")
        sizes.append(int(value))
    return tuple(sizes)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--only",
    multiple=True,
    callback=_chosen,
    metavar="NAME",
    help=f"One of: {', '.join(BENCHMARKS)}. Repeatable; default: all.",
)
@click.option(
    "--n",
    "sizes",
    multiple=True,
    callback=_sizes,
    metavar="N",
    help="Size, in place of a benchmark's own. Repeatable.",
)
@click.option(
    "--trials",
    type=click.IntRange(1, 100),
    default=3,
    show_default=True,
    help="How often each thing is measured; the median counts.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=ROOT / "var" / "benchmarks",
    show_default="var/benchmarks",
    help="For logs and journals; on a real disk.",
)
@click.option(
    "--json",
    "place",
    type=click.Path(path_type=Path, dir_okay=False),
    default=ROOT / "bench.json",
    show_default="bench.json",
    help="Where the figures are written.",
)
@click.option(
    "--torch",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Python that has torch.  [default: this one, or .venv/torch/bin/python]",
)
@click.option("--peer/--no-peer", default=True, show_default=True, help="Measure torch, too, where it is.")
def main(
    *,
    only: list[str],
    sizes: tuple[int, ...],
    trials: int,
    folder: Path,
    place: Path,
    torch: Path | None,
    peer: bool,
) -> None:
    """Measure Rallypoint against its floor, a bare gRPC server that does no work, and against torch.

    Exit code 0: all was measured and no call was lost. 1: not so. 130: interrupted; the figures so far are kept.
    """
    # A benchmark takes minutes: fail now, and not when its results are written.
    for needed in (folder, place.absolute().parent):
        try:
            needed.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise click.ClickException(f"cannot make the folder {needed}: {error.strerror}") from None
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    began = time.monotonic()

    def say(line: str) -> None:
        console.print(f"{time.monotonic() - began:6.1f} s  {line}")

    python = (torch or find_torch(ROOT)) if peer else None
    session = Session(folder.absolute(), sizes, trials, python, say)
    figures: list[Figure] = []
    interrupted = False
    try:
        for name in only:
            _measure(name, session, figures)
    except KeyboardInterrupt:
        interrupted = True
    write_figures(place, figures)
    show_figures(Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False), figures)
    for failure in session.failures:
        console.print(f"FAILED: {failure}", style="red")
    if interrupted:
        console.print("interrupted", style="red")
        sys.exit(130)  # the exit code of a shell for Ctrl-C
    sys.exit(1 if session.failures else 0)


def _measure(name: str, session: Session, figures: list[Figure]) -> None:
    try:
        figures.extend(BENCHMARKS[name](session))  # figures before an error are kept
    except BenchmarkError as error:
        session.fail(f"{name}: {error}")


if __name__ == "__main__":
    main()
