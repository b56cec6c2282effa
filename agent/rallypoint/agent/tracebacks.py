"""Finds the traceback that ended a program in what it wrote to standard error."""

from __future__ import annotations

import re

_AFTER = 50  # lines: what follows the traceback of a program's end is a few words of atexit handlers

# torch.distributed puts "[rank3]: " before every line of an uncaught exception's traceback.
_RANK = re.compile(r"^\[rank\d+\]: ?")
_HEADER = re.compile(r"^(  \+ Exception Group )?Traceback \(most recent call last\):$")
_FATAL = re.compile(r"^Fatal Python error: ")
_LINKS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


def final_traceback(text: str, *, at_end: bool) -> tuple[str, str] | None:
    """Finds the last traceback, with the exceptions it is chained to, or faulthandler's dump.

    Args:
        text: the end of a program's standard error.
        at_end: whether only one near the end of the text counts. A program that returned 1 most likely died of
            its last exception; one that was killed may have logged it an hour ago.

    Returns:
        The exception's line and the whole block; None if there is none.
    """
    lines = [_RANK.sub("", line.rstrip("\r")) for line in text.split("\n")]
    while lines and not lines[-1].strip():
        lines.pop()
    fatal = _last(lines, _FATAL)
    if fatal is not None and len(lines) - fatal <= 10 * _AFTER:
        return lines[fatal], "\n".join(lines[fatal:])
    header = _last(lines, _HEADER)
    if header is None:
        return None
    exception = header + 1
    while exception < len(lines) and (not lines[exception] or lines[exception][0].isspace()):
        exception += 1
    group = lines[header].startswith(" ")
    last = exception
    if group:  # everything in a group is indented; its own exception comes after its own frames
        exception = next(
            (at for at in range(header + 1, len(lines)) if re.match(r"^  \| \S", lines[at])), exception
        )
        last = exception
        while last + 1 < len(lines) and lines[last + 1].startswith("  "):
            last += 1
    if exception >= len(lines) or (at_end and len(lines) - last > _AFTER):
        return None  # cut off, or too long ago
    # The exception's text may have more lines; as a rule none of them is empty.
    while last + 1 < len(lines) and lines[last + 1].strip() and last - exception < 10 * _AFTER:
        last += 1
    first = header
    while (earlier := _link_before(lines, first)) is not None:
        first = earlier
    return lines[exception].removeprefix("  | "), "\n".join(lines[first : last + 1])


def _last(lines: list[str], pattern: re.Pattern[str]) -> int | None:
    return next((at for at in range(len(lines) - 1, -1, -1) if pattern.match(lines[at])), None)


def _link_before(lines: list[str], header: int) -> int | None:
    """Where the traceback begins of which this one is the consequence."""
    if header < 2 or lines[header - 1] or lines[header - 2] not in _LINKS:
        return None
    return _last(lines[: header - 2], _HEADER)
