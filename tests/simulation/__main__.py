"""Run seeds: one with its whole trace, or a range of them on all cores. Called by `make simulate` and similar."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait

import click

from simulation.blocks import KINDS, begin_process, play_block, scenario
from simulation.planted import PLANTED, search_by_name

# Seeds of one task of a process.
_BLOCK = 50
# Seconds between two lines of progress.
_PROGRESS = 5.0
# Failures after which a range is stopped.
_MOST_FAILURES = 5


@click.command()
@click.option(
    "--of", type=click.Choice(KINDS), default=KINDS[0], show_default=True, help="What is simulated."
)
@click.option("--seed", type=int, help="Play this seed and show all that happens.")
@click.option("--seeds", type=click.IntRange(1), default=1000, show_default=True, help="Play so many seeds.")
@click.option("--first", type=int, default=0, show_default=True, help="The first of them.")
@click.option("--planted", is_flag=True, help="Plant each bug, and say which seed shows it.")
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count(), show_default=True, help="Processes.")
def main(*, of: str, seed: int | None, seeds: int, first: int, planted: bool, jobs: int) -> None:
    """Play simulations; exit code 1 if one breaks an invariant, 130 after Ctrl-C."""
    if seed is not None:
        sys.exit(_replay(of, seed))
    try:
        failures = _find_planted(of, jobs) if planted else _play_range(of, range(first, first + seeds), jobs)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(130)
    sys.exit(1 if failures else 0)


def _replay(kind: str, seed: int) -> int:
    lines, verdict = scenario(kind, seed).replay()
    for line in lines:
        click.echo(line)
    click.echo(verdict or "no violation")
    return 1 if verdict else 0


def _play_range(kind: str, seeds: range, jobs: int) -> int:
    """Play a range and print the progress; return the number of seeds that failed."""
    begun = said = time.monotonic()
    played = failures = 0
    blocks = iter([seeds[at : at + _BLOCK] for at in range(0, len(seeds), _BLOCK)])
    with _processes(jobs) as pool:
        under_way: set[Future[list[str]]] = set()
        try:
            while _fill(pool, kind, under_way, blocks, 2 * jobs) and failures < _MOST_FAILURES:
                done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                for future in done:
                    for report in future.result():
                        failures += 1
                        click.echo(report + "\n")
                    played += _BLOCK
                if time.monotonic() - said >= _PROGRESS:
                    said = time.monotonic()
                    _print_progress(min(played, len(seeds)), len(seeds), failures, said - begun)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    _print_progress(min(played, len(seeds)), len(seeds), failures, time.monotonic() - begun)
    return failures


def _find_planted(kind: str, jobs: int) -> int:
    """Search for every planted bug of a kind; return the number of those not found."""
    missed = 0
    with _processes(jobs) as pool:
        searches = {
            pool.submit(search_by_name, kind, plant.__name__): plant.__name__ for plant in PLANTED[kind]
        }
        try:
            for search in as_completed(searches):
                try:
                    found = search.result()
                    said = f"seed {found.seed}, {found.seconds:.1f} s" if found else "not found"
                except AssertionError as error:
                    found, said = None, str(error)
                missed += found is None
                click.echo(f"{searches[search]}: {said}")
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return missed


def _processes(count: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(count, mp_context=context, initializer=begin_process)


def _fill(
    pool: ProcessPoolExecutor,
    kind: str,
    under_way: set[Future[list[str]]],
    blocks: Iterator[range],
    most: int,
) -> bool:
    while len(under_way) < most and (block := next(blocks, None)) is not None:
        under_way.add(pool.submit(play_block, kind, block))
    return bool(under_way)


def _print_progress(played: int, of: int, failures: int, seconds: float) -> None:
    rate = played / seconds if seconds else 0.0
    click.echo(f"{played} of {of} seeds, {failures} violations, {seconds:.0f} s, {rate:.0f} seeds/s")


if __name__ == "__main__":
    main()
