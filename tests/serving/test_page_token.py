"""A token says where to go on, and any other text is refused."""

from __future__ import annotations

import base64
import json

import pytest

from rallypoint.rpc.errors import ServiceError
from rallypoint.serving.requests import page_position, page_token


@pytest.mark.parametrize("name", [("run", "s"), ("", ""), ("\0", "ü" * 256), ('"],["', "\\")])
def test_a_token_leads_back_to_its_name(name: tuple[str, str]) -> None:
    """Whatever is in it; and it is plain ASCII."""
    token = page_token(*name)
    assert token.isascii()
    assert page_position(token, str, str) == [*name]


def test_a_number_is_not_negative_and_may_be_added_to() -> None:
    """So that it can be a position in any list."""
    assert page_position(page_token(2**62), int) == [2**62]
    for number in (-1, 2**62 + 1, True):
        with pytest.raises(ServiceError):
            page_position(page_token(number), int)


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
        encoded(["a" * 20_000, "b"]),
        base64.urlsafe_b64encode(b"[" * 100_000).decode(),
        base64.urlsafe_b64encode(b"\xff\xfe").decode(),
    ],
)
def test_what_no_service_gave_out_is_refused(token: str) -> None:
    """With the field's name."""
    with pytest.raises(ServiceError) as caught:
        page_position(token, str, str)
    assert caught.value.field_violations[0][0] == "page_token"
