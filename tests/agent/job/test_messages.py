"""What the rendezvous service says and hears of a node is, field by field, what the agent means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rallypoint.agent.core.core import Assignment, Phase
from rallypoint.agent.failures.failure import FailureKind, WorkerFailure
from rallypoint.agent.job.result import assignment_value, failure_message, failure_value, phase_value
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


def test_a_place_in_a_round_is_taken_over_field_by_field() -> None:
    """No two fields are mixed up: all differ."""
    names = [field.name for field in pb.Assignment.DESCRIPTOR.fields]
    values: dict[str, Any] = {
        name: ("10.0.0.1" if name == "master_address" else number) for number, name in enumerate(names, 1)
    }
    assert assignment_value(pb.Assignment(**values)) == Assignment(**values)


@pytest.mark.parametrize("phase", list(Phase))
def test_phases_keep_their_names(phase: Phase) -> None:
    """A phase is what its name says."""
    assert phase_value(pb.Phase.Value(f"PHASE_{phase.name}")) is phase


def test_a_phase_of_a_newer_server_stops_workers_and_waits() -> None:
    """Running on without knowing whether one may would be worse."""
    assert phase_value(pb.Phase.ValueType(77)) is Phase.JOINABLE


def test_a_failure_travels_and_comes_back_whole() -> None:
    """What one host reports is what all hosts print."""
    message = failure_message(FAILURE, 3, now=1001.0)
    assert message.round == 3
    assert message.node_id == ""
    assert message.age.ToMilliseconds() == 750
    assert failure_value(message) == FAILURE
    message.node_id = "b"
    assert (failure_value(message).node, failure_value(message).at) == ("b", None)


@pytest.mark.parametrize("kind", list(FailureKind))
def test_kinds_of_failure_keep_their_names(kind: FailureKind) -> None:
    """A kind is what its name says; one of a newer server is not known."""
    message = failure_message(replace(FAILURE, kind=kind), 3, now=1001.0)
    assert pb.FailureKind.Name(message.kind) == f"FAILURE_KIND_{kind.name}"
    assert failure_value(message).kind is kind
    assert failure_value(pb.WorkerFailure(kind=pb.FailureKind.ValueType(77))).kind is FailureKind.UNSPECIFIED
