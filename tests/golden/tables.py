"""Render tables of commands at a terminal of 80 columns."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any
from unittest.mock import patch

from click.testing import CliRunner
from google.protobuf.text_format import Parse

from rallypoint.agent.v1 import supervisor_service_pb2 as agent_pb
from rallypoint.cli import operator
from rallypoint.cli.main import main
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import set_seconds
from rallypoint.timer.v1 import timer_service_pb2 as timer_pb

_BEGAN = 1_800_000_000.25  # Unix seconds
_REASON = (
    "worker of rank 3 on node node-3.cluster.example_4242_9f2c1a failed: torch.OutOfMemoryError: CUDA out of memory. "
    "Tried to allocate 2.00 GiB"
)
_REPLICAS = """
answered_by: "replica-1" shards: 16 free_shards: 1
run { shard: 5 owner_name: "replica-2" owner_address: "replica-2.cluster.example:29400" }
replicas { name: "replica-1" address: "replica-1.cluster.example:29400" since { seconds: 1800000000 } shards: 7 }
replicas { name: "replica-2" address: "replica-2.cluster.example:29400" shards: 8 leaving: true }
"""
_WORKERS = """
workers { local_rank: 0 rank: 8 pid: 4301 state: WORKER_STATE_RUNNING progress { step: 1200 idle { seconds: 75 } }
  usage { processor_time { seconds: 4242 } processors: 1.5 memory_bytes: 3221225472 process_count: 5 thread_count: 9 } }
workers { local_rank: 1 rank: 9 pid: 4302 state: WORKER_STATE_FAILED exit_code: -9 }
"""
_TIMERS = """
timers { run_id: "job-17" node_id: "node-3.cluster.example_4242_9f2c1a" worker_id: "3@2" scope: "/srv/train/loop.py#61"
  after { seconds: 60 } remaining { seconds: -3 } state: TIMER_STATE_OFFERED offers: 2 }
timers { run_id: "job-17" node_id: "node-3.cluster.example_4242_9f2c1a" worker_id: "3@2" scope: "checkpoint"
  learned_as: "checkpoint" state: TIMER_STATE_LEARNING }
"""
_SCOPES = """
warm_up: 20 factor: 5 least { seconds: 10 }
scopes { run_id: "job-17" scope: "checkpoint" count: 3 longest { seconds: 41 } timers: 0 }
scopes { run_id: "job-17" scope: "/srv/train/models of vision/loop.py#61" count: 18211 longest { seconds: 3 }
  after { seconds: 15 } timers: 16 }
"""
_PROGRESS = """
workers: 1024 lowest_step: 1200000 highest_step: 1200001 idle { seconds: 605 }
slowest { rank: 1023 node_id: "node-127.training.cluster.example_4242_9f2c1a" worker_id: "7@12" step: 1200000
  idle { seconds: 607 } }
stalled { workers: 1024 at_same_step: 1 idle { seconds: 605 }
  first { rank: 1023 node_id: "node-127.training.cluster.example_4242_9f2c1a" worker_id: "7@12" step: 1200000
    idle { seconds: 607 } } }
"""


def tables() -> dict[str, str]:
    """Return the output of each command by its words joined with `-`; at 80 columns of 24 lines, in UTC."""
    with _utc():
        return {
            "rounds": _shown((_events(), None), "rounds", "job-17"),
            "status": _shown(pb.GetRunResponse(run=_run()), "status", "job-17"),
            "status-all": _shown(pb.ListRunsResponse(runs=[_run()]), "status"),
            "replicas": _shown(Parse(_REPLICAS, pb.ListReplicasResponse()), "replicas", "--run", "job-17"),
            "agent-jobs": _shown(_jobs(), "agent", "jobs"),
            "agent-workers": _shown(Parse(_WORKERS, agent_pb.ListWorkersResponse()), "agent", "workers"),
            "timers": _shown((Parse(_TIMERS, timer_pb.ListTimersResponse()).timers, 0), "timers"),
            "scopes": _shown(Parse(_SCOPES, timer_pb.ListScopesResponse()), "scopes"),
            "progress": _shown(Parse(_PROGRESS, timer_pb.GetProgressResponse()), "progress", "job-17"),
        }


@contextmanager
def _utc() -> Iterator[None]:
    with patch.dict(os.environ, {"TZ": "UTC"}):
        time.tzset()
        yield
    time.tzset()


def _shown(answer: Any, *command: str) -> str:
    # For rich, a "dumb" terminal has 80 columns and no colours.
    answers = chain([answer], repeat(([], None)))  # after the first call: no events
    terminal = {"FORCE_COLOR": "1", "TERM": "dumb", "COLUMNS": "", "LINES": ""}
    with (
        patch.object(operator, "call", lambda *_, **__: next(answers)),
        patch.object(operator, "other_version", lambda *_: ""),
    ):
        result = CliRunner(env=terminal).invoke(main, [*command, "--timeout", "1"])
    assert result.exit_code == 0, result.output
    return result.output


def _run() -> pb.Run:
    run = pb.Run(
        run_id="job-17",
        revision=21,
        phase=pb.PHASE_FINAL,
        round=2,
        world_size=16,
        restart_count=1,
        node_count=3,
    )
    run.settings.MergeFrom(pb.RunSettings(min_nodes=2, max_nodes=2, max_restarts=3))
    run.last_round_end.MergeFrom(pb.RoundEnd(round=1, detail=_REASON))
    for rank in range(3):
        node = run.nodes.add(
            node_id=f"node-{rank}.cluster.example_4242_9f2c1a",
            role="trainer",
            local_world_size=8,
            address=f"node-{rank}.cluster.example",
            connected=True,
            topology="rack-1",
        )
        node.state = pb.NODE_STATE_RUNNING if rank < 2 else pb.NODE_STATE_SPARE
        if rank < 2:
            node.assignment.MergeFrom(pb.Assignment(round=2, group_rank=rank, base_rank=8 * rank))
    return run


def _events() -> Any:
    frozen = pb.Event(kind=pb.EVENT_KIND_ROUND_FROZEN, round=1, group_world_size=2, world_size=16)
    again = pb.Event(kind=pb.EVENT_KIND_ROUND_FROZEN, round=2, group_world_size=2, world_size=16)
    end = pb.RoundEnd(round=1, cause=pb.ROUND_END_CAUSE_WORKER_FAILED, detail=_REASON)
    events = [
        (0.0, pb.Event(kind=pb.EVENT_KIND_RUN_CREATED)),
        (31.5, frozen),
        (31.75, pb.Event(kind=pb.EVENT_KIND_ROUND_FINALIZED, round=1)),
        (45_000.0, pb.Event(kind=pb.EVENT_KIND_ROUND_ENDED, round=1, round_end=end, counted_restarts=1)),
        (45_000.5, again),
        (45_003.0, pb.Event(kind=pb.EVENT_KIND_ROUND_FINALIZED, round=2)),
    ]
    for after, event in events:
        set_seconds(event.time, _BEGAN + after)
    return [event for _, event in events]


def _jobs() -> agent_pb.ListJobsResponse:
    job = agent_pb.Job(run_id="job-17", round=2, restart_count=1, world_size=16, exit_code=1)
    job.state, job.detail = agent_pb.JOB_STATE_ENDED, f"{_REASON}; no restarts were left"
    set_seconds(job.start_time, _BEGAN)
    set_seconds(job.end_time, _BEGAN + 4242)
    return agent_pb.ListJobsResponse(jobs=[job])
