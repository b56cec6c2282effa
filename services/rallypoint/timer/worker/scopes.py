"""The places in a program that set timers, and what is the same each time that they do."""

from __future__ import annotations

from math import isfinite
from types import CodeType, FrameType
from typing import TypeVar

from rallypoint.timer.worker import wire
from rallypoint.timer.worker.table import MAX_SCOPE_BYTES, plain_kind

AUTO = "auto"
"""As the duration of a timer: how long it may take is to be learned."""

# Ten years, as the service has it.
_MAX_AFTER = 315_360_000.0
# The agent looks every 50 ms; a timer that runs out before two looks are over is to be seen at once.
_HASTY = 100_000_000
_MAX_SIGNAL = 64
_NANOSECONDS = 1_000_000_000
# A program has no more places than this that set timers; one that makes up file names or scopes must not fill
# memory.
_MOST = 4096


class CallSite:
    """A place that sets a timer.

    Attributes:
        given: `after`, as the place gave it.
        asked: `signal`, likewise.
        scope: UTF-8.
        after: nanoseconds; 0: to be learned.
        signal: as table.Slot has it.
        kind: as TableWriter.acquire takes it; 0 if that is another one in each table, as for what learns.
        terms: what `after` and `kind` add to a slot's check; 0 likewise.
        hasty: whether the agent has to look sooner than it would by itself.
        code: what the place is in. Held, so that no other code is ever found where this one was.
    """

    __slots__ = ("after", "asked", "code", "given", "hasty", "kind", "scope", "signal", "terms")

    def __init__(self, given: object, asked: object, scope: bytes, code: CodeType | None = None) -> None:
        """Checks what was given.

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
"""Places without a scope of their own, but for those that learn. A code object holds its instructions, so its
address and the offset of an instruction name a place as one number, and no other object's."""

by_scope: dict[str, CallSite] = {}
"""The last place of each scope, but for those that learn."""

# Apart, so that who finds a place above need not ask which kind it is.
_learning_by_code: dict[int, CallSite] = {}
_learning_by_scope: dict[str, CallSite] = {}

K = TypeVar("K")


def call_site_in(frame: FrameType, given: object, asked: object) -> CallSite:
    """A place whose scope is where it is, as file#line.

    Raises:
        ValueError, TypeError: `given` is no duration, or `asked` no signal.
    """
    code = frame.f_code
    key = id(code) + frame.f_lasti
    for known in (by_code.get(key), _learning_by_code.get(key)):
        if known is not None and known.given == given and known.asked is asked:
            return known
    place = CallSite(given, asked, encode(f"{code.co_filename}#{frame.f_lineno}"), code)
    _remember(by_code if place.after else _learning_by_code, key, place)
    return place


def call_site_of(scope: str, given: object, asked: object) -> CallSite:
    """A place with a scope of its own.

    Raises:
        ValueError, TypeError: `given` is no duration, `asked` no signal, or `scope` no string.
    """
    encoded = encode(scope)
    for known in (by_scope.get(scope), _learning_by_scope.get(scope)):
        if known is not None and known.given == given and known.asked is asked:
            return known
    place = CallSite(given, asked, encoded)
    _remember(by_scope if place.after else _learning_by_scope, scope, place)
    return place


def _remember(places: dict[K, CallSite], key: K, place: CallSite) -> None:
    if len(places) >= _MOST:
        places.clear()
    places[key] = place


def encode(scope: str) -> bytes:
    """The scope as it travels: of what is too long, the end.

    Raises:
        TypeError: it is no string.
    """
    if not isinstance(scope, str):
        raise TypeError(f"scope is {scope!r}; expected a string")
    encoded = scope.encode("utf-8", "replace")
    if len(encoded) > MAX_SCOPE_BYTES:
        encoded = encoded[-MAX_SCOPE_BYTES:].decode("utf-8", "ignore").encode()
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
            f"signal is {asked!r}; expected a number or a signal.Signals, 0 to kill nobody, or None"
        )
    if not 0 <= asked <= _MAX_SIGNAL:
        raise ValueError(f"signal is {asked!r}; expected 1 to {_MAX_SIGNAL}, or 0 to kill nobody")
    return int(asked) or wire.NO_SIGNAL
