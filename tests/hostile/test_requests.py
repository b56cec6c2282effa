"""Hostile requests can be made again from their seed and number, and are as different as they are meant to be."""

from __future__ import annotations

from collections import Counter

from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from hostile.requests import METHODS, hostile_request

MANY = range(3_000)


def test_a_request_can_be_made_again() -> None:
    """In whatever order, alone or after others."""
    there = [hostile_request(7, number) for number in MANY[:200]]
    back = [hostile_request(7, number) for number in reversed(MANY[:200])]
    assert there == back[::-1]
    assert there != [hostile_request(8, number) for number in MANY[:200]]


def test_a_request_says_how_to_send_it_again() -> None:
    """Whoever finds a bug with it can copy the command."""
    assert str(hostile_request(7, 42)).endswith("again: make hostile SEED=7 ONLY=42")


def test_all_methods_are_called_in_all_ways() -> None:
    """Well-formed and malformed, patient and not; too large for a field, and with too many messages for a stream."""
    requests = [hostile_request(7, number) for number in MANY]
    assert {request.path for request in requests} > set(METHODS)
    seen: Counter[str] = Counter()
    for request in requests:
        seen["no such method"] += request.method is None
        seen["hasty"] += request.timeout < 0.01
        seen["cancelled"] += request.cancel_after is not None
        seen["empty"] += b"" in request.messages
        seen["huge"] += any(len(data) > 1_000_000 for data in request.messages)
        seen["silent"] += not request.messages
        seen["chatty"] += len(request.messages) > 50
        for data in request.messages if request.method is not None else ():
            seen["well-formed" if _decodes(request.path, data) else "malformed"] += 1
    assert [kind for kind, times in seen.items() if times < 3] == []


def _decodes(path: str, data: bytes) -> bool:
    try:
        GetMessageClass(METHODS[path].input_type)().ParseFromString(data)
    except DecodeError:
        return False
    return True
