"""Flags for what a service may use: so many, so many bytes, for so long; never nothing, never endless."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from rallypoint.serving.options import Seconds, Setting

Flag = Callable[[Callable[..., Any]], Callable[..., Any]]
"""What gives a click command one more option."""

# What the machine can't have, in any unit: a slip of the finger, rather than a wish.
_MOST = 10**12
_LONGEST = 366 * 24 * 3600.0


class _Whole(click.IntRange):
    """A whole number within bounds."""

    name = "whole number"


def count(name: str, default: int, help_: str, most: int = _MOST) -> Flag:
    """A flag for how many of something there may be; at least one."""
    return click.option(name, cls=Setting, type=_Whole(1, most), default=default, metavar="N", help=help_)


def size(name: str, default: int, help_: str) -> Flag:
    """A flag for how many bytes something may have; at least one."""
    return click.option(
        name, cls=Setting, type=_Whole(1, _MOST), default=default, metavar="BYTES", help=help_
    )


def seconds(name: str, default: float, help_: str, least: float = 1.0) -> Flag:
    """A flag for how long something lasts: from `least` seconds to a year."""
    return click.option(
        name, cls=Setting, type=Seconds(least, _LONGEST), default=default, metavar="SECONDS", help=help_
    )
