"""Hostile requests can be repeated from their seed and number, and are as different as intended."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from hostile.kinds import AGENT, KINDS, Kind
from hostile.requests import Request, hostile_request

MANY = range(3_000)


def test_a_request_can_be_made_again() -> None:
    """In any order, alone or after others."""
    there = [hostile_request(7, number) for number in MANY[:200]]
    back = [hostile_request(7, number) for number in reversed(MANY[:200])]
    assert there == back[::-1]
    assert there != [hostile_request(8, number) for number in MANY[:200]]


def test_a_request_shows_the_command_that_repeats_it() -> None:
    """An engineer who finds a bug with it can copy the command."""
    assert str(hostile_request(7, 42)).endswith("again: make hostile SEED=7 ONLY=42")


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_all_methods_are_called_in_all_ways(kind: Kind) -> None:
    """Well-formed and malformed, with long and short deadlines; too large for a field, with too many for a stream."""
    requests = [hostile_request(7, number, kind) for number in MANY]
    assert {request.path for request in requests} > set(kind.methods)
    seen: Counter[str] = Counter()
    for request in requests:
        seen["no such method"] += request.method is None
        seen["hasty"] += request.timeout < 0.01
        seen["cancelled"] += request.cancel_after is not None
        seen["empty"] += b"" in request.messages
        seen["huge"] += any(len(data) > 1_000_000 for data in request.messages)
        if kind.life is not None:
            seen["silent"] += not request.messages
            seen["chatty"] += len(request.messages) > 50
        for data in request.messages if request.method is not None else ():
            seen["well-formed" if _decoded(request, data) is not None else "malformed"] += 1
    assert [kind for kind, times in seen.items() if times < 3] == []


def test_no_request_does_harm_to_the_host_of_an_agent() -> None:
    """A job runs nothing but a few harmless programs on two workers; no request ends a job that it does not name."""
    commands: Counter[tuple[str, ...]] = Counter()
    for number in range(10_000):
        request = hostile_request(7, number, AGENT)
        name = request.path.rpartition("/")[2]
        for data in request.messages:
            asked = _decoded(request, data)
            if name in ("StopJob", "Drain", "ReapWorker", "RestartWorkers"):
                assert asked is None or asked.run_id not in ("", "bystander")
            elif name == "LaunchJob" and asked is not None and asked.spec.command:
                assert not 2 < asked.spec.local_world_size <= 16_384
                assert ".." not in asked.spec.log_dir
                if all("\0" not in part for part in asked.spec.command):
                    commands[tuple(asked.spec.command)] += bool(asked.spec.command[0])
    assert {command for command, times in commands.items() if times} == {
        ("/bin/true",),
        ("/bin/sleep", "5"),
        ("/nonexistent",),
    }


def _decoded(request: Request, data: bytes) -> Any:
    """Return the message in the bytes; None: they are no message."""
    if request.method is None:
        return None
    message = GetMessageClass(request.method.input_type)()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return None
    return message
