"""Values of fields, from plausible to absurd, and messages made of them: all that their descriptors allow."""

from __future__ import annotations

from random import Random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from rallypoint.rpc.durations import is_repeated

# In a message on the wire, this is replaced by bytes that are not UTF-8.
NOT_UTF8 = "not-utf8-not-utf8"

_MIB = 1024 * 1024
_INT32 = (0, -1, 1, 2, 1_000, 65_535, 65_536, 2**31 - 1, -(2**31))
_INT64 = (*_INT32, 2**32, 2**53 + 1, 2**63 - 1, -(2**63))
_UINT32 = (0, 1, 65_535, 65_536, 2**31, 2**32 - 1)
_UINT64 = (*_UINT32, 2**53 + 1, 2**63, 2**64 - 1)
_NANOS = (0, 1, -1, 999_999_999, 10**9, -(10**9), 2**31 - 1, -(2**31))
_SECONDS = (0, 1, -1, 86_400, 86_401, 2_160_000, 2_160_001, 315_576_000_001, 2**63 - 1, -(2**63))
_TEXTS = (
    "",
    " ",
    "\x00",
    "\x01reserved",
    "a\nb",
    "\x1b[2Jcleared",
    "\u202egnp.exe",
    "\u00ad\ufeff",
    "../../etc/passwd",
    "a/b",
    "x" * 256,
    "x" * 257,
    "é" * 128,
    "é" * 129,
    "x" * 1024,
    "x" * 1025,
    "\U0001f9ea" * 64,
    NOT_UTF8,
)
# Values that a real caller would send, by the name of the field.
_PLAUSIBLE_TEXTS = {
    "run_id": tuple(f"run-{number}" for number in range(12)),
    "node_id": ("a", "b", "c", "d"),
    "key": ("k0", "k1", "k2", "counter"),
    "keys": ("k0", "k1", "k2", "counter"),
    "prefix": ("", "k"),
    "client_id": ("client-1", "client-2"),
    "page_token": ("", "k1", "run-5", "WzJd", "WzEsICIwMTIzNDU2Nzg5YWJjZGVmIl0="),
    "worker_id": ("0@1", "1@1", "0@2"),
    "scope": ("step", "save", "load"),
    "learned_as": ("", "step", "save", "load"),
    "incarnation": ("", "first", "second"),
    "launch_id": ("", "", "launch-1", "launch-2"),
    "rendezvous_endpoint": ("", "127.0.0.1:1", "nowhere"),
    "timer_endpoint": ("", "127.0.0.1:1", "nowhere"),
    "topology": ("", "hall2/rack7"),
    "working_directory": ("",),
    "log_dir": ("", "logs"),
    "command": ("/bin/true", ""),
    "options": ("tee", "log-max-size", "keep-attempts", "1GiB", "1", "3"),
    "rendezvous_settings": ("join_timeout", "read_timeout", "1"),
    "environment": ("A", "B"),
    "service": ("", "rallypoint.rendezvous.v1.StoreService", "nobody.v1.NobodyService"),
}
# Numbers with a meaning in a run of a few nodes and rounds.
_SMALL = {
    "local_world_size": (1, 2),
    "min_nodes": (1, 2),
    "max_nodes": (2, 3),
    "master_port": (29_500,),
    "round": (0, 0, 0, 1, 2),
    "writer_round": (0, 0, 0, 1, 2),
}
# Fields that most callers leave out, and that make a request fail for their own reasons before any others.
_RARE = {"writer": 0.7, "operation": 0.5, "page_token": 0.7, "filter": 0.5}


def message(descriptor: Descriptor, draw: Random, wild: float) -> Message:
    """Return a message of that type.

    Args:
        descriptor: The type.
        draw: The source of randomness.
        wild: The probability that a value is absurd, 0 to 1.
    """
    made = GetMessageClass(descriptor)()
    alternatives = {oneof: draw.choice(oneof.fields) for oneof in descriptor.oneofs}
    for field in descriptor.fields:
        if field.containing_oneof is not None and alternatives[field.containing_oneof] is not field:
            continue
        if draw.random() < max(wild / 3, _RARE.get(field.name, 0.02)):
            continue  # missing
        if is_repeated(field):
            _fill_repeated(made, field, draw, wild)
        elif field.message_type is not None:
            getattr(made, field.name).CopyFrom(_submessage(field.message_type, draw, wild))
        else:
            setattr(made, field.name, _scalar(field, draw, wild))
    return made


def _fill_repeated(made: Message, field: FieldDescriptor, draw: Random, wild: float) -> None:
    entries = getattr(made, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        for _ in range(draw.choice((0, 0, 0, 1, 2))):
            key, value = (_text(field.name, draw, draw.random() < wild) for _ in range(2))
            entries[key] = value
        return
    if field.message_type is not None:
        for _ in range(draw.randrange(4)):
            entries.add().CopyFrom(_submessage(field.message_type, draw, wild))
        return
    count = draw.choice((1_001, 10_001)) if draw.random() < wild / 50 else draw.randrange(4)
    if count < 10:
        entries.extend(_scalar(field, draw, wild) for _ in range(count))
        return
    value = _scalar(field, draw, wild)
    # Many or long, not both: that would be gigabytes. Ten thousand of these exceed the largest allowed message.
    entries.extend([value[:500] if isinstance(value, str) else value] * count)


def _submessage(descriptor: Descriptor, draw: Random, wild: float) -> Message:
    if descriptor.full_name in ("google.protobuf.Duration", "google.protobuf.Timestamp"):
        made = GetMessageClass(descriptor)()
        absurd = draw.random() < wild
        parts = {
            "seconds": draw.choice(_SECONDS) if absurd else 0,
            "nanos": draw.choice(_NANOS) if absurd else draw.randrange(50_000_000),
        }
        for name, value in parts.items():
            setattr(made, name, value)
        return made
    return message(descriptor, draw, wild)


def _scalar(field: FieldDescriptor, draw: Random, wild: float) -> Any:
    absurd = draw.random() < wild
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return _text(field.name, draw, absurd)
        case FieldDescriptor.TYPE_BYTES:
            return _bytes(draw, absurd)
        case FieldDescriptor.TYPE_BOOL:
            return draw.random() < 0.5
        case FieldDescriptor.TYPE_ENUM:
            assert field.enum_type is not None
            known = [value.number for value in field.enum_type.values]
            return draw.choice((99, -1, 2**31 - 1)) if absurd else draw.choice(known)
        case FieldDescriptor.TYPE_UINT32:
            return draw.choice(_UINT32) if absurd else draw.randrange(3)
        case FieldDescriptor.TYPE_UINT64:
            return draw.choice(_UINT64) if absurd else draw.randrange(4)
        case FieldDescriptor.TYPE_INT64:
            return draw.choice(_INT64) if absurd else draw.randrange(1, 8)
        case FieldDescriptor.TYPE_INT32:
            return draw.choice(_INT32) if absurd else draw.choice(_SMALL.get(field.name, (0, 1, 2)))
        case kind:
            raise NotImplementedError(f"{field.full_name} has a type that is new here: {kind}")


def _text(name: str, draw: Random, absurd: bool) -> str:
    if not absurd:
        return draw.choice(_PLAUSIBLE_TEXTS.get(name, ("some", "text")))
    if draw.random() < 0.02:
        return draw.choice("x\x00é") * draw.choice((64 * 1024, _MIB))
    if draw.random() < 0.3:
        return f"junk-{draw.randrange(10**9)}"
    return draw.choice(_TEXTS)


def _bytes(draw: Random, absurd: bool) -> bytes:
    if not absurd:
        return draw.choice((b"", b"1", b"value", draw.randbytes(24)))
    if draw.random() < 0.02:
        return bytes(draw.choice((64 * 1024, _MIB)))
    return draw.choice((b"", draw.randbytes(16), draw.randbytes(1000), b"9223372036854775807", b"\xff" * 64))
