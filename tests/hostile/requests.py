"""One hostile request: made from a seed and a number alone, so that it can be made again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.text_format import MessageToString
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2  # type: ignore[import-untyped]

from hostile.values import message
from hostile.wire import damaged, without_utf8
from rallypoint.rendezvous.v1 import rendezvous_service_pb2, state_service_pb2, store_service_pb2

METHODS: Mapping[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for file in (
        rendezvous_service_pb2.DESCRIPTOR,
        store_service_pb2.DESCRIPTOR,
        state_service_pb2.DESCRIPTOR,
        health_pb2.DESCRIPTOR,
        reflection_pb2.DESCRIPTOR,
    )
    for service in file.services_by_name.values()
    for method in service.methods
}
"""Every method of a rendezvous server, by its path."""

# Runs that are closed can't be joined any more: with as many closed as anything else, little else would come about.
_SELDOM = ("/CloseRun", "/EvictNode", "/List", "/Check")
_PATHS = tuple(path for path in METHODS for _ in range(1 if path.endswith(_SELDOM) else 4))
# What a node's stream is for, and what needs a few messages in their order to get anywhere.
_JOIN = "/rallypoint.rendezvous.v1.RendezvousService/Join"
_LIFE = ("join", "heartbeat", "confirm", "worker_failed", "succeeded", "heartbeat", "depart", "leave")
_WAITING = ("/Get", "/MultiGet", "/Wait")
_UNKNOWN = ("/rallypoint.rendezvous.v1.StoreService/Drop", "/nobody.v1.NobodyService/Ask")

# How long an honest answer may take on a machine that does other things too, seconds.
PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent, and how its sender behaves."""

    seed: int
    number: int
    path: str
    messages: tuple[bytes, ...]
    timeout: float
    """The call's deadline, seconds."""
    cancel_after: float | None
    """Seconds after which the sender goes away; None: it stays to the end."""
    half_close: bool
    """Whether the sender of a stream says that it has said everything."""
    most_answers: int
    """How many answers the sender of a call with many reads before it goes."""

    @property
    def method(self) -> MethodDescriptor | None:
        """None: there is no such method."""
        return METHODS.get(self.path)

    @property
    def may_time_out(self) -> bool:
        """Whether its sender gives up before anybody must have answered."""
        method = self.method
        streaming = method is not None and (method.client_streaming or method.server_streaming)
        return self.timeout < PATIENCE or streaming

    def __str__(self) -> str:
        said = "\n".join(f"  {_shown(self.method, data)}" for data in self.messages)
        return (
            f"request {self.number} of seed {self.seed}: {self.path}, timeout {self.timeout:g} s, "
            f"cancelled after {self.cancel_after}, half-closed {self.half_close}\n{said}\n"
            f"again: make hostile SEED={self.seed} ONLY={self.number}"
        )


def hostile_request(seed: int, number: int) -> Request:
    """The request of that number. Equal arguments, equal requests, in whatever order they are made."""
    draw = Random(f"{seed}-{number}")
    if draw.random() < 0.005:
        return Request(seed, number, draw.choice(_UNKNOWN), (draw.randbytes(20),), PATIENCE, None, True, 1)
    path = _JOIN if draw.random() < 0.15 else draw.choice(_PATHS)
    method = METHODS[path]
    wild = draw.choice((0.0, 0.02, 0.1, 0.5, 1.0))
    if path == _JOIN:
        messages = _life(method.input_type, draw, wild)
    elif method.client_streaming:
        messages = [
            message(method.input_type, draw, wild).SerializeToString() for _ in range(draw.randrange(5))
        ]
    else:
        messages = [message(method.input_type, draw, wild).SerializeToString()]
    messages = [without_utf8(data) for data in messages]
    if messages and draw.random() < 0.15:
        victim = draw.randrange(len(messages))
        messages[victim] = damaged(messages[victim], draw)
    return Request(
        seed,
        number,
        path,
        tuple(messages),
        timeout=_timeout(method, path, draw),
        cancel_after=draw.choice((0.0, 0.001, 0.02)) if draw.random() < 0.05 else None,
        half_close=draw.random() < 0.5,
        most_answers=draw.randint(0, 3),
    )


def _timeout(method: MethodDescriptor, path: str, draw: Random) -> float:
    if draw.random() < 0.04:
        return 0.001
    if method.client_streaming or method.server_streaming:
        return draw.choice((0.02, 0.1, 0.3))
    return 0.2 if path.endswith(_WAITING) else PATIENCE


def _life(join_request: Descriptor, draw: Random, wild: float) -> list[bytes]:
    """What a node says on its stream: a part of its life, out of order now and then, or far too much of one thing."""
    make: Any = GetMessageClass(join_request)

    def say(word: str) -> bytes:
        kind = join_request.fields_by_name[word].message_type
        assert kind is not None
        said = make()
        getattr(said, word).CopyFrom(message(kind, draw, wild))
        if word == "join" and draw.random() < 0.8:
            # Names and settings with which it gets in, into one of few runs.
            junk = draw.random() < 0.3
            said.join.run_id = f"junk-{draw.randrange(10**9)}" if junk else f"run-{draw.randrange(12)}"
            said.join.node_id = draw.choice("abcd")
            said.join.address, said.join.local_world_size = "10.0.0.1", 2
            said.join.settings.Clear()
            said.join.settings.min_nodes = said.join.settings.max_nodes = 1
        return bytes(said.SerializeToString())

    words = ["resume" if draw.random() < 0.2 else _LIFE[0], *_LIFE[1 : draw.randint(1, len(_LIFE))]]
    if draw.random() < 0.2:
        draw.shuffle(words)
    if draw.random() < 0.05:
        words += [draw.choice(("heartbeat", "confirm", "join"))] * 60
    return [say(word) for word in words] if draw.random() > 0.02 else []


def _shown(method: MethodDescriptor | None, data: bytes) -> str:
    text = data[:400].hex() + ("…" if len(data) > 400 else "")
    if method is None:
        return text
    parsed = GetMessageClass(method.input_type)()
    try:
        parsed.ParseFromString(data)
    except DecodeError:
        return f"{text} (no {method.input_type.name})"
    return f"{text} ({MessageToString(parsed, as_one_line=True)[:400]})"
