"""`python -m golden`: rewrite the golden files; `--check` compares them instead, and exits with 1 if one differs."""

from __future__ import annotations

import click

from golden.files import difference, stored, write
from golden.render import render


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; print the differences.")
def main(check: bool) -> None:
    """Rewrite or compare the golden files."""
    old, new = stored(), render()
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if not check:
        write(new)
    for name in names:
        click.echo(difference(name, old.get(name, ""), new.get(name, "")) if check else f"changed: {name}")
    if check and names:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
