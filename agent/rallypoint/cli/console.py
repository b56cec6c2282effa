"""Where commands print tables and sentences for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# Characters; longer than any sentence of ours.
_LONGEST_LINE = 4096


def plain_console() -> Console:
    """A console that shows names and sentences as they are: they come from users, and may look like markup.

    Lines of a table are as long as they need where no terminal limits them: `grep` is to find whole ones.
    """
    from rich.console import Console  # noqa: PLC0415 (slow, and not for --help)

    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _LONGEST_LINE
    return console


def printable(text: str) -> str:
    """A text that can do nothing to a terminal, and is one line: names are users' own, and may hold anything."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)
