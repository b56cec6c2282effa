"""One hostile request: made from a seed and a number alone, so that it can be repeated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.text_format import MessageToString

from hostile.kinds import RENDEZVOUS, Kind, Life
from hostile.values import message
from hostile.wire import damaged, without_utf8

# Time limit of an honest answer on a busy machine, seconds.
PATIENCE = 30.0


@dataclass(frozen=True, slots=True)
class Request:
    """The content of a request, and the behaviour of its sender."""

    seed: int
    number: int
    path: str
    messages: tuple[bytes, ...]
    timeout: float
    """The call's deadline, seconds."""
    cancel_after: float | None
    """Seconds after which the sender leaves; None: it stays to the end."""
    half_close: bool
    """True if the sender of a stream half-closes it after its last message."""
    most_answers: int
    """Number of answers that the sender of a streaming call reads before it leaves."""
    kind: Kind = RENDEZVOUS

    @property
    def method(self) -> MethodDescriptor | None:
        """The method; None: there is no such method."""
        return self.kind.methods.get(self.path)

    @property
    def may_time_out(self) -> bool:
        """True if its sender gives up before the server must have answered."""
        method = self.method
        streaming = method is not None and (method.client_streaming or method.server_streaming)
        return self.timeout < PATIENCE or streaming

    def __str__(self) -> str:
        of = f"OF={self.kind} " if self.kind is not RENDEZVOUS else ""
        said = "\n".join(f"  {_shown(self.method, data)}" for data in self.messages)
        return (
            f"request {self.number} of seed {self.seed}: {self.path}, timeout {self.timeout:g} s, "
            f"cancelled after {self.cancel_after}, half-closed {self.half_close}\n{said}\n"
            f"again: make hostile {of}SEED={self.seed} ONLY={self.number}"
        )


def hostile_request(seed: int, number: int, kind: Kind = RENDEZVOUS) -> Request:
    """Return the request of that number. Equal arguments give equal requests, in any order of the calls."""
    draw = Random(f"{seed}-{number}")
    if draw.random() < 0.005:
        path = draw.choice((f"/{kind.services[-1]}/Drop", "/nobody.v1.NobodyService/Ask"))
        return Request(seed, number, path, (draw.randbytes(20),), PATIENCE, None, True, 1, kind)
    life = kind.life if draw.random() < 0.15 else None
    path = life.path if life is not None else draw.choice(_paths(kind))
    method = kind.methods[path]
    wild = draw.choice((0.0, 0.02, 0.1, 0.5, 1.0))
    if kind.life is not None and path == kind.life.path:
        messages = _life(kind.life, method, draw, wild)
    elif method.client_streaming:
        messages = [
            message(method.input_type, draw, wild).SerializeToString() for _ in range(draw.randrange(5))
        ]
    else:
        asked = message(method.input_type, draw, wild)
        if wild < 1:
            kind.admit(asked, draw)
        messages = [asked.SerializeToString()]
    messages = [without_utf8(data) for data in messages]
    if messages and draw.random() < 0.15:
        victim = draw.randrange(len(messages))
        messages[victim] = damaged(messages[victim], draw)
    return Request(
        seed,
        number,
        path,
        tuple(kind.harmless(method, data) for data in messages),
        timeout=_timeout(kind, method, draw),
        cancel_after=draw.choice((0.0, 0.001, 0.02)) if draw.random() < 0.05 else None,
        half_close=draw.random() < 0.5,
        most_answers=draw.randint(0, 3),
        kind=kind,
    )


@cache
def _paths(kind: Kind) -> tuple[str, ...]:
    return tuple(path for path in kind.methods for _ in range(1 if path.endswith(kind.seldom) else 4))


def _timeout(kind: Kind, method: MethodDescriptor, draw: Random) -> float:
    if draw.random() < 0.04:
        return 0.001
    if method.client_streaming or method.server_streaming:
        return draw.choice((0.02, 0.1, 0.3))
    return 0.2 if f"/{method.name}".endswith(kind.waiting) else PATIENCE


def _life(life: Life, method: MethodDescriptor, draw: Random, wild: float) -> list[bytes]:
    """Return a client's messages on its stream: a part of its life, sometimes out of order, or one far too often."""
    make: Any = GetMessageClass(method.input_type)

    def say(word: str) -> bytes:
        said = make()
        action = getattr(said, life.actions).add() if life.actions else said
        part = action.DESCRIPTOR.fields_by_name[word].message_type
        getattr(action, word).CopyFrom(message(part, draw, wild))
        if word == life.words[0] and draw.random() < 0.8:
            life.admit(getattr(action, word), draw)
        return bytes(said.SerializeToString())

    words = [
        life.resume if draw.random() < 0.2 else life.words[0],
        *life.words[1 : draw.randint(1, len(life.words))],
    ]
    if draw.random() < 0.2:
        draw.shuffle(words)
    if draw.random() < 0.05:
        words += [draw.choice(life.repeated)] * 60
    said = [say(word) for word in words] if draw.random() > 0.02 else []
    # The bytes of two messages are one message with the actions of both.
    return [b"".join(said)] if life.actions and draw.random() < 0.3 else said


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
