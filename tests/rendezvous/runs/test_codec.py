"""What the core knows is written down and read back without loss, and both sides have the same names for it."""

from __future__ import annotations

from dataclasses import fields
from enum import IntEnum
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rallypoint.rendezvous.core import facts, snapshot, state
from rallypoint.rendezvous.core.commands import SERVICE
from rallypoint.rendezvous.core.state import LONGEST
from rallypoint.rendezvous.runs.codec import decode_record, encode_record, from_message, to_message
from rallypoint.rendezvous.v1 import journal_pb2, rendezvous_service_pb2
from rallypoint.rendezvous.v1.journal_pb2 import JournalRecord

FACTS: tuple[type[Any], ...] = get_args(facts.Fact)
ENUMS: list[type[IntEnum]] = [
    state.Phase,
    state.Outcome,
    state.ScaleUpPolicy,
    state.RankPolicy,
    state.RoundEndCause,
    state.LossReason,
]

# A time as it comes from the wire: whole nanoseconds, up to the longest that is taken.
seconds = st.integers(0, int(LONGEST * 1e9)).map(lambda nanoseconds: nanoseconds / 1e9)
text = st.text(max_size=20)
numbers = st.integers(0, 2**31 - 1)

settings = st.builds(
    state.RunSettings,
    min_nodes=numbers,
    max_nodes=numbers,
    max_restarts=numbers,
    join_timeout=seconds,
    last_call_timeout=seconds,
    confirm_timeout=seconds,
    keep_alive_interval=seconds,
    keep_alive_max_attempt=numbers,
    disconnect_grace=seconds,
    exit_barrier_timeout=seconds,
    scale_up_policy=st.sampled_from(state.ScaleUpPolicy),
    scale_up_delay=seconds,
    rank_policy=st.sampled_from(state.RankPolicy),
)
failures = st.builds(
    state.ReportedFailure,
    round=numbers,
    rank=numbers,
    local_rank=numbers,
    role=text,
    node_id=text,
    host=text,
    pid=st.integers(0, 2**63 - 1),
    exit_code=st.integers(-64, 255),
    time=st.integers(0, 4 * 10**9).map(float),
    message=text,
    traceback=text,
    log_file=text,
)
seats = st.builds(
    state.Seat,
    node_id=text,
    group_rank=numbers,
    base_rank=numbers,
    base_role_rank=numbers,
    role_world_size=numbers,
    local_world_size=numbers,
)
round_ends = st.builds(
    state.RoundEnd, round=numbers, cause=st.sampled_from(state.RoundEndCause), node_id=text, detail=text
)
run_ends = st.builds(
    state.RunEnd, outcome=st.sampled_from(state.Outcome), detail=text, failure=st.none() | failures
)
any_fact = st.one_of(
    st.builds(facts.RunCreated, settings=settings),
    st.builds(
        facts.NodeJoined,
        node_id=text,
        lease=numbers,
        address=text,
        local_world_size=numbers,
        role=text,
        topology=text,
    ),
    st.builds(facts.NodeLost, node_id=text, reason=st.sampled_from(state.LossReason)),
    st.builds(facts.NodeLeft, node_id=text, reason=text),
    st.builds(facts.NodeDeparting, node_id=text, reason=text),
    st.builds(facts.NodeEvicted, node_id=text, reason=text, lease=numbers),
    st.builds(facts.NodeReadmitted, node_id=text, reason=text),
    st.builds(facts.RoundFrozen, round=numbers, seats=st.lists(seats, max_size=3).map(tuple)),
    st.builds(facts.NodeConfirmed, round=numbers, node_id=text, master_port=numbers),
    st.builds(facts.RoundFinalized, round=numbers),
    st.builds(facts.WorkerFailed, failure=failures),
    st.builds(facts.NodeSucceeded, round=numbers, node_id=text),
    st.builds(facts.ExitBarrierPassed, round=numbers),
    st.builds(facts.RestartRequested, round=numbers, reason=text),
    st.builds(facts.RoundEnded, end=round_ends, restart_count=numbers),
    st.builds(facts.RunClosed, end=run_ends),
)


@hypothesis_settings(deadline=None)
@given(fact=any_fact, run_id=text, revision=st.integers(1, 2**62))
def test_a_fact_is_read_back_from_its_record_as_it_was(fact: facts.Fact, run_id: str, revision: int) -> None:
    """Through bytes, as a journal keeps it; every field, also empty ones, and times to the nanosecond."""
    blob = encode_record(run_id, revision, fact, 1.7e9, SERVICE).SerializeToString()
    record = JournalRecord.FromString(blob)
    assert (record.run_id, record.revision, record.time.seconds) == (run_id, revision, 1_700_000_000)
    assert decode_record(record) == fact


@hypothesis_settings(deadline=None)
@given(settings=settings)
def test_settings_survive_any_number_of_journeys(settings: state.RunSettings) -> None:
    """Those of the wire are those of the journal: a node is not refused because a server started again."""
    once = from_message(to_message(settings), state.RunSettings)
    assert once == settings
    assert to_message(once) == to_message(settings)


def test_settings_of_an_earlier_version_have_the_defaults_of_this_one() -> None:
    """A journal that was written before a setting was there is read as if it had been left alone."""
    earlier = rendezvous_service_pb2.RunSettings(min_nodes=2, max_nodes=3, keep_alive_max_attempt=5)
    earlier.join_timeout.FromSeconds(7)
    read = from_message(earlier, state.RunSettings)
    assert read == state.RunSettings(min_nodes=2, max_nodes=3, join_timeout=7.0, keep_alive_max_attempt=5)
    assert (read.rank_policy, read.exit_barrier_timeout) == (state.RankPolicy.STABLE, 300.0)


def test_every_fact_has_a_place_in_a_record() -> None:
    """And a record knows no fact that the core does not."""
    oneof = JournalRecord.DESCRIPTOR.oneofs_by_name["fact"]
    of_record = {field.message_type.name for field in oneof.fields if field.message_type is not None}
    assert of_record == {fact.__name__ for fact in FACTS}


@pytest.mark.parametrize(
    ("kind", "module"),
    [(fact, journal_pb2) for fact in FACTS]
    + [(kind, journal_pb2) for kind in (state.Seat, snapshot.RunSnapshot, snapshot.FormerRank)]
    + [(kind, rendezvous_service_pb2) for kind in (state.RunSettings, state.ReportedFailure)]
    + [(kind, rendezvous_service_pb2) for kind in (state.RoundEnd, state.RunEnd)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_value_and_its_message_have_the_same_fields(kind: type[Any], module: Any) -> None:
    """So that nothing is lost on the way, and nobody needs a table to read a journal."""
    message = getattr(module, "WorkerFailure" if kind is state.ReportedFailure else kind.__name__)
    assert {field.name for field in fields(kind)} == set(message.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("enum", ENUMS, ids=lambda enum: str(enum.__name__))
def test_an_enum_and_its_message_have_the_same_numbers(enum: type[IntEnum]) -> None:
    """By name and number, 0 being what is not set."""
    module = journal_pb2 if hasattr(journal_pb2, enum.__name__) else rendezvous_service_pb2
    wire = getattr(module, enum.__name__).DESCRIPTOR
    prefix = wire.values_by_number[0].name.removesuffix("UNSPECIFIED")
    of_wire = {value.name.removeprefix(prefix): value.number for value in wire.values if value.number}
    assert of_wire == {value.name: int(value) for value in enum}


def test_a_fact_of_a_newer_version_is_refused() -> None:
    """A record whose fact, or reason, this version does not know can't be folded."""
    with pytest.raises(ValueError, match="record 7 of run 'r' has a fact of a newer version"):
        decode_record(JournalRecord(run_id="r", revision=7))
    record = encode_record("r", 1, facts.NodeLost("a", state.LossReason.DISCONNECTED), 0.0, SERVICE)
    record.node_lost.ClearField("reason")
    with pytest.raises(ValueError, match="0 is not a valid LossReason"):
        decode_record(record)
