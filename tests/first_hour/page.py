"""docs/first-hour.md: the text of the scenes, and the terminals' output between it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "first-hour.md"
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MOST_ALIKE = 4

# The parts that differ between two runs: folders, names made of random digits, and numbers.
_VARIABLE = (
    (re.compile(r"(?:unix:)?/(?:tmp|run)/[\w./@-]*"), "FOLDER"),
    (re.compile(r"\b(?=\w*\d)[0-9a-f]{6,}\b"), "ID"),
    (re.compile(r"_(?=\w*\d)\w{6,}"), "_ID"),
    (re.compile(r"(?:\d+m)?\d+(?:[.:]\d+)*"), "N"),
    (re.compile(r" +"), " "),
    (re.compile(r"-{3,}"), "---"),
)
# Lines that only a slow machine shows, and one that depends on the sockets that other hosts have left, whose folder
# is the same here.
_OPTIONAL = re.compile(
    r"still there: rank|^N warning paused forgiven=|^N warning the watchdog was paused;"
    r"|^N last call:|^N waiting for nodes:|^Traceback|^WARNING: Location|running again"
    r"|no worker reports progress|^logs of this host|^slowest: host"
)


def shortened(lines: list[str]) -> list[str]:
    """Return the lines, with `…` in the place of most of a long series that differs in numbers only."""
    result: list[str] = []
    for _, group in groupby(lines, normalized):
        alike = list(group)
        result += alike if len(alike) <= _MOST_ALIKE else [alike[0], alike[1], "…", alike[-1]]
    return result


def normalized(line: str) -> str:
    """Return a line with the parts replaced that differ between two runs."""
    for pattern, name in _VARIABLE:
        line = pattern.sub(name, line)
    return line.strip()


def differences(old: str, new: str) -> Iterator[str]:
    """Compare the terminals' output of two pages; yield each difference as a line.

    Two workers write in any order, so the order of the lines in a block does not count, nor does their number.
    """
    before, after = _BLOCK.findall(old), _BLOCK.findall(new)
    if len(before) != len(after):
        yield f"{len(before)} blocks in the page, {len(after)} now"
    for number, blocks in enumerate(zip(before, after, strict=False), start=1):
        had, has = ({normalized(line) for line in block.splitlines()} - {"…"} for block in blocks)
        for sign, lines in (("-", had - has), ("+", has - had)):
            yield from (
                f"block {number}: {sign} {line}" for line in sorted(lines) if not _OPTIONAL.search(line)
            )
    if _BLOCK.sub("", old) != _BLOCK.sub("", new):
        yield "the text between the blocks differs"
