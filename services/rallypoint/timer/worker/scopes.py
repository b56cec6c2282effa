"""The call sites of timers, with the values that are the same at each call."""

from __future__ import annotations

from math import isfinite
from types import CodeType, FrameType
from typing import TypeVar

from rallypoint.rpc.text import clip_start
from rallypoint.timer.worker import wire
from rallypoint.timer.worker.table import MAX_SCOPE_BYTES, plain_kind

AUTO = "auto"
"""The duration of a timer whose timeout is learned."""

# Ten years, as in the service.
_MAX_AFTER = 315_360_000.0
# The agent polls every 50 ms; a timer that expires before two polls are over must be reported at once.
_HASTY = 100_000_000
_MAX_SIGNAL = 64
_NANOSECONDS = 1_000_000_000
# More call sites than any program has; a program that generates file names or scopes must not fill memory.
_MOST = 4096


class CallSite:
    """A call site that sets a timer.

    Attributes:
        given: `after`, as passed.
        asked: `signal`, as passed.
        scope: UTF-8.
        after: nanoseconds; 0: learned.
        signal: as in table.TimerSlot.
        kind: as TableWriter.acquire takes it; 0 if it differs from table to table, as for a learned timeout.
        terms: the part of a slot's check that comes from `after` and `kind`; 0 in the same case.
        hasty: True if the agent must look sooner than at its next poll.
        code: the code object of the call site. Held, so that no other code object can get its address.
    """

    __slots__ = ("after", "asked", "code", "given", "hasty", "kind", "scope", "signal", "terms")

    def __init__(self, given: object, asked: object, scope: bytes, code: CodeType | None = None) -> None:
        """Check the arguments.

        Raises:
            ValueError, TypeError: `given` is no duration, or `asked` no signal.
        """
        self.given = given
        self.asked = asked
        self.scope = scope
        self.after = after = _nanoseconds(given)
        self.signal = _signal(asked)
        self.kind = plain_kind(scope, self.signal) if after else 0
        self.terms = after ^ self.kind
        self.hasty = 0 < after < _HASTY
        self.code = code


by_code: dict[int, CallSite] = {}
"""Call sites without an explicit scope, except learning ones.

A code object holds its instructions, so its address plus the offset of an instruction is a number that identifies a
call site, and no other object's.
"""

by_scope: dict[str, CallSite] = {}
"""The last call site of each scope, except learning ones."""

# Separate, so that a lookup above need not check the kind.
_learning_by_code: dict[int, CallSite] = {}
_learning_by_scope: dict[str, CallSite] = {}

K = TypeVar("K")


def call_site_in(frame: FrameType, given: object, asked: object) -> CallSite:
    """Return the call site of a frame; its scope is file#line.

    Raises:
        ValueError, TypeError: `given` is no duration, or `asked` no signal.
    """
    code = frame.f_code
    key = id(code) + frame.f_lasti
    for known in (by_code.get(key), _learning_by_code.get(key)):
        if known is not None and known.given == given and known.asked is asked:
            return known
    site = CallSite(given, asked, encode(f"{code.co_filename}#{frame.f_lineno}"), code)
    _remember(by_code if site.after else _learning_by_code, key, site)
    return site


def call_site_of(scope: str, given: object, asked: object) -> CallSite:
    """Return a call site with an explicit scope.

    Raises:
        ValueError, TypeError: `given` is no duration, `asked` no signal, or `scope` no string.
    """
    encoded = encode(scope)
    for known in (by_scope.get(scope), _learning_by_scope.get(scope)):
        if known is not None and known.given == given and known.asked is asked:
            return known
    site = CallSite(given, asked, encoded)
    _remember(by_scope if site.after else _learning_by_scope, scope, site)
    return site


def _remember(sites: dict[K, CallSite], key: K, site: CallSite) -> None:
    if len(sites) >= _MOST:
        sites.clear()
    sites[key] = site


def encode(scope: str) -> bytes:
    """Return the scope as UTF-8; of one that is too long, the end.

    Raises:
        TypeError: it is no string.
    """
    if not isinstance(scope, str):
        raise TypeError(f"scope is {scope!r}; expected a string")
    encoded = scope.encode("utf-8", "replace")
    if len(encoded) > MAX_SCOPE_BYTES:
        encoded = clip_start(scope, MAX_SCOPE_BYTES).encode()
    return encoded


def _nanoseconds(after: object) -> int:
    if isinstance(after, str):
        if after == AUTO:
            return 0
        raise TypeError(f'after is {after!r}; expected a number of seconds, or "{AUTO}"')
    try:
        seconds = float(after)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f'after is {after!r}; expected a number of seconds, or "{AUTO}"') from None
    if not (isfinite(seconds) and 0 < seconds <= _MAX_AFTER):
        raise ValueError(
            f'after is {after!r}; expected seconds, more than 0 and at most ten years, or "{AUTO}" to learn them'
        )
    return max(int(seconds * _NANOSECONDS), 1)


def _signal(asked: object) -> int:
    if asked is None:
        return 0
    if not isinstance(asked, int) or isinstance(asked, bool):
        raise TypeError(
            f"signal is {asked!r}; expected a number or a signal.Signals, 0 to only report the expiry, or None"
        )
    if not 0 <= asked <= _MAX_SIGNAL:
        raise ValueError(f"signal is {asked!r}; expected 1 to {_MAX_SIGNAL}, or 0 to only report the expiry")
    return int(asked) or wire.NO_SIGNAL
