"""Requests that any client could send, sensible or not."""

from __future__ import annotations

from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration

from rallypoint.rpc.durations import is_repeated

_TEXTS = ["", "a", "run", "0@1", "s", "ü" * 200, "x" * 600, "\0", "../"]
_NUMBERS = [0, 1, -1, 2**31 - 1, 2**62, -(2**63)]
_BOUNDS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
}


def random_message(kind: type[Any], dice: Random) -> Any:
    """A message whose fields hold anything that their types allow, and are often unset."""
    made = kind()
    if kind is Duration:
        made.seconds, made.nanos = (
            dice.choice([0, 1, 60, *_NUMBERS]),
            dice.choice([0, 1, -1, 10**9, -(2**31)]),
        )
        return made
    # Of the fields of a oneof, the last to be set stays.
    for field in dice.sample(list(kind.DESCRIPTOR.fields), len(kind.DESCRIPTOR.fields)):
        if dice.random() < 0.3:
            continue
        if is_repeated(field):
            getattr(made, field.name).extend(_value(field, dice) for _ in range(dice.choice([0, 1, 1, 2, 5])))
        elif field.message_type is not None:
            getattr(made, field.name).CopyFrom(_value(field, dice))
        else:
            setattr(made, field.name, _value(field, dice))
    return made


def _value(field: Any, dice: Random) -> Any:
    if field.message_type is not None:
        return random_message(field.message_type._concrete_class, dice)
    if field.type == field.TYPE_BYTES:
        return dice.randbytes(dice.choice((0, 1, 32, 64, 65)))
    if field.type == field.TYPE_STRING:
        return dice.choice(_TEXTS)
    if field.type == field.TYPE_BOOL:
        return dice.random() < 0.5
    least, most = _BOUNDS[field.type]
    return max(least, min(most, dice.choice([*_NUMBERS, 2, 4, least, most])))
