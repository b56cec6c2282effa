"""Parsers for resource limits of workers (`nofile=65536`, `core=0:unlimited`) and quantities (`10GiB`, `2%`)."""

from __future__ import annotations

import re
import resource
from collections.abc import Mapping
from dataclasses import dataclass

UNLIMITED = -1

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_FORM = "expected NAME=SOFT or NAME=SOFT:HARD, as in nofile=65536 or core=0:unlimited"

KNOWN = tuple(
    sorted(
        name.removeprefix("RLIMIT_").lower()
        for name in dir(resource)
        if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"  # an old name of nofile
    )
)
"""Names of this system's limits: those of setrlimit(2) in lower case, without RLIMIT_."""


class RlimitError(ValueError):
    """A limit that does not exist, or an invalid value; one line."""


def parse_rlimit(text: str) -> tuple[str, tuple[int, int]]:
    """Parse one limit.

    Args:
        text: `NAME=SOFT[:HARD]`; HARD defaults to SOFT. A value is a number, a number with K, M, G or T for
            powers of 1024, or `unlimited` (or -1). Units are setrlimit(2)'s: bytes for sizes, seconds for cpu.

    Returns:
        The name, and the soft and the hard limit; -1 is no limit.

    Raises:
        RlimitError: `text` is not a valid limit.
    """
    name, separator, values = text.strip().partition("=")
    name = name.strip().lower().removeprefix("rlimit_")
    if not separator or not name:
        raise RlimitError(f"{text!r} is not a resource limit; {_FORM}")
    soft, _, hard = values.partition(":")
    limits = (_value(text, soft), _value(text, hard) if hard else _value(text, soft))
    check_rlimits({name: limits})
    return name, limits


def check_rlimits(limits: Mapping[str, tuple[int, int]]) -> None:
    """Raise RlimitError for a limit that does not exist here, or whose soft value is above its hard one."""
    for name, (soft, hard) in limits.items():
        if name not in KNOWN:
            raise RlimitError(f"{name!r} is not a resource limit of this system; known: {', '.join(KNOWN)}")
        if min(soft, hard) < UNLIMITED:
            raise RlimitError(f"{name}={soft}:{hard}: only -1, for no limit, may be negative")
        if hard != UNLIMITED and (soft == UNLIMITED or soft > hard):
            raise RlimitError(
                f"{name}={_text(soft)}:{_text(hard)}: the soft limit must not be above the hard one"
            )


def check_allowed(limits: Mapping[str, tuple[int, int]]) -> None:
    """Raise RlimitError for a hard limit that this process may not set for its children; all names are known."""
    for name, (_, hard) in limits.items():
        number = getattr(resource, f"RLIMIT_{name.upper()}")
        own = resource.getrlimit(number)
        if own[1] == UNLIMITED or UNLIMITED < hard <= own[1]:
            continue
        # The right to raise it depends on more than the user (capabilities, namespaces, sysctl): let the kernel decide.
        try:
            resource.setrlimit(number, (own[0], hard))
        except (OSError, ValueError):
            raise RlimitError(
                f"{name}={_text(hard)}: the agent may not raise its hard limit, which is {_text(own[1])}; ask for "
                "less, or raise the agent's own (ulimit -H, as root)"
            ) from None
        resource.setrlimit(number, own)


def _value(text: str, value: str) -> int:
    value = value.strip().upper()
    if value in ("UNLIMITED", "INFINITY", "-1"):
        return UNLIMITED
    found = re.fullmatch(r"([0-9]{1,18})([KMGT]?)", value)
    if found is None:
        raise RlimitError(f"{text!r} has {value!r}, which is not a number; {_FORM}")
    number = int(found[1]) * _UNITS[found[2]]
    if number >= 1 << 63:
        raise RlimitError(f"{text!r} is too large for the kernel; use unlimited")
    return number


def _text(limit: int) -> str:
    return "unlimited" if limit == UNLIMITED else str(limit)


# ---- Quantities of memory or disk as users write them: 10GiB, 500MB, or a part of the whole, 2%.


_DECIMAL_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY_UNITS = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_SIZE_UNITS = _DECIMAL_UNITS | _BINARY_UNITS
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*(|[KMGT]i?)B?", re.IGNORECASE)
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(%|(?:[kmgt]i?)?b?)", re.IGNORECASE)


class QuantityError(ValueError):
    """A text that is not a quantity; one line."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number of bytes, or a part of a whole.

    Attributes:
        bytes: The number; None for a part.
        part: From 0 to 1; None for bytes.
    """

    bytes: int | None = None
    part: float | None = None

    def of(self, whole: int) -> int:
        """The quantity in bytes, of a whole with so many bytes."""
        return self.bytes if self.bytes is not None else round((self.part or 0.0) * whole)


def parse_quantity(text: str) -> Quantity:
    """Parse a quantity.

    Raises:
        QuantityError: `text` is not a quantity.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise QuantityError(f"{text!r} is not a quantity")
    number, unit = float(match[1]), match[2].lower()
    if unit == "%":
        if number > 100:
            raise QuantityError(f"{text!r} is more than the whole")
        return Quantity(part=number / 100)
    if unit in ("", "b"):
        raise QuantityError(f"{text!r} has no unit")
    unit = unit.removesuffix("b")
    return Quantity(bytes=round(number * _SIZE_UNITS[unit]))


def parse_size(text: str) -> int | None:
    """Return the bytes of a size, as in 65536, 100MB or 1GiB; None if it is none."""
    found = _SIZE.fullmatch(text.strip())
    return None if found is None else round(float(found[1]) * _SIZE_UNITS[found[2].lower()])
