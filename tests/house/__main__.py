"""`python -m house`: print each figure with its limit and target; `--only NAME` lists the files behind some of them."""

from __future__ import annotations

import click

from house.figures import RULES


@click.command()
@click.option(
    "--only", default="", metavar="TEXT", help="Show only rules with this in their name, with details."
)
def main(only: str) -> None:
    """Print the table of the house rules."""
    click.echo(f"{'':46}{'now':>9}{'limit':>9}{'target':>9}")
    for rule in RULES:
        if only not in rule.name:
            continue
        figure = rule.measure()
        remark = ""
        if not rule.holds(figure.value):
            remark = "  over the limit"
        elif rule.is_loose(figure.value):
            remark = f"  the limit can be {figure.value:,g}"
        row = f"{rule.name:46}{_number(figure.value)}{_number(rule.limit)}{_number(rule.target)}{remark}"
        click.echo(row)
        if only:
            click.echo("\n".join(f"    {line}" for line in figure.details))


def _number(value: float) -> str:
    return f"{value:9,.0f}" if value == int(value) else f"{value:9,.1f}"


if __name__ == "__main__":
    main()
