"""`python -m house`: print each figure with its limit, target and former value; `--only NAME` lists its files."""

from __future__ import annotations

import click

from house.figures import RULES


@click.command()
@click.option(
    "--only", default="", metavar="TEXT", help="Show only rules with this in their name, with details."
)
def main(only: str) -> None:
    """Print the table of the house rules."""
    click.echo(f"{'':46}{'before':>9}{'now':>9}{'limit':>9}{'target':>9}")
    for rule in RULES:
        if only not in rule.name:
            continue
        figure = rule.measure()
        remark = ""
        if not rule.holds(figure.value):
            remark = "  over the limit"
        elif rule.is_loose(figure.value):
            remark = f"  the limit can be {figure.value:,g}"
        numbers = (rule.before, figure.value, rule.limit, rule.target)
        click.echo(f"{rule.name:46}{''.join(map(_number, numbers))}{remark}")
        if only:
            click.echo("\n".join(f"    {line}" for line in figure.details))


def _number(value: float) -> str:
    return f"{value:9,.0f}" if value == int(value) else f"{value:9,.1f}"


if __name__ == "__main__":
    main()
