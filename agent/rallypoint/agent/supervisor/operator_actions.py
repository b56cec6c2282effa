"""Operator actions on a job's workers: restart all, kill one, dump the stacks of all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from rallypoint.agent.config.settings import EVIDENCE_TIMEOUT
from rallypoint.agent.core.core import Workers
from rallypoint.agent.hangs.hung_worker import HungWorker
from rallypoint.agent.job.job import Job
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.agent.workers.group import Worker, WorkerGroup
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as rendezvous_pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as rendezvous_grpc
from rallypoint.rpc.calls import call_any
from rallypoint.rpc.errors import ServiceError, json_list
from rallypoint.rpc.replica_client import ReplicaClient
from rallypoint.rpc.text import clip

RENDEZVOUS_TIMEOUT = 10.0
"""Limit in seconds for the rendezvous service's response to a restart; then the operator gets an error."""

# Limits for the stacks of one worker, and of all together: a message has 4 MiB at most.
_STACKS_BYTES = 256 * 1024
_ALL_STACKS_BYTES = 3 * 1024 * 1024


async def restart_workers(job: Job, reason: str, operator: str, expected: int | None = None) -> int:
    """Restart all workers of the job's run, on all hosts; return the round that ended.

    Args:
        operator: Name or address of the caller, for the run's events.
        expected: The round of the workers to restart; None: those that run.

    Raises:
        ServiceError: JOB_ENDED, JOB_NOT_RUNNING, ROUND_OVER, NO_RENDEZVOUS.
    """
    round_ = running_group(job).assignment.round
    peer, run_id = job.config.rendezvous, job.config.run_id
    if expected not in (None, round_):
        raise ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "ROUND_OVER",
            f"the workers of run {run_id!r} that run are of round {round_}, not of round {expected}",
            metadata={"current_round": str(round_)},
        )
    request = rendezvous_pb.RestartRunRequest(
        run_id=run_id, reason=reason, on_behalf_of=operator, round=round_
    )
    try:
        async with ReplicaClient(peer.endpoint, peer.security) as client, asyncio.timeout(RENDEZVOUS_TIMEOUT):
            await call_any(
                client, rendezvous_grpc.RendezvousServiceStub, lambda stub: stub.RestartRun(request)
            )
    except TimeoutError:
        raise _perhaps_taken(peer.endpoint, f"within {RENDEZVOUS_TIMEOUT:g} s") from None
    except ServiceError as error:
        if error.reason == "RUN_CLOSED":
            raise _ended(run_id) from None
        if error.code is grpc.StatusCode.NOT_FOUND:
            raise _not_running(run_id) from None
        if error.reason != "ROUND_OVER":
            raise _not_taken(peer.endpoint, error.message) from None
    return round_  # it has ended, by this request or just before it


async def reap_worker(job: Job, rank: int, reason: str, pid: int = 0) -> tuple[int, str]:
    """Kill a worker and its descendants, after its diagnostics were written; `pid`: its process id, 0: any.

    Returns:
        Its process id, and the file with its diagnostics; empty if that could not be written.

    Raises:
        ServiceError: JOB_ENDED, JOB_NOT_RUNNING, NO_WORKER, WORKER_REPLACED.
    """
    group = running_group(job)
    worker = workers_of(job, (rank,))[0]
    if pid not in (0, worker.pid):
        raise ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION,
            "WORKER_REPLACED",
            f"rank {rank} of run {job.config.run_id!r} is process {worker.pid}, not {pid}",
            metadata={"pid": str(worker.pid)},
        )
    if worker.exit is not None:
        raise _not_running(job.config.run_id, f"rank {rank} has ended already")
    requested = f"it was killed through SupervisorService: {reason}"
    report = await group.reap(
        HungWorker(group.name_of(worker.local_rank), scope="", after=0.0, late_by=0.0, requested=requested)
    )
    return worker.pid, str(report.file) if report is not None and report.file is not None else ""


async def dump_stacks(job: Job, ranks: Sequence[int]) -> list[pb.WorkerStacks]:
    """Return the stacks of workers, by local rank, without those that have ended.

    Args:
        ranks: Global ranks of the workers; empty: all of them.

    Raises:
        ServiceError: JOB_ENDED, JOB_NOT_RUNNING, NO_WORKER.
    """
    group = running_group(job)
    running = [worker for worker in workers_of(job, ranks) if worker.exit is None]
    timeout = max(job.config.evidence_timeout, EVIDENCE_TIMEOUT)
    texts = await asyncio.gather(*(group.diagnose(worker.local_rank, timeout) for worker in running))
    room = min(_STACKS_BYTES, _ALL_STACKS_BYTES // max(1, len(running)))
    return [
        pb.WorkerStacks(
            rank=worker.rank, local_rank=worker.local_rank, pid=worker.pid, text=clip(text, room, "\n...")
        )
        for worker, text in zip(running, texts, strict=True)
        if text
    ]


def running_group(job: Job) -> WorkerGroup:
    """Return the running workers of a job.

    Raises:
        ServiceError: JOB_ENDED, JOB_NOT_RUNNING.
    """
    if job.result is not None:
        raise _ended(job.config.run_id)
    if job.group is None or job.state.workers is not Workers.RUNNING:
        raise _not_running(job.config.run_id)
    return job.group


def workers_of(job: Job, ranks: Sequence[int]) -> list[Worker]:
    """Return the workers with these global ranks on this host, by local rank; all of them if `ranks` is empty.

    Raises:
        ServiceError: NO_WORKER.
    """
    by_rank = {worker.rank: worker for worker in job.workers}
    wanted = set(ranks)  # a message may repeat a rank a million times
    for rank in wanted:
        if rank not in by_rank:
            here = ", ".join(map(str, sorted(by_rank)))
            raise ServiceError(
                grpc.StatusCode.NOT_FOUND,
                "NO_WORKER",
                f"run {job.config.run_id!r} has no worker of rank {rank} on this host"
                + (f"; it has {here}" if here else ", nor any other"),
                metadata={"ranks": json_list(sorted(by_rank))},
            )
    return [worker for worker in job.workers if not wanted or worker.rank in wanted]


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
        f"the rendezvous service at {endpoint} did not respond to the restart {why}; it may have carried it out",
    )


def _ended(run_id: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.FAILED_PRECONDITION, "JOB_ENDED", f"the job of run {run_id!r} has ended on this host"
    )


def _not_running(run_id: str, why: str = "its workers do not run at present") -> ServiceError:
    return ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "JOB_NOT_RUNNING", f"run {run_id!r}: {why}")
