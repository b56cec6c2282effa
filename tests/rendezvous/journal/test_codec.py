"""The core's values are encoded and decoded without loss, and both forms have the same names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import IntEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rallypoint.journal.v1 import etcd_pb2, journal_pb2
from rallypoint.rendezvous.core import facts, snapshot, state
from rallypoint.rendezvous.core.commands import SERVICE, Actor, ActorKind
from rallypoint.rendezvous.core.state import LONGEST
from rallypoint.rendezvous.journal.codec import DecodedRecord, decode_snapshot, encode_record, encode_snapshot
from rallypoint.rendezvous.runs.run import api_messages
from rallypoint.rendezvous.v1 import rendezvous_service_pb2
from rallypoint.rpc.durations import to_seconds

FACTS: tuple[type[Any], ...] = get_args(facts.Fact)
ENUMS: list[type[IntEnum]] = [
    state.Phase,
    state.Outcome,
    state.ScaleUpPolicy,
    state.RankPolicy,
    state.RoundEndCause,
    ActorKind,
]
# Name, bytes and fields.
STORED = re.findall(
    r"^(\w+) (\w+)\n +(.*)$", Path(__file__).with_name("stored_messages.txt").read_text(), re.MULTILINE
)

# A time as it comes from the wire: whole nanoseconds, up to the longest that is accepted.
seconds = st.integers(0, int(LONGEST * 1e9)).map(lambda nanoseconds: nanoseconds / 1e9)
text = st.text(max_size=20)
numbers = st.integers(0, 2**31 - 1)

BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: numbers,
    float: seconds,
    str: text,
    bytes: st.binary(max_size=20),
    bool: st.booleans(),
}
BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "pid": st.integers(0, 2**63 - 1),
    "exit_code": st.integers(-64, 255),
    "time": st.integers(0, 4 * 10**9).map(float),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Return values of a type; of a dataclass, with every field."""
    if kind in BY_TYPE:
        return BY_TYPE[kind]
    if is_dataclass(kind):
        hints = get_type_hints(kind).items()
        make = cast(Callable[..., Any], kind)
        return st.builds(
            make, **{name: BY_NAME[name] if name in BY_NAME else values(each) for name, each in hints}
        )
    if get_origin(kind) is tuple:
        return st.lists(values(get_args(kind)[0]), max_size=3).map(tuple)
    if get_origin(kind) is UnionType:
        return st.one_of(*(st.none() if each is NoneType else values(each) for each in get_args(kind)))
    return st.sampled_from(kind)


@hypothesis_settings(deadline=None)
@given(fact=st.one_of(*map(values, FACTS)), run_id=text, revision=st.integers(1, 2**62))
def test_a_fact_is_read_back_from_its_record_as_it_was(fact: facts.Fact, run_id: str, revision: int) -> None:
    """Through bytes, as a journal keeps it; every field, also empty ones, and times to the nanosecond."""
    record = DecodedRecord(encode_record(run_id, revision, fact, 1.7e9, SERVICE))
    assert (record.run_id, record.revision, record.time.seconds) == (run_id, revision, 1_700_000_000)
    assert (record.fact(), record.actor()) == (fact, SERVICE)


@pytest.mark.parametrize(("name", "content", "shown"), STORED)
def test_a_stored_message_is_read_and_written_byte_for_byte(name: str, content: str, shown: str) -> None:
    """A journal outlives the version that wrote it."""
    stored = bytes.fromhex(content)
    message = getattr(etcd_pb2 if name.startswith("Etcd") else journal_pb2, name).FromString(stored)
    assert text_format.MessageToString(message, as_one_line=True).strip() == shown
    assert message.SerializeToString() == stored
    if name == "RunSnapshot":
        assert without_later_fields(message, encode_snapshot(decode_snapshot(stored))) == stored
    if name == "JournalRecord" and message.HasField("by"):
        read = DecodedRecord(stored)
        again = encode_record(read.run_id, read.revision, read.fact(), to_seconds(read.time), read.actor())
        assert without_later_fields(message, again) == stored


def without_later_fields(stored: Any, again: bytes) -> bytes:
    """Return a message that was encoded again, without the settings that are newer than the stored one."""
    message = type(stored).FromString(again)
    snapshot_or_fact = message if isinstance(message, journal_pb2.RunSnapshot) else message.run_created
    if snapshot_or_fact.HasField("settings"):
        snapshot_or_fact.settings.ClearField("reopen")
    return bytes(message.SerializeToString())


@pytest.mark.parametrize(
    ("text", "actor"),
    [
        ("service", SERVICE),
        ("node n3", Actor(ActorKind.NODE, "n3")),
        ("operator ann of ops", Actor(ActorKind.OPERATOR, "ann of ops")),
    ],
)
def test_the_actor_of_an_older_record_is_read_from_its_text(text: str, actor: Actor) -> None:
    assert DecodedRecord(journal_pb2.JournalRecord(actor=text).SerializeToString()).actor() == actor


@hypothesis_settings(deadline=None)
@given(settings=values(state.RunSettings))
def test_settings_survive_any_number_of_journeys(settings: state.RunSettings) -> None:
    """Those of the wire are those of the journal: a node is not refused because a server started again."""
    once = api_messages.from_message(api_messages.to_message(settings), state.RunSettings)
    assert once == settings
    assert api_messages.to_message(once) == api_messages.to_message(settings)


def test_settings_of_an_earlier_version_have_the_defaults_of_this_one() -> None:
    """A setting that is newer than the journal has its default."""
    earlier = journal_pb2.RunSettings(min_nodes=2, max_nodes=3, keep_alive_max_attempt=5)
    earlier.join_timeout.FromSeconds(7)
    read = decode_snapshot(journal_pb2.RunSnapshot(settings=earlier).SerializeToString()).settings
    assert read == state.RunSettings(min_nodes=2, max_nodes=3, join_timeout=7.0, keep_alive_max_attempt=5)
    assert (read.rank_policy, read.exit_barrier_timeout) == (state.RankPolicy.STABLE, 300.0)


def test_every_fact_has_a_place_in_a_record() -> None:
    """And a record has no fact that the core does not have. One fact is a part of another, for older versions."""
    oneof = journal_pb2.JournalRecord.DESCRIPTOR.oneofs_by_name["fact"]
    of_record = {field.message_type.name for field in oneof.fields if field.message_type is not None}
    assert of_record | {"RoundStarted"} == {fact.__name__ for fact in FACTS}


def test_a_start_is_to_older_versions_that_the_round_is_final() -> None:
    """They refuse a fact that they do not know, and with it the journal."""
    fact = facts.RoundStarted(7, 2, 1, "a", state.RecoveryParts(started=0.5))
    record = DecodedRecord(content := encode_record("run", 9, fact, 1.7e9, SERVICE))
    assert (record.fact_name, record.subject(), record.fact()) == ("round_started", ("", 7), fact)
    older = journal_pb2.JournalRecord.FromString(content)
    older.round_finalized.ClearField("started")
    read = DecodedRecord(older.SerializeToString())
    assert (read.fact_name, read.fact()) == ("round_finalized", facts.RoundFinalized(7))


IN_BOTH = (state.RunSettings, state.ReportedFailure, state.RecoveryParts, state.RoundEnd, state.RunEnd, Actor)
# Fields of a message that stand for another value.
OF_OTHERS = {facts.RoundFinalized: {"started"}}


@pytest.mark.parametrize(
    ("kind", "module"),
    [
        *((kind, rendezvous_service_pb2) for kind in IN_BOTH),
        *(
            (kind, journal_pb2)
            for kind in (*IN_BOTH, *FACTS, state.Seat, state.FailedWorker, state.EndedIncarnation)
        ),
        *((kind, journal_pb2) for kind in (snapshot.RunSnapshot, snapshot.FormerRank)),
    ],
    ids=lambda value: value.__name__,
)
def test_a_value_and_its_message_have_the_same_fields(kind: type[Any], module: Any) -> None:
    """So nothing is lost in conversion, and a journal can be read without a table."""
    message = getattr(module, "WorkerFailure" if kind is state.ReportedFailure else kind.__name__)
    of_message = set(message.DESCRIPTOR.fields_by_name) - OF_OTHERS.get(kind, set())
    assert {field.name for field in fields(kind)} == of_message


@pytest.mark.parametrize(
    ("enum", "module"),
    [
        *((enum, rendezvous_service_pb2) for enum in ENUMS),
        *((enum, journal_pb2) for enum in (*ENUMS, state.LossReason)),
    ],
    ids=lambda value: value.__name__,
)
def test_an_enum_and_its_message_have_the_same_numbers(enum: type[IntEnum], module: Any) -> None:
    """By name and number, 0 is the unset value."""
    wire = getattr(module, enum.__name__).DESCRIPTOR
    prefix = wire.values_by_number[0].name.removesuffix("UNSPECIFIED")
    of_wire = {value.name.removeprefix(prefix): value.number for value in wire.values if value.number}
    assert of_wire == {value.name: int(value) for value in enum}


def test_a_fact_of_a_newer_version_is_refused() -> None:
    """A record whose fact, or reason, this version does not know can't be folded."""
    unknown = journal_pb2.JournalRecord(run_id="r", revision=7)
    with pytest.raises(ValueError, match="record 7 of run 'r' has a fact of a newer version"):
        DecodedRecord(unknown.SerializeToString()).fact()
    without_reason = journal_pb2.JournalRecord(node_lost=journal_pb2.NodeLost(node_id="a"))
    with pytest.raises(ValueError, match="0 is not a valid LossReason"):
        DecodedRecord(without_reason.SerializeToString()).fact()
