"""Amounts of memory or disk, as people write them: 10GiB, 500MB, or a part of the whole, 2%."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY_UNITS = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(%|(?:[kmgt]i?)?b?)", re.IGNORECASE)


class AmountError(ValueError):
    """A text that is no amount; one line."""


@dataclass(frozen=True, slots=True)
class Amount:
    """So many bytes, or so much of a whole.

    Attributes:
        bytes: How many; None for a part.
        part: From 0 to 1; None for bytes.
    """

    bytes: int | None = None
    part: float | None = None

    def of(self, whole: int) -> int:
        """Bytes, where the whole has so many."""
        return self.bytes if self.bytes is not None else round((self.part or 0.0) * whole)


def parse_amount(text: str) -> Amount:
    """Reads an amount.

    Raises:
        AmountError: It is none.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise AmountError(f"{text!r} is no amount")
    number, unit = float(match[1]), match[2].lower()
    if unit == "%":
        if number > 100:
            raise AmountError(f"{text!r} is more than the whole")
        return Amount(part=number / 100)
    if unit in ("", "b"):
        raise AmountError(f"{text!r} has no unit")
    unit = unit.removesuffix("b")
    return Amount(bytes=round(number * (_UNITS | _BINARY_UNITS)[unit]))


def in_words(count: int) -> str:
    """So many bytes, for people."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
