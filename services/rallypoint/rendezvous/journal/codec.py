"""The content of a journal: records and snapshots of runs to bytes, and back. No other code knows their messages."""

from __future__ import annotations

import functools
from typing import Any, get_args

from google.protobuf.timestamp_pb2 import Timestamp

from rallypoint.journal.v1 import journal_pb2
from rallypoint.rendezvous.base.codec import MessageCodec, NewerVersion
from rallypoint.rendezvous.core import facts, snapshot, state
from rallypoint.rendezvous.core.commands import Actor, ActorKind
from rallypoint.rpc.durations import set_seconds

_messages = MessageCodec(
    {fact: getattr(journal_pb2, fact.__name__) for fact in get_args(facts.Fact)}
    | {
        state.RunSettings: journal_pb2.RunSettings,
        state.ReportedFailure: journal_pb2.WorkerFailure,
        state.RoundEnd: journal_pb2.RoundEnd,
        state.RunEnd: journal_pb2.RunEnd,
        state.RecoveryParts: journal_pb2.RecoveryParts,
        state.Seat: journal_pb2.Seat,
        state.EndedIncarnation: journal_pb2.EndedIncarnation,
        state.FailedWorker: journal_pb2.FailedWorker,
        Actor: journal_pb2.Actor,
        snapshot.KeptRestart: journal_pb2.Restart,
        snapshot.RunSnapshot: journal_pb2.RunSnapshot,
        snapshot.FormerRank: journal_pb2.FormerRank,
        snapshot.FailedScaleUps: journal_pb2.FailedScaleUps,
    }
)
# The fact of each field of the record's oneof, and back.
_FACTS: dict[str, type[facts.Fact]] = {
    field.name: getattr(facts, field.message_type.name)
    for field in journal_pb2.JournalRecord.DESCRIPTOR.oneofs_by_name["fact"].fields
    if field.message_type is not None
}
_FIELDS = {fact: name for name, fact in _FACTS.items()}
# A part of another record; see RoundFinalized in journal.proto.
_ROUND_STARTED = "round_started"
_FACTS[_ROUND_STARTED] = facts.RoundStarted
_actor = functools.lru_cache(maxsize=1_024)(_messages.to_message)
_OLDER_ACTORS = {kind.name.lower(): kind for kind in ActorKind}


def encode_record(run_id: str, revision: int, fact: facts.Fact, wall_time: float, actor: Actor) -> bytes:
    """Return a fact as a journal record; `wall_time`, in unix seconds, and `actor` are for people only."""
    record = journal_pb2.JournalRecord(run_id=run_id, revision=revision, by=_actor(actor))
    set_seconds(record.time, wall_time)
    if isinstance(fact, facts.RoundStarted):
        record.round_finalized.round = fact.round
        record.round_finalized.started.CopyFrom(_messages.to_message(fact))
    else:
        getattr(record, _FIELDS[type(fact)]).CopyFrom(_messages.to_message(fact))
    return record.SerializeToString()


def encode_snapshot(of_run: snapshot.RunSnapshot) -> bytes:
    """Return a snapshot as the content of a checkpoint, a high-water mark or a forgotten run."""
    encoded: bytes = _messages.to_message(of_run).SerializeToString()
    return encoded


def decode_snapshot(content: bytes) -> snapshot.RunSnapshot:
    """Return the snapshot of a checkpoint or a forgotten run.

    Raises:
        DecodeError: The content is not a snapshot.
        NewerVersion: It has an element that this version does not know.
    """
    return _messages.from_message(journal_pb2.RunSnapshot.FromString(content), snapshot.RunSnapshot)


class DecodedRecord:
    """A journal record. Its parts are decoded when they are asked for, because filters need few of them.

    Attributes:
        run_id: Name of the run.
        revision: Number of the record in its run.
        time: When it was decided, by the server's wall clock.
        fact_name: Name of its fact in the record, as "node_joined"; "": the fact is of a newer version.
    """

    __slots__ = ("_fact", "_message", "fact_name", "revision", "run_id", "time")

    def __init__(self, content: bytes) -> None:
        """Decode the content of a `Record`.

        Raises:
            DecodeError: The content is not a record.
        """
        self._message = message = journal_pb2.JournalRecord.FromString(content)
        self.run_id, self.revision = message.run_id, message.revision
        self.time: Timestamp = message.time
        self.fact_name: str = message.WhichOneof("fact") or ""
        self._fact: Any = getattr(message, self.fact_name) if self.fact_name else None
        if self.fact_name == "round_finalized" and message.round_finalized.HasField("started"):
            self.fact_name, self._fact = _ROUND_STARTED, message.round_finalized.started

    def fact(self) -> facts.Fact:
        """Return the fact.

        Raises:
            NewerVersion: This version does not know the fact, or an element of it.
        """
        if not self.fact_name:
            raise NewerVersion(f"record {self.revision} of run {self.run_id!r} has a fact of a newer version")
        return _messages.from_message(self._fact, _FACTS[self.fact_name])

    def subject(self) -> tuple[str, int]:
        """Return the node and the round that the fact concerns; "" and 0: no single one. Decodes no fact."""
        fact = self._fact
        match self.fact_name:
            case "worker_failed":
                fact = fact.failure
            case "round_ended":
                fact = fact.end
            case "node_lost":
                return fact.node_id, fact.failed_round
        return getattr(fact, "node_id", ""), getattr(fact, "round", 0)

    def actor(self) -> Actor:
        """Return who caused the fact."""
        if self._message.HasField("by"):
            return _decoded_actor(self._message.by.SerializeToString())
        kind, _, name = self._message.actor.partition(" ")
        return Actor(_OLDER_ACTORS.get(kind, ActorKind.SERVICE), name)


@functools.lru_cache(maxsize=1_024)
def _decoded_actor(encoded: bytes) -> Actor:
    return _messages.from_message(journal_pb2.Actor.FromString(encoded), Actor)
