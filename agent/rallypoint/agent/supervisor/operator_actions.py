"""What is done to a job's workers from outside: started anew, one of them killed, all of them asked what they do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from rallypoint.agent.config.settings import EVIDENCE_TIMEOUT
from rallypoint.agent.core.core import Workers
from rallypoint.agent.hangs.hung_worker import HungWorker
from rallypoint.agent.job.job import Job
from rallypoint.agent.workers.group import Worker, WorkerGroup
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as rendezvous_pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as rendezvous_grpc
from rallypoint.rpc.calls import OUTCOME_UNKNOWN, call_any
from rallypoint.rpc.errors import ServiceError
from rallypoint.rpc.replica_client import ReplicaClient

RENDEZVOUS_TIMEOUT = 10.0
"""Seconds in which the rendezvous service is to answer, before whoever wants a restart is told that it does not."""

# Of one worker, and of all together: a message has 4 MiB at most.
_STACKS_BYTES = 256 * 1024
_ALL_STACKS_BYTES = 3 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Stacks:
    """What one worker is doing."""

    worker: Worker
    text: str


async def restart_workers(job: Job, reason: str) -> int:
    """Have all workers of the job's run started anew, on all hosts; returns the round that ended.

    Raises:
        ServiceError: JOB_ENDED, JOB_NOT_RUNNING, NO_RENDEZVOUS.
    """
    running_group(job)
    peer, run_id = job.config.rendezvous, job.config.run_id
    request = rendezvous_pb.RestartRunRequest(run_id=run_id, reason=reason)
    try:
        async with ReplicaClient(peer.endpoint, peer.tls) as board, asyncio.timeout(RENDEZVOUS_TIMEOUT):
            answer: rendezvous_pb.RestartRunResponse = await call_any(
                board,
                rendezvous_grpc.RendezvousServiceStub,
                lambda stub: stub.RestartRun(request),
                # A second restart would end the round that the first one made.
                repeatable=False,
            )
    except TimeoutError:
        raise _perhaps_taken(peer.endpoint, f"within {RENDEZVOUS_TIMEOUT:g} s") from None
    except ServiceError as error:
        if error.reason == "RUN_CLOSED":
            raise _ended(run_id) from None
        if error.code is grpc.StatusCode.NOT_FOUND:
            raise _not_running(run_id) from None
        if error.reason == OUTCOME_UNKNOWN:
            raise _perhaps_taken(peer.endpoint, f"({error.message})") from None
        raise _not_taken(peer.endpoint, error.message) from None
    ended = answer.ended_round
    if not ended:
        raise _not_running(run_id)
    return ended


async def reap_worker(job: Job, rank: int, reason: str) -> tuple[int, str]:
    """Kill a worker with all it has started, after what it does was written down.

    Returns:
        Its process id, and the file with what it was doing; empty if that could not be written.

    Raises:
        ServiceError: JOB_ENDED, JOB_NOT_RUNNING, NO_WORKER.
    """
    crew = running_group(job)
    worker = workers_of(job, (rank,))[0]
    if worker.exit is not None:
        raise _not_running(job.config.run_id, f"rank {rank} has ended already")
    asked = f"it was killed through SupervisorService: {reason}"
    case = await crew.reap(
        HungWorker(crew.name_of(worker.local_rank), scope="", after=0.0, late_by=0.0, requested=asked)
    )
    return worker.pid, str(case.file) if case is not None and case.file is not None else ""


async def dump_stacks(job: Job, ranks: Sequence[int]) -> list[Stacks]:
    """What workers are doing, by local rank; those that have ended are left out.

    Args:
        job: Whose workers.
        ranks: Which ones; empty: all of them.

    Raises:
        ServiceError: JOB_ENDED, JOB_NOT_RUNNING, NO_WORKER.
    """
    crew = running_group(job)
    asked = [worker for worker in workers_of(job, ranks) if worker.exit is None]
    timeout = max(job.config.evidence_timeout, EVIDENCE_TIMEOUT)
    texts = await asyncio.gather(*(crew.diagnose(worker.local_rank, timeout) for worker in asked))
    room = min(_STACKS_BYTES, _ALL_STACKS_BYTES // max(1, len(asked)))
    return [Stacks(worker, bounded(text, room)) for worker, text in zip(asked, texts, strict=True) if text]


def running_group(job: Job) -> WorkerGroup:
    """The workers that run.

    Raises:
        ServiceError: JOB_ENDED, JOB_NOT_RUNNING.
    """
    if job.result is not None:
        raise _ended(job.config.run_id)
    if job.group is None or job.state.workers is not Workers.RUNNING:
        raise _not_running(job.config.run_id)
    return job.group


def workers_of(job: Job, ranks: Sequence[int]) -> list[Worker]:
    """The workers of these global ranks on this host, by local rank; all of them for none.

    Raises:
        ServiceError: NO_WORKER.
    """
    by_rank = {worker.rank: worker for worker in job.workers}
    for rank in ranks:
        if rank not in by_rank:
            here = ", ".join(map(str, sorted(by_rank)))
            raise ServiceError(
                grpc.StatusCode.NOT_FOUND,
                "NO_WORKER",
                f"run {job.config.run_id!r} has no worker of rank {rank} on this host"
                + (f"; it has {here}" if here else ", nor any other"),
                metadata={"ranks": here},
            )
    return [worker for worker in job.workers if not ranks or worker.rank in ranks]


def _not_taken(endpoint: str, why: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "NO_RENDEZVOUS",
        f"the rendezvous service at {endpoint} did not take the restart ({why}); nothing was changed",
    )


def _perhaps_taken(endpoint: str, why: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "NO_RENDEZVOUS",
        f"the rendezvous service at {endpoint} gave no answer to the restart {why}; it may have taken it",
    )


def _ended(run_id: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.FAILED_PRECONDITION, "JOB_ENDED", f"the job of run {run_id!r} is over here"
    )


def _not_running(run_id: str, why: str = "its workers do not run at present") -> ServiceError:
    return ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "JOB_NOT_RUNNING", f"run {run_id!r}: {why}")


def bounded(text: str, most_bytes: int) -> str:
    """The beginning of a text, with a sign where the end is left out."""
    raw = text.encode(errors="replace")
    return raw.decode() if len(raw) <= most_bytes else raw[: most_bytes - 4].decode(errors="ignore") + "\n..."
