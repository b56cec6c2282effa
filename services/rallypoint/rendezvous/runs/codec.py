"""Core values to protocol messages and back.

A core value and its message have the same names for their fields, and enums the same numbers, so one
translation by field descriptors serves them all; the exceptions are in the two tables.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from enum import IntEnum
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from rallypoint.rendezvous.core import commands, facts, snapshot, state
from rallypoint.rendezvous.v1 import journal_pb2, rendezvous_service_pb2
from rallypoint.rpc.durations import set_seconds, to_seconds

_T = TypeVar("_T")


class NewerVersion(ValueError):
    """A message contains an element that only a later version knows."""


_MESSAGES: dict[type, type[Message]] = {
    getattr(facts, name): getattr(journal_pb2, name)
    for name in (
        "RunCreated",
        "NodeJoined",
        "NodeLost",
        "NodeLeft",
        "NodeDeparting",
        "NodeEvicted",
        "NodeReadmitted",
        "RoundFrozen",
        "NodeConfirmed",
        "RoundFinalized",
        "WorkerFailed",
        "NodeSucceeded",
        "ExitBarrierPassed",
        "RestartRequested",
        "RoundEnded",
        "RunClosed",
    )
} | {
    state.RunSettings: rendezvous_service_pb2.RunSettings,
    state.ReportedFailure: rendezvous_service_pb2.WorkerFailure,
    state.RoundEnd: rendezvous_service_pb2.RoundEnd,
    state.RunEnd: rendezvous_service_pb2.RunEnd,
    state.Seat: journal_pb2.Seat,
    state.FailedWorker: journal_pb2.FailedWorker,
    commands.Actor: rendezvous_service_pb2.Actor,
    snapshot.KeptRestart: journal_pb2.Restart,
    snapshot.RunSnapshot: journal_pb2.RunSnapshot,
    snapshot.FormerRank: journal_pb2.FormerRank,
    snapshot.FailedScaleUps: journal_pb2.FailedScaleUps,
}
_VALUES: dict[str, type] = {message.DESCRIPTOR.full_name: value for value, message in _MESSAGES.items()}
_ENUMS: dict[str, type[IntEnum]] = {
    f"rallypoint.rendezvous.v1.{enum.__name__}": enum
    for enum in (
        state.Phase,
        state.Outcome,
        state.ScaleUpPolicy,
        state.RankPolicy,
        state.RoundEndCause,
        state.FailureKind,
        state.LossReason,
        commands.ActorKind,
    )
}
_TIMES = frozenset(kind.DESCRIPTOR.full_name for kind in (Duration, Timestamp))


def to_message(value: Any) -> Any:
    """Return the protocol message of a core value."""
    kind: Any = type(value)
    message = _MESSAGES[kind]()
    for name, encode in _encoders(kind):
        encode(message, name, getattr(value, name))
    return message


def from_message(message: Message, kind: type[_T]) -> _T:
    """Return the core value of a protocol message; `kind` is its type.

    Raises:
        NewerVersion: An enum has a number that this version does not know.
    """
    value: _T = _decode_message(message)
    assert isinstance(value, kind)
    return value


def encode_record(
    run_id: str, revision: int, fact: facts.Fact, wall_time: float, actor: commands.Actor
) -> journal_pb2.JournalRecord:
    """Return a fact as a journal record; `wall_time`, in unix seconds, and `actor` are for people only."""
    record = journal_pb2.JournalRecord(run_id=run_id, revision=revision, by=_actor(actor))
    set_seconds(record.time, wall_time)
    getattr(record, _fact_field(type(fact).__name__)).CopyFrom(to_message(fact))
    return record


@functools.lru_cache(maxsize=1_024)
def _actor(actor: commands.Actor) -> rendezvous_service_pb2.Actor:
    message: rendezvous_service_pb2.Actor = to_message(actor)
    return message


def actor_of(record: journal_pb2.JournalRecord) -> rendezvous_service_pb2.Actor:
    """Return the actor of a journal record, as the API has it."""
    if record.HasField("by"):
        return record.by
    kind, _, name = record.actor.partition(" ")
    return _actor(commands.Actor(_OLDER_ACTORS.get(kind, commands.ActorKind.SERVICE), name))


_OLDER_ACTORS = {kind.name.lower(): kind for kind in commands.ActorKind}


def decode_record(record: journal_pb2.JournalRecord) -> facts.Fact:
    """Return the fact of a journal record.

    Raises:
        NewerVersion: This version does not know the fact.
    """
    which = record.WhichOneof("fact")
    if which is None:
        raise NewerVersion(f"record {record.revision} of run {record.run_id!r} has a fact of a newer version")
    fact: facts.Fact = _decode_message(getattr(record, which))
    return fact


@functools.cache
def _fact_field(type_name: str) -> str:
    oneof = journal_pb2.JournalRecord.DESCRIPTOR.oneofs_by_name["fact"]
    return next(
        f.name for f in oneof.fields if f.message_type is not None and f.message_type.name == type_name
    )


_Encoder = Callable[[Any, str, Any], None]


@functools.cache
def _encoders(kind: Any) -> list[tuple[str, _Encoder]]:
    described = _MESSAGES[kind].DESCRIPTOR.fields_by_name
    return [(field.name, _encoder(described[field.name])) for field in fields(kind)]


def _encoder(field: Any) -> _Encoder:
    if field.message_type is None:
        return _encode_repeated if field.is_repeated else setattr
    if field.message_type.full_name in _TIMES:
        return lambda message, at, value: set_seconds(getattr(message, at), value)
    if field.is_repeated:
        return lambda message, at, value: getattr(message, at).extend([to_message(item) for item in value])
    return _encode_optional


def _encode_repeated(message: Any, name: str, values: Any) -> None:
    getattr(message, name).extend(values)


def _encode_optional(message: Any, name: str, value: Any) -> None:
    if value is not None:
        getattr(message, name).CopyFrom(to_message(value))


def _decode_message(message: Any) -> Any:
    kind = _VALUES[message.DESCRIPTOR.full_name]
    described = message.DESCRIPTOR.fields_by_name
    return kind(
        **{
            field.name: _decode_field(message, described[field.name])
            for field in fields(kind)
            if not _left_to_default(message, described[field.name], field)
        }
    )


def _left_to_default(message: Any, described: Any, field: Field[Any]) -> bool:
    """True if a field must get its default: the message is of a version that did not know it yet."""
    if field.default is MISSING or field.default is None:
        return False
    if described.enum_type is not None:
        return not getattr(message, field.name)
    return isinstance(getattr(message, field.name), Duration) and not message.HasField(field.name)


def _decode_field(message: Any, field: Any) -> Any:
    raw = getattr(message, field.name)
    if field.enum_type is not None:
        try:
            return _ENUMS[field.enum_type.full_name](raw)
        except ValueError as error:
            raise NewerVersion(str(error)) from error
    if field.message_type is None:
        return tuple(raw) if field.is_repeated else raw
    if field.is_repeated:
        return tuple(_decode_message(item) for item in raw)
    if isinstance(raw, (Duration, Timestamp)):
        return to_seconds(raw)
    return _decode_message(raw) if message.HasField(field.name) else None
