"""Core values to protocol messages and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from enum import IntEnum
from operator import attrgetter
from typing import Any, TypeVar, get_type_hints

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from rallypoint.rpc.durations import is_repeated, set_seconds, to_seconds

_T = TypeVar("_T")
_Encoder = Callable[[Any, str, Any], None]
_Decoder = Callable[[Any], Any]

_DURATION, _TIMESTAMP = (kind.DESCRIPTOR.full_name for kind in (Duration, Timestamp))


class NewerVersion(ValueError):
    """A message contains an element that only a later version knows."""


class MessageCodec:
    """The messages of core values in one protocol package.

    A core value and its message have the same names for their fields, and enums the same numbers, so one translation by
    field descriptors serves them all. A table has the messages: the API and the journal have one each.
    """

    def __init__(self, messages: Mapping[type, type[Message]]) -> None:
        """Translate between the keys and the values of `messages`."""
        self._messages = messages
        self._values = {message.DESCRIPTOR.full_name: value for value, message in messages.items()}
        self._encoders = functools.cache(self._encoders_of)
        self._decoder: Callable[[Any], _Decoder] = functools.cache(self._decoder_of)

    def to_message(self, value: Any) -> Any:
        """Return the protocol message of a core value."""
        kind: Any = type(value)
        message = self._messages[kind]()
        for name, encode in self._encoders(kind):
            encode(message, name, getattr(value, name))
        return message

    def from_message(self, message: Message, kind: type[_T]) -> _T:
        """Return the core value of a protocol message; `kind` is its type.

        Raises:
            NewerVersion: An enum has a number that this version does not know.
        """
        value: _T = self._decoder(kind)(message)
        return value

    def _encoders_of(self, kind: Any) -> list[tuple[str, _Encoder]]:
        described = self._messages[kind].DESCRIPTOR.fields_by_name
        return [(field.name, self._encoder(described[field.name])) for field in fields(kind)]

    def _encoder(self, field: Any) -> _Encoder:
        if field.message_type is None:
            return _encode_repeated if is_repeated(field) else setattr
        if field.message_type.full_name in {_DURATION, _TIMESTAMP}:
            return lambda message, at, value: set_seconds(getattr(message, at), value)
        if is_repeated(field):
            return lambda message, at, value: getattr(message, at).extend(
                [self.to_message(each) for each in value]
            )
        return self._encode_optional

    def _encode_optional(self, message: Any, name: str, value: Any) -> None:
        if value is not None:
            getattr(message, name).CopyFrom(self.to_message(value))

    def _decoder_of(self, kind: Any) -> _Decoder:
        described, hints = self._messages[kind].DESCRIPTOR.fields_by_name, get_type_hints(kind)
        decoders = [
            self._field_decoder(described[field.name], field, hints[field.name]) for field in fields(kind)
        ]
        if len(decoders) > 1 and all(isinstance(decode, attrgetter) for decode in decoders):
            get_all = attrgetter(*[field.name for field in fields(kind)])
            return lambda message: kind(*get_all(message))
        return lambda message: kind(*[decode(message) for decode in decoders])

    def _field_decoder(self, described: Any, field: Field[Any], hint: Any) -> _Decoder:
        """Return the function that gets a field of a message.

        A field that an older version did not know, and left out, gets its default; that of a number is always 0.
        """
        name, get = field.name, attrgetter(field.name)
        if described.enum_type is not None:
            return _enum_decoder(get, hint, field.default)
        if described.message_type is None:
            return (lambda message: tuple(get(message))) if is_repeated(described) else get
        full_name = described.message_type.full_name
        if full_name == _DURATION and field.default is not MISSING:
            default = field.default
            return lambda message: to_seconds(get(message)) if message.HasField(name) else default
        if full_name in {_DURATION, _TIMESTAMP}:
            return lambda message: to_seconds(get(message))
        decode = self._decoder(self._values[full_name])
        if is_repeated(described):
            return lambda message: tuple(map(decode, get(message)))
        return lambda message: decode(get(message)) if message.HasField(name) else None


def _enum_decoder(get: _Decoder, kind: type[IntEnum], default: Any) -> _Decoder:
    known = {int(value): value for value in kind}
    if default is not MISSING:
        known.setdefault(0, default)

    def decode(message: Any) -> IntEnum:
        try:
            return known[get(message)]
        except KeyError as error:
            raise NewerVersion(f"{error} is not a valid {kind.__name__}") from error

    return decode


def _encode_repeated(message: Any, name: str, values: Any) -> None:
    getattr(message, name).extend(values)
