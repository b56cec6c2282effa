"""Check a history: `PYTHONPATH=tests python -m ha.check FILE` prints its violations."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import click

from ha.fenced_states import check_fenced_states
from ha.findings import Finding
from ha.history import History, HistoryIsCutError, Operation, Trouble, read
from ha.invariants import check_invariants
from ha.journal_rules import check_journal
from ha.stores import check_stores


def check(history: History) -> list[Finding]:
    """Return all violations in a history."""
    operations = list(history.of(Operation))
    return [
        *check_fenced_states(operations),
        *check_stores(operations),
        *check_invariants(history),
        *check_journal(history),
    ]


def counts(history: History) -> Counter[tuple[str, str]]:
    """Return the number of operations by kind and outcome."""
    return Counter((each.what, each.outcome.value) for each in history.of(Operation))


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--troubles", is_flag=True, help="Also show what the nemesis did, and when.")
def main(file: Path, troubles: bool) -> None:
    """Check a history; exit code 1 if something is wrong with it, 2 if it can't be judged."""
    try:
        history = read(file)
    except (ValueError, HistoryIsCutError) as error:
        click.echo(str(error), err=True)
        sys.exit(2)
    for (what, outcome), count in sorted(counts(history).items()):
        click.echo(f"{count:9} {what} {outcome}")
    for trouble in history.of(Trouble) if troubles else ():
        click.echo(f"{trouble.at:12.3f} {trouble.what}")
    found = check(history)
    for finding in found:
        click.echo(str(finding))
    click.echo(f"{len(found)} findings")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
