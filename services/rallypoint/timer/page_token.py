"""Page tokens: the last name of a page, so that the next one goes on behind it whatever has changed meanwhile."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from contextlib import suppress

from rallypoint.timer.refusals import InvalidField


def encode_page_token(name: Sequence[str]) -> str:
    """The token of the page behind that name."""
    return base64.urlsafe_b64encode(json.dumps(name).encode()).decode()


def decode_page_token(token: str, parts: int) -> tuple[str, ...]:
    """The name that a token was made of, of so many parts.

    Raises:
        InvalidField: it is none.
    """
    with suppress(ValueError, RecursionError):
        name = json.loads(base64.urlsafe_b64decode(token))
        if isinstance(name, list) and len(name) == parts and all(isinstance(each, str) for each in name):
            return tuple(name)
    raise InvalidField("page_token", "is none that this service gave out")
