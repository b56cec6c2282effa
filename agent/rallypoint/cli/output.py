"""Formatting for people: tables, texts, times."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
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
