"""A token says where to go on, and any other text is refused."""

from __future__ import annotations

import base64
import json

import pytest

from rallypoint.timer.core.values import InvalidField
from rallypoint.timer.server.servicer import decode_page_token, encode_page_token


@pytest.mark.parametrize("name", [("run", "s"), ("", ""), ("\0", "ü" * 256), ('"],["', "\\")])
def test_a_token_leads_back_to_its_name(name: tuple[str, str]) -> None:
    """Whatever is in it; and it is plain ASCII."""
    token = encode_page_token(name)
    assert token.isascii()
    assert decode_page_token(token, 2) == name


def encoded(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()


@pytest.mark.parametrize(
    "token",
    [
        "x",
        "ü",
        "====",
        encoded(["a"]),
        encoded(["a", "b", "c"]),
        encoded(["a", 1]),
        encoded({"a": "b", "c": "d"}),
        encoded("ab"),
        base64.urlsafe_b64encode(b"[" * 100_000).decode(),
        base64.urlsafe_b64encode(b"\xff\xfe").decode(),
    ],
)
def test_what_no_service_gave_out_is_refused(token: str) -> None:
    """With the field's name."""
    with pytest.raises(InvalidField) as caught:
        decode_page_token(token, 2)
    assert caught.value.field == "page_token"
