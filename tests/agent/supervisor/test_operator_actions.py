"""An operator's requests get replies that fit into a message, and errors that state the reason."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from agent.fake_job import FakeJob, as_job, ended, running, worker_group
from rallypoint.agent.core.core import AgentState, Workers
from rallypoint.agent.supervisor.operator_actions import dump_stacks, restart_workers, workers_of
from rallypoint.rpc.errors import ServiceError

RUNNING = AgentState(workers=Workers.RUNNING, started=3)


def diagnosed_group(text: str) -> Any:
    """A worker group that returns fixed diagnostics."""

    async def diagnose(local_rank: int, timeout: float) -> str:
        await asyncio.sleep(0)
        return text if local_rank != 2 else ""

    made = worker_group()
    made.diagnose = diagnose
    return made


@pytest.mark.parametrize(("workers", "most"), [(1, 256 * 1024), (64, 3 * 1024 * 1024 // 64)])
async def test_stacks_of_many_workers_fit_one_message(workers: int, most: int) -> None:
    """All workers get the same share of the message."""
    state = SimpleNamespace(evidence_timeout=0.0, run_id="run-1")
    job = FakeJob(
        group=diagnosed_group("\N{SNOWMAN}" * 200_000),
        state=RUNNING,
        workers=[running(rank + 10) for rank in range(workers)],
        config=state,
    )
    found = await dump_stacks(as_job(job), ())
    assert len(found) == workers
    assert all(most - 8 < len(stacks.text.encode()) <= most for stacks in found)


async def test_an_ended_worker_has_no_stacks() -> None:
    """This holds for workers that ended before the request, and for workers that end during it."""
    job = FakeJob(
        group=diagnosed_group("it waits"),
        state=RUNNING,
        workers=[running(0), ended(1, code=0), running(2)],
        config=SimpleNamespace(evidence_timeout=2.0, run_id="run-1"),
    )
    assert [stacks.local_rank for stacks in await dump_stacks(as_job(job), ())] == [0]


async def test_without_a_rendezvous_service_nothing_is_restarted() -> None:
    """The error has the endpoint of the service."""
    job = FakeJob(group=worker_group(), state=RUNNING)
    job.config.rendezvous = SimpleNamespace(endpoint="127.0.0.1:1", security=None)
    with pytest.raises(
        ServiceError, match=r"the rendezvous service at 127.0.0.1:1 did not take the restart"
    ) as caught:
        await restart_workers(as_job(job), "a whim", "alice")
    assert caught.value.reason == "NO_RENDEZVOUS"


class UnsearchableRanks(tuple[int, ...]):
    """A field that may have millions of entries."""

    __slots__ = ()

    def __contains__(self, rank: object) -> bool:
        raise AssertionError("searched once for each worker")


def test_ranks_of_a_request_are_read_once() -> None:
    job = FakeJob(workers=[running(0), running(1)], state=RUNNING, config=SimpleNamespace(run_id="run-1"))
    rank = job.workers[1].rank
    assert workers_of(as_job(job), UnsearchableRanks([rank] * 3)) == [job.workers[1]]
