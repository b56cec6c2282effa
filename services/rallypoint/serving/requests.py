"""Checks of fields that every service receives: names, sentences, numbers, durations and page tokens."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any, Protocol, Self, TypeVar

from google.protobuf.duration_pb2 import Duration

from rallypoint.rpc.durations import checked_seconds
from rallypoint.rpc.errors import invalid, invalid_fields

_T = TypeVar("_T")

NAME_BYTES = 256
SENTENCE_BYTES = 1024
PATH_BYTES = 4096
_LEASE_TOKEN_BYTES = 64
# No token of ours is longer: four names, each character escaped.
_TOKEN_LENGTH = 16 * 1024


class EveryField:
    """Checks of several fields of a request: one error at the end names every bad one.

    As a context: `with EveryField() as check: check(name, "run_id", request.run_id)`.
    """

    def __init__(self) -> None:
        """Begin with no bad field."""
        self._found: list[tuple[str, str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._found:
            raise invalid_fields(self._found)

    def __call__(self, check: Callable[..., _T], *arguments: object, **named: object) -> _T | None:
        """Return the result of a check; None: the field is bad."""
        try:
            return check(*arguments, **named)
        except Exception as error:
            # Of a ServiceError, or of a refusal that a service translates to one.
            if not (violations := getattr(error, "field_violations", ())):
                raise
            self._found += violations
            return None

    def refuse(self, field: str, description: str) -> None:
        """Add a bad field that the caller has found."""
        self._found.append((field, description))


def name(field: str, value: str) -> None:
    """Check a name: not empty, at most 256 bytes, no control characters.

    Raises:
        ServiceError: INVALID_ARGUMENT, naming the field.
    """
    if not value:
        raise invalid(field, "must not be empty")
    text(field, value)


def text(field: str, value: str, most_bytes: int = NAME_BYTES) -> None:
    """Check a text that is shown in logs and on terminals; it may be empty.

    Raises:
        ServiceError: INVALID_ARGUMENT, naming the field.
    """
    if len(value.encode()) > most_bytes:
        raise invalid(field, f"must have at most {most_bytes} bytes, not {len(value.encode())}")
    if not value.isprintable():
        raise invalid(field, "must not have control characters")


def token(field: str, value: bytes) -> None:
    """Check the token of a lease: at most 64 bytes. Leases have 16; agents send the timer service a digest of 32.

    Raises:
        ServiceError: INVALID_ARGUMENT, naming the field.
    """
    if len(value) > _LEASE_TOKEN_BYTES:
        raise invalid(field, f"must have at most {_LEASE_TOKEN_BYTES} bytes, not {len(value)}")


def reason(value: str, field: str = "reason") -> str:
    """Return the reason in a request, a sentence, or a text for none.

    Raises:
        ServiceError: INVALID_ARGUMENT, naming the field.
    """
    text(field, value, SENTENCE_BYTES)
    return value or "no reason given"


def count(field: str, value: int, least: int, most: int | None = None) -> None:
    """Check a number.

    Raises:
        ServiceError: INVALID_ARGUMENT, naming the field.
    """
    if most is not None and not least <= value <= most:
        raise invalid(field, f"must be from {least} to {most}, not {value}")
    if value < least:
        raise invalid(field, f"must be at least {least}, not {value}")


def seconds(field: str, duration: Duration, most: float, *, zero: bool = True) -> float:
    """Return the seconds of a duration; `zero`: 0 is allowed.

    Raises:
        ServiceError: INVALID_ARGUMENT, naming the field: it is invalid, negative, or more than `most`.
    """
    value = checked_seconds(duration, field, invalid)
    if not 0 <= value <= most or (value == 0 and not zero):
        least = "at least 0" if zero else "more than 0"
        raise invalid(field, f"must be {least} and at most {most:.0f} seconds, not {value:g}")
    return value


# ---- Pages. A token has the position of a page's last item, after which the next page continues, and a digest of its
# request: with another filter or direction, items would be missed.


class ListRequest(Protocol):
    """A request for a page."""

    page_size: int
    page_token: str


def page_size(requested: int, default: int, most: int) -> int:
    """Return the number of items of a page: the default for 0, and at most `most`.

    Raises:
        ServiceError: INVALID_ARGUMENT: it is negative.
    """
    count("page_size", requested, 0)
    return min(requested or default, most)


def page_token(request: ListRequest, *position: str | int) -> str:
    """Return the token of the page after a position, for the same request with any page_size."""
    return base64.urlsafe_b64encode(json.dumps([*position, _digest(request, position)]).encode()).decode()


def items_before(request: ListRequest) -> int:
    """Return the number of items before the requested page, of a token that has nothing else; 0: the first page.

    Raises:
        ServiceError: INVALID_ARGUMENT: no service issued the token for such a request.
    """
    return int(page_position(request, int)[0]) if request.page_token else 0


def page_position(request: ListRequest, *kinds: type) -> list[Any]:
    """Return the position in a request's token: values of these types; numbers are from 0 to 2**62.

    Raises:
        ServiceError: INVALID_ARGUMENT: no service issued the token for such a request.
    """
    content: Any = None
    with suppress(ValueError, RecursionError):
        if len(request.page_token) <= _TOKEN_LENGTH:  # decoding a longer one would block the event loop
            content = json.loads(base64.urlsafe_b64decode(request.page_token))
    if isinstance(content, list) and [type(each) for each in content] == [*kinds, str]:
        *position, digest = content
        in_range = all(isinstance(each, str) or 0 <= each <= 2**62 for each in position)
        if in_range and digest == _digest(request, position):
            return position
    raise invalid("page_token", "must be the next_page_token of a page of the same request, or empty")


def _digest(request: ListRequest, position: Sequence[str | int]) -> str:
    whole: Any = deepcopy(request)
    whole.page_size, whole.page_token = 0, ""
    parts = (
        json.dumps([type(request).__name__, *position]).encode(),
        whole.SerializeToString(deterministic=True),
    )
    return hashlib.blake2b(
        b"".join(len(part).to_bytes(8) + part for part in parts), digest_size=8
    ).hexdigest()
