"""Formatting for people: tables, texts, times."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from rallypoint.rpc.text import printable

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from rich.console import Console

# Characters; longer than any of our sentences.
_LONGEST_LINE = 4096


def plain_console() -> Console:
    """Return a console that prints text unchanged: names and sentences come from users and may look like markup.

    Without a terminal, table lines are as long as they need to be, so that `grep` finds whole lines.
    """
    from rich.console import Console  # noqa: PLC0415 (slow, and not for --help)

    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _LONGEST_LINE
    return console


def json_fields(message: Message) -> dict[str, Any]:
    """Return the fields of a message for `--json`, also those that are not set."""
    from google.protobuf.json_format import MessageToDict  # noqa: PLC0415 (slow, and not for --help)

    return MessageToDict(message, always_print_fields_with_no_presence=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], own_line: Sequence[str] = ()) -> None:
    """Print a table. Cells are never cut or broken.

    Args:
        own_line: Columns that leave the table one by one, until it fits a narrow terminal: each row is then followed by
            a line for each of them.
    """
    from rich.cells import cell_len  # noqa: PLC0415 (slow, and not for --help)

    console = plain_console()
    table = [[*columns], *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    kept, moved = [*range(len(columns))], []
    for name in own_line:
        if not console.is_terminal or sum(widths[column] + 2 for column in kept) <= console.width:
            break
        moved.append(columns.index(name))
        kept.remove(moved[-1])
    for number, row in enumerate(table):
        padded = (f" {row[column]}{' ' * (widths[column] - cell_len(row[column]))} " for column in kept)
        console.print("".join(padded).rstrip(), style="bold" if number == 0 else None)
        for column in sorted(moved) if number > 0 else ():
            for line in indented(f"{columns[column]}: {row[column]}", console.width):
                console.print(line)


def indented(text: str, width: int) -> list[str]:
    """Return a text as indented lines of at most `width` columns, which break between words."""
    lines = textwrap.wrap(text, width - 4, break_long_words=False, break_on_hyphens=False)
    return [f"    {line}" for line in lines]


# ---- Points in time and durations, as people write and read them.


_SPAN = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(s|m|h|d)")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def parse_moment(text: str, now: datetime) -> datetime:
    """Return the time that a text names: an age as in `90s`, `10m`, `2h`, `1.5d`, or an ISO 8601 time.

    A time without an offset is local.

    Raises:
        ValueError: The text is neither.
    """
    span = _SPAN.fullmatch(text)
    try:
        if span is not None:
            return now - timedelta(seconds=float(span[1]) * _UNITS[span[2]])
        return datetime.fromisoformat(text).astimezone()
    except (OverflowError, ValueError):
        raise ValueError(
            f"{text!r} is not a time; expected an age, as in 90s, 10m, 2h or 1d, "
            "or an ISO time, as in 2026-11-20T14:08:49"
        ) from None


class TimestampParam(click.ParamType[datetime]):
    """A point in time on a command line; see `parse_moment`."""

    name = "10m|TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """Parse the value."""
        if isinstance(value, datetime):
            return value
        try:
            return parse_moment(str(value), datetime.now(UTC))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def show_moment(unix_seconds: float) -> str:
    """Format a time as local date and time, to the millisecond."""
    moment = datetime.fromtimestamp(round(unix_seconds, 3), UTC).astimezone()
    return moment.replace(tzinfo=None).isoformat(" ", "milliseconds")


def show_span(seconds: float) -> str:
    """Format seconds: to the millisecond under a minute, else in the two largest units."""
    if seconds < 0:  # a wall clock was set back
        return f"-{show_span(-seconds)}"
    if round(seconds, 3) < 60:
        return f"{seconds:.3f}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02}h"
