"""A node that waits for others logs how many are missing, and the deadline."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from rallypoint.agent.job.waiting import describe_waiting, is_waiting
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import to_duration

NOW = datetime(2027, 1, 15, 17, 40, 32, tzinfo=UTC)


@pytest.mark.parametrize(
    ("here", "names", "join_time", "last_call", "line"),
    [
        (1, ["host-a"], 30.0, None, "waiting for nodes: 1 of 2 here (host-a); gives up at 17:41:02"),
        (1, ["host-a"], None, None, "waiting for nodes: 1 of 2 here (host-a)"),
        (0, [], None, None, "waiting for nodes: 0 of 2 here"),
        (2, ["a", "b"], None, 27.6, "last call: starts in 28 s at the latest, at once with 3"),
        (2, ["a", "b"], None, 0.0, "waiting for the round to form: 2 nodes here"),
        (2, ["a", "b"], None, None, "waiting for the round to form: 2 nodes here"),
    ],
)
def test_the_sentence(
    here: int, names: list[str], join_time: float | None, last_call: float | None, line: str
) -> None:
    """It has the service's figures; an older service sends no times."""
    run = pb.Run(
        node_count=here,
        settings=pb.RunSettings(min_nodes=2, max_nodes=3),
        nodes=[pb.Node(node_id=name) for name in names],
        join_time_left=None if join_time is None else to_duration(join_time),
        last_call_left=None if last_call is None else to_duration(last_call),
    )
    assert describe_waiting(run, NOW) == line


def test_of_many_nodes_some_are_named() -> None:
    """The text stays on one line."""
    run = pb.Run(phase=pb.PHASE_JOINABLE, node_count=900, join_time_left=to_duration(28.0))
    run.settings.MergeFrom(pb.RunSettings(min_nodes=1000, max_nodes=1000))
    run.nodes.extend(pb.Node(node_id=f"host-{number}") for number in range(900))
    assert is_waiting(run)
    assert describe_waiting(run, NOW) == (
        "waiting for nodes: 900 of 1000 here (host-0, host-1, host-2, host-3 and 896 more); gives up at 17:41:00"
    )


@pytest.mark.parametrize("phase", [pb.PHASE_FROZEN, pb.PHASE_FINAL, pb.PHASE_CLOSED])
def test_a_run_that_has_its_nodes_waits_for_none(phase: pb.Phase.ValueType) -> None:
    """A round that formed meanwhile is not reported as a wait."""
    assert not is_waiting(pb.Run(phase=phase, node_count=2))
