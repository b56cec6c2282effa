"""One or more samples of each message of the contract: every field set, no two to the same value."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import count
from typing import Any

from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from house.source import ROOT

# Copies of etcd's own messages: etcd keeps them compatible.
_NOT_OURS = "rallypoint/etcd/"
_DEEPEST = 4
_TIMES = {kind.DESCRIPTOR.full_name for kind in (duration_pb2.Duration, timestamp_pb2.Timestamp)}


def contract() -> dict[str, Descriptor]:
    """Return all messages of our .proto files, those of the journals too, by full name."""
    found: dict[str, Descriptor] = {}
    protos = ROOT / "protos"
    for path in sorted(protos.rglob("*.proto")):
        name = str(path.relative_to(protos))
        if not name.startswith(_NOT_OURS):
            module = importlib.import_module(f"{name.removesuffix('.proto').replace('/', '.')}_pb2")
            for message in module.DESCRIPTOR.message_types_by_name.values():
                found |= {each.full_name: each for each in _with_nested(message)}
    return found


def samples(message: Descriptor) -> list[bytes]:
    """Return encoded messages with all fields, as many as the largest oneof has fields: each of these is in one."""
    most = max((len(oneof.fields) for oneof in message.oneofs), default=1)
    return [
        _filled(message, arm, count(1), _DEEPEST).SerializeToString(deterministic=True) for arm in range(most)
    ]


def decoded(name: str, sample: bytes) -> Message:
    """Return the message of this version that a sample encodes."""
    return GetMessageClass(contract()[name]).FromString(sample)


def unknown_fields(message: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each field that this version does not know, in nested messages too."""
    unknown = UnknownFieldSet(message)
    yield from (f"{path}#{unknown[at].field_number}" for at in range(len(unknown)))
    for field, value in message.ListFields():
        if field.message_type is not None:
            # Maps have no messages as values in this contract, and no unknown fields of their own.
            for each in value if field.is_repeated else [value]:
                if isinstance(each, Message):
                    yield from unknown_fields(each, f"{path}{field.name}.")


def _with_nested(message: Descriptor) -> Iterator[Descriptor]:
    if not message.GetOptions().map_entry:
        yield message
    for nested in message.nested_types:
        yield from _with_nested(nested)


def _filled(message: Descriptor, arm: int, numbers: Iterator[int], depth: int) -> Message:
    made = GetMessageClass(message)()
    for field in message.fields:
        oneof = field.containing_oneof
        if oneof is None or field == oneof.fields[arm % len(oneof.fields)]:
            _fill(made, field, arm, numbers, depth)
    return made


def _fill(made: Any, field: FieldDescriptor, arm: int, numbers: Iterator[int], depth: int) -> None:
    kind = field.message_type
    if kind is None:
        values = [_scalar(field, numbers) for _ in range(2 if field.is_repeated else 1)]
        if field.is_repeated:
            getattr(made, field.name).extend(values)
        else:
            setattr(made, field.name, values[0])
    elif kind.GetOptions().map_entry:
        key, value = (_scalar(kind.fields_by_name[name], numbers) for name in ("key", "value"))
        getattr(made, field.name)[key] = value
    elif kind.full_name in _TIMES:
        value = GetMessageClass(kind)(seconds=next(numbers), nanos=next(numbers))
        getattr(made, field.name).CopyFrom(value)
    elif depth:
        for _ in range(2 if field.is_repeated else 1):
            value = _filled(kind, arm, numbers, depth - 1)
            getattr(made, field.name).extend([value]) if field.is_repeated else getattr(
                made, field.name
            ).CopyFrom(value)


def _scalar(field: FieldDescriptor, numbers: Iterator[int]) -> Any:
    number = next(numbers)
    if field.enum_type is not None:
        values = [value.number for value in field.enum_type.values if value.number]
        return values[number % len(values)]
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return True
        case FieldDescriptor.CPPTYPE_STRING:
            text = f"{field.name} {number}"
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return number + 0.5
        case FieldDescriptor.CPPTYPE_INT64 | FieldDescriptor.CPPTYPE_UINT64:
            return number + 2**40
        case _:
            return number + 2**20
