"""A token marks the position at which the same request goes on, and any other text is refused."""

from __future__ import annotations

import base64
import json

import pytest

from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.errors import ServiceError
from rallypoint.serving.requests import page_position, page_token

FILTER = pb.EventFilter(node_ids=["a"], rounds=[1])
REQUEST = pb.ListEventsRequest(run_id="run", filter=FILTER, page_size=7)


def with_token(token: str, request: pb.ListEventsRequest = REQUEST) -> pb.ListEventsRequest:
    """Return the request for a further page, of another size."""
    further = pb.ListEventsRequest(page_size=8, page_token=token)
    further.run_id, further.newest_first = request.run_id, request.newest_first
    further.filter.CopyFrom(request.filter)
    return further


@pytest.mark.parametrize("name", [("run", "s"), ("", ""), ("\0", "ü" * 256), ('"],["', "\\")])
def test_a_token_leads_back_to_its_name(name: tuple[str, str]) -> None:
    """Its content may be any text; and it is plain ASCII."""
    token = page_token(REQUEST, *name)
    assert token.isascii()
    assert page_position(with_token(token), str, str) == [*name]
    assert page_token(with_token(token), *name) == token


def test_a_number_is_not_negative_and_may_be_added_to() -> None:
    """It can be a position in any list."""
    assert page_position(with_token(page_token(REQUEST, 2**62)), int) == [2**62]
    for number in (-1, 2**62 + 1, True):
        with pytest.raises(ServiceError):
            page_position(with_token(page_token(REQUEST, number)), int)


@pytest.mark.parametrize(
    "other",
    [
        pb.ListEventsRequest(run_id="run2", filter=FILTER),
        pb.ListEventsRequest(run_id="run", filter=FILTER, newest_first=True),
        pb.ListEventsRequest(run_id="run", filter=pb.EventFilter(node_ids=["a"])),
        pb.ListEventsRequest(run_id="run"),
    ],
)
def test_a_token_of_another_request_is_refused(other: pb.ListEventsRequest) -> None:
    """Items would be missed."""
    with pytest.raises(ServiceError) as caught:
        page_position(with_token(page_token(REQUEST, 12), other), int)
    assert [field for field, _ in caught.value.field_violations] == ["page_token"]


def test_a_token_of_another_method_is_refused() -> None:
    """It is refused although the two requests have the same bytes."""
    token = page_token(pb.ListNodesRequest(run_id="run"), 12)
    with pytest.raises(ServiceError):
        page_position(pb.ListEventsRequest(run_id="run", page_token=token), int)


def encoded(*values: object) -> str:
    """Return a token with the digest of the right one."""
    digest = json.loads(base64.urlsafe_b64decode(page_token(REQUEST, "a", "b")))[-1]
    return base64.urlsafe_b64encode(json.dumps([*values, digest]).encode()).decode()


@pytest.mark.parametrize(
    "token",
    [
        "x",
        "ü",
        "====",
        "1" + encoded("a", "b"),
        encoded("a"),
        encoded("a", "b", "c"),
        encoded("a", 1),
        encoded("a", "c"),
        base64.urlsafe_b64encode(json.dumps(["a", "b", "0" * 16]).encode()).decode(),
        base64.urlsafe_b64encode(json.dumps({"a": "b", "c": "d", "e": "f"}).encode()).decode(),
        base64.urlsafe_b64encode(b'"abc"').decode(),
        encoded("a" * 20_000, "b"),
        base64.urlsafe_b64encode(b"[" * 100_000).decode(),
        base64.urlsafe_b64encode(b"\xff\xfe").decode(),
    ],
)
def test_a_token_that_no_service_issued_is_refused(token: str) -> None:
    """The refusal names the field."""
    assert page_position(with_token(encoded("a", "b")), str, str) == ["a", "b"]
    with pytest.raises(ServiceError) as caught:
        page_position(with_token(token), str, str)
    assert caught.value.field_violations[0][0] == "page_token"
