"""Every field of a request is checked; a refusal names the bad field and the expected value."""

from __future__ import annotations

import math

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from grpc import StatusCode
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.rendezvous.api.requests import join_command, run_settings, worker_failure
from rallypoint.rendezvous.core.ranks import assign_seats
from rallypoint.rendezvous.core.state import (
    LONGEST,
    MOST_NODES,
    MOST_WORKERS_PER_NODE,
    FailureKind,
    Node,
    RankPolicy,
    ReportedFailure,
    RunSettings,
    ScaleUpPolicy,
)
from rallypoint.rendezvous.runs.run import api_messages
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.errors import ServiceError
from rallypoint.serving.access import Caller

CALLER = Caller("alice", "ipv4:10.0.0.9:1")
POSITIVE = "must be more than 0 and at most 2160000 seconds"
NOT_NEGATIVE = "must be at least 0 and at most 2160000 seconds"


def good_join() -> pb.JoinRun:
    """Return a valid join."""
    return pb.JoinRun(
        run_id="run",
        node_id="node1",
        settings=pb.RunSettings(min_nodes=1, max_nodes=4),
        address="node1.cluster",
        local_world_size=8,
        role="trainer",
    )


def violation(join: pb.JoinRun) -> tuple[str, str]:
    """Return the refused field, and the reason."""
    with pytest.raises(ServiceError) as refusal:
        join_command(join, CALLER)
    error = refusal.value
    assert (error.code, error.reason) == (StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    ((field, description),) = error.field_violations
    assert error.message == f"{field}: {description}"
    return field, description


def test_a_good_join_is_taken_as_it_is() -> None:
    """Defaults replace the absent fields."""
    command = join_command(good_join(), CALLER)
    assert (command.node_id, command.address, command.local_world_size, command.role) == (
        "node1",
        "node1.cluster",
        8,
        "trainer",
    )
    assert command.settings == RunSettings(min_nodes=1, max_nodes=4)


def test_settings_that_are_there_are_taken() -> None:
    """Each of them, also zero where zero has a meaning."""
    message = pb.RunSettings(
        min_nodes=2,
        max_nodes=3,
        max_restarts=4,
        join_timeout=Duration(seconds=1, nanos=118_000_000),
        last_call_timeout=Duration(),
        confirm_timeout=Duration(seconds=6),
        keep_alive_interval=Duration(nanos=500_000_000),
        keep_alive_max_attempt=7,
        disconnect_grace=Duration(),
        scale_up_policy=pb.SCALE_UP_POLICY_ON_RESTART,
        exit_barrier_timeout=Duration(seconds=8),
        scale_up_delay=Duration(),
        rank_policy=pb.RANK_POLICY_TOPOLOGY,
        restart_window=Duration(seconds=9),
        max_restarts_per_node=3,
        restart_backoff=Duration(),
    )
    assert run_settings(message) == RunSettings(
        min_nodes=2,
        max_nodes=3,
        max_restarts=4,
        join_timeout=1.118,
        last_call_timeout=0.0,
        confirm_timeout=6.0,
        keep_alive_interval=0.5,
        keep_alive_max_attempt=7,
        disconnect_grace=0.0,
        scale_up_policy=ScaleUpPolicy.ON_RESTART,
        exit_barrier_timeout=8.0,
        scale_up_delay=0.0,
        rank_policy=RankPolicy.TOPOLOGY,
        restart_window=9.0,
        max_restarts_per_node=3,
        restart_backoff=0.0,
    )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (pb.RunSettings(keep_alive_interval=Duration(seconds=1_201)), "settings.keep_alive_interval"),
        (pb.RunSettings(max_restarts=2, max_restarts_per_node=3), "settings.max_restarts_per_node"),
        (pb.RunSettings(max_restarts=2, max_restarts_per_node=-1), "settings.max_restarts_per_node"),
        (pb.RunSettings(max_restarts=10_001, max_restarts_per_node=1), "settings.max_restarts"),
        (pb.RunSettings(max_restarts=10_001, restart_window=Duration(seconds=1)), "settings.max_restarts"),
        (pb.RunSettings(restart_window=Duration(seconds=-1)), "settings.restart_window"),
        (pb.RunSettings(restart_backoff=Duration(seconds=-1)), "settings.restart_backoff"),
    ],
    ids=lambda value: " ".join(str(value).split()),
)
def test_budgets_that_make_no_sense_are_refused(settings: pb.RunSettings, named: str) -> None:
    """A limit that never takes effect, and one that could not be kept."""
    join = good_join()
    join.settings.MergeFrom(settings)
    assert violation(join)[0] == named


@pytest.mark.parametrize(
    ("name", "value", "description"),
    [
        ("run_id", "", "must not be empty"),
        ("run_id", "x" * 257, "must have at most 256 bytes, not 257"),
        ("run_id", "ä" * 129, "must have at most 256 bytes, not 258"),
        ("run_id", "a\nb", "must not have control characters"),
        ("node_id", "", "must not be empty"),
        ("node_id", "\x1b[31mred", "must not have control characters"),
        ("node_id", "x" * 257, "must have at most 256 bytes, not 257"),
        ("address", "", "must not be empty: it is how the other nodes reach this one"),
        ("address", "a\0", "must not have control characters"),
        ("address", "x" * 257, "must have at most 256 bytes, not 257"),
        ("role", "a\rb", "must not have control characters"),
        ("role", "x" * 257, "must have at most 256 bytes, not 257"),
        ("local_world_size", 0, "must be from 1 to 16384, not 0"),
        ("local_world_size", -1, "must be from 1 to 16384, not -1"),
        ("local_world_size", 16385, "must be from 1 to 16384, not 16385"),
        ("settings.min_nodes", 0, "must be from 1 to 100000, not 0"),
        ("settings.max_nodes", 0, "must be from 1 to 100000, not 0"),
        ("settings.max_nodes", 100_001, "must be from 1 to 100000, not 100001"),
        ("settings.max_restarts", -1, "must be from 0 to 1000000, not -1"),
        ("settings.keep_alive_max_attempt", -3, "must be from 1 to 1000, not -3"),
        ("settings.scale_up_policy", 9, "unknown policy 9"),
        ("settings.rank_policy", 9, "unknown policy 9"),
        ("topology", "r1\n", "must not have control characters"),
        ("topology", "x" * 257, "must have at most 256 bytes, not 257"),
        ("settings.exit_barrier_timeout", Duration(), f"{POSITIVE}, not 0"),
        ("settings.scale_up_delay", Duration(seconds=-1), f"{NOT_NEGATIVE}, not -1"),
        ("settings.join_timeout", Duration(), f"{POSITIVE}, not 0"),
        ("settings.last_call_timeout", Duration(seconds=-1), f"{NOT_NEGATIVE}, not -1"),
        ("settings.confirm_timeout", Duration(seconds=2160001), f"{POSITIVE}, not 2.16e+06"),
        ("settings.keep_alive_interval", Duration(nanos=-1), f"{POSITIVE}, not -1e-09"),
        (
            "settings.disconnect_grace",
            Duration(seconds=2**62),
            "is not a valid duration: seconds or nanos are out of range, or differ in sign",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "must" not in value else "",
)
def test_a_bad_field_is_refused_by_name(name: str, value: object, description: str) -> None:
    """The message has the field, the expected value and the given value."""
    join = good_join()
    head, _, field = name.rpartition(".")
    part = join.settings if head else join
    if isinstance(value, Duration):
        getattr(part, field).CopyFrom(value)
    else:
        setattr(part, field, value)
    assert violation(join) == (name, description)


def test_settings_that_are_not_there_at_all_are_refused() -> None:
    """A run of zero nodes does not exist."""
    join = good_join()
    join.ClearField("settings")
    with pytest.raises(ServiceError) as refused:
        join_command(join, CALLER)
    assert [field for field, _ in refused.value.field_violations] == [
        "settings.min_nodes",
        "settings.max_nodes",
    ]


def test_the_largest_run_has_ranks_of_32_bits() -> None:
    """The most nodes, each with the most workers, still fit the messages."""
    assert MOST_NODES * MOST_WORKERS_PER_NODE < 2**31
    nodes = [Node(f"n{n}", n, "a", MOST_WORKERS_PER_NODE, "t", "", 0.0, 0.0) for n in range(3)]
    last = assign_seats(nodes, {})[-1]
    assert last.role_world_size == 3 * MOST_WORKERS_PER_NODE


@given(nanoseconds=st.integers(1, int(LONGEST * 1e9)))
def test_a_time_from_the_wire_is_the_same_after_a_restart(nanoseconds: int) -> None:
    """Settings are compared exactly: if the journal lost one bit, every node would be refused after a restart."""
    message = pb.RunSettings(min_nodes=1, max_nodes=1)
    message.join_timeout.FromNanoseconds(nanoseconds)
    of_wire = run_settings(message)
    assert api_messages.from_message(api_messages.to_message(of_wire), RunSettings) == of_wire


class TestFailureReports:
    """A report that is too long or malformed is not lost: it is cut to the part that can be kept."""

    def test_the_node_is_the_one_that_reports_it(self) -> None:
        """The name in the report is ignored."""
        assert worker_failure(pb.WorkerFailure(node_id="somebody else"), "node1").node_id == "node1"

    def test_it_is_kept_as_it_is_where_it_can_be(self) -> None:
        """Every field."""
        message = pb.WorkerFailure(
            round=3,
            rank=5,
            local_rank=1,
            role="trainer",
            host="h",
            pid=4711,
            exit_code=-9,
            time=Timestamp(seconds=1_700_000_000, nanos=500_000_000),
            message="CUDA out of memory",
            traceback="Traceback\n  File\n",
            log_file="/log/0.log",
            age=Duration(seconds=1, nanos=500_000_000),
            kind=pb.FAILURE_KIND_OUT_OF_MEMORY,
            permanent=True,
            core_file="/cores/4711",
        )
        assert worker_failure(message, "node1") == ReportedFailure(
            round=3,
            rank=5,
            local_rank=1,
            role="trainer",
            node_id="node1",
            host="h",
            pid=4711,
            exit_code=-9,
            time=1_700_000_000.5,
            message="CUDA out of memory",
            traceback="Traceback\n  File\n",
            log_file="/log/0.log",
            age=1.5,
            kind=FailureKind.OUT_OF_MEMORY,
            permanent=True,
            core_file="/cores/4711",
        )

    @pytest.mark.parametrize(
        ("age", "kept"),
        [
            (Duration(seconds=-(2**62)), 0.0),
            (Duration(seconds=2**62, nanos=-5), LONGEST),
            (Duration(seconds=2, nanos=-500_000_000), 1.5),
        ],
        ids=str,
    )
    def test_an_impossible_age_becomes_a_possible_one(self, age: Duration, kept: float) -> None:
        """A host's clock may be wrong; its failure still counts."""
        assert worker_failure(pb.WorkerFailure(age=age), "n").age == kept

    def test_a_kind_of_a_newer_agent_is_not_known(self) -> None:
        """And the report is not lost."""
        message = pb.WorkerFailure(message="it broke")
        message.kind = 99  # type: ignore[assignment]
        failure = worker_failure(message, "n")
        assert (failure.kind, failure.message) == (FailureKind.UNKNOWN, "it broke")

    def test_the_end_of_a_long_traceback_is_kept(self) -> None:
        """The error is there; a character that was cut in two is dropped."""
        failure = worker_failure(pb.WorkerFailure(traceback="ä" * 20_000 + "!"), "n")
        assert failure.traceback == "ä" * 8191 + "!"

    def test_the_beginning_of_a_long_sentence_is_kept(self) -> None:
        """Cut at whole characters."""
        failure = worker_failure(pb.WorkerFailure(message="ä" * 600, host="h" * 300, role="r" * 300), "n")
        assert failure.message == "ä" * 512
        assert (len(failure.host), len(failure.role)) == (256, 256)

    def test_control_characters_of_the_message_become_spaces(self) -> None:
        """The message ends up in logs, on terminals, and in one sentence; the traceback keeps its lines."""
        failure = worker_failure(pb.WorkerFailure(message="a\nb\x1b[31mc", traceback="a\nb"), "n")
        assert (failure.message, failure.traceback) == ("a b [31mc", "a\nb")

    @pytest.mark.parametrize(
        "time",
        [
            Timestamp(seconds=2**62),
            Timestamp(seconds=-(2**62)),
            Timestamp(seconds=253_402_300_799, nanos=999_999_999),
            Timestamp(seconds=5, nanos=-5),
            Timestamp(seconds=5, nanos=2**31 - 1),
        ],
        ids=str,
    )
    def test_an_impossible_time_is_left_out(self, time: Timestamp) -> None:
        """It is for people only, and must not stop a server that writes it to the journal."""
        failure = worker_failure(pb.WorkerFailure(time=time), "n")
        assert failure.time == 0.0
        assert math.isclose(api_messages.to_message(failure).time.ToNanoseconds(), 0)
