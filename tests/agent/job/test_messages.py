"""The messages of the rendezvous service about a node match the agent's values field by field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rallypoint.agent.core.core import Assignment
from rallypoint.agent.failures.failure import WorkerFailure
from rallypoint.agent.job.result import assignment_value, failure_message, failure_value, phase_value
from rallypoint.rendezvous.core.state import FailureKind, Phase
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

FAILURE = WorkerFailure(
    local_rank=1,
    rank=5,
    role="trainer",
    host="host-b",
    pid=4711,
    exit_code=-9,
    time=1_800_000_000.125,
    message="killed by SIGKILL",
    traceback="Traceback …",
    log_file="/logs/1/stderr.log",
    kind=FailureKind.OUT_OF_MEMORY,
    permanent=True,
    core_file="/cores/core.4711",
    at=1000.25,
)


def test_an_assignment_is_converted_field_by_field() -> None:
    """All values differ, so a mix-up of two fields is detected."""
    names = [field.name for field in pb.Assignment.DESCRIPTOR.fields]
    values: dict[str, Any] = {
        name: ("10.0.0.1" if name == "master_address" else number) for number, name in enumerate(names, 1)
    }
    assert assignment_value(pb.Assignment(**values)) == Assignment(**values)


def test_a_phase_of_a_newer_server_stops_workers_and_waits() -> None:
    """It would be worse to run on without permission."""
    phases = [phase_value(pb.Phase.ValueType(number)) for number in (*Phase, 77)]
    assert phases == [*Phase, Phase.JOINABLE]


def test_a_failure_travels_and_comes_back_whole() -> None:
    """All hosts print the report of one host."""
    message = failure_message(FAILURE, 3, now=1001.0)
    assert message.round == 3
    assert message.node_id == ""
    assert message.age.ToMilliseconds() == 750
    assert failure_value(message) == FAILURE
    message.node_id = "b"
    assert (failure_value(message).node, failure_value(message).at) == ("b", None)


def test_kinds_of_failure_keep_their_numbers() -> None:
    """A kind of a newer server is unknown."""
    for kind in FailureKind:
        message = failure_message(replace(FAILURE, kind=kind), 3, now=1001.0)
        assert (int(message.kind), failure_value(message).kind) == (int(kind), kind)
    assert failure_value(pb.WorkerFailure(kind=pb.FailureKind.ValueType(77))).kind is FailureKind.UNKNOWN
