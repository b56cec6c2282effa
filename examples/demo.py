"""`make demo`: the training of run_digits.py, while one part after another of its environment fails.

    a  a worker is killed with SIGKILL
    b  a worker hangs, until its timer fires
    c  an agent is killed with SIGKILL and its workers die with it; later it is started again
    d  the rendezvous service is killed with SIGKILL and started again

Each fault comes once all workers train again after the one before. At the end a timeline shows the process that
noticed each fault and the time of each recovery; the same is in demo.json, and as a picture in demo.svg. Exit code 0:
each recovery was as expected.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from local_cluster import RENDEZVOUS, Job, LocalCluster, RunWatch
from programs import ClusterError
from rallypoint.agent.v1 import supervisor_service_pb2 as agent_pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from run_digits import EPOCH, NODES, Progress, digits_job, end_well, finish, new_run_id, start_cluster
from timeline import Recovery, Timeline

EPOCHS, EPOCH_SECONDS = 40, 0.3  # three times as many as the faults take: no end before the last one
STEP_TIMEOUT = 2.0  # seconds that a step may take; it takes a millisecond


@dataclass(frozen=True, slots=True)
class Worker:
    """A running worker: its node, its process id, and its start (Unix seconds)."""

    node: str
    pid: int
    started: float


@dataclass(frozen=True, slots=True)
class Training:
    """The job while all workers of its round train; `proved`: the end of the epoch that shows it (Unix seconds)."""

    run: pb.Run
    workers: Mapping[int, Worker]
    proved: float


class Demo:
    """A running job, and the faults that the demo injects."""

    def __init__(self, cluster: LocalCluster, job: Job, watch: RunWatch, hang_file: Path) -> None:
        """Take a started job; `hang_file` is the value of its --hang-file."""
        self._cluster = cluster
        self._job = job
        self._watch = watch
        self._hang_file = hang_file

    async def training(self, workers: int, *, after_round: int, since: int) -> Training:
        """Wait until a later round has that many workers, and all have trained for an epoch.

        Args:
            workers: their number.
            after_round: number of an earlier round.
            since: number of lines of the workers' output to skip.
        """
        seen = await self._watch.until(
            f"a round with {workers} workers",
            lambda run: run.phase == pb.PHASE_FINAL and run.round > after_round and run.world_size == workers,
        )
        return await self._trained(seen.run, since)

    async def _trained(self, run: pb.Run, since: int) -> Training:
        def of_this_round(text: str) -> bool:
            match = EPOCH.match(text)
            return match is not None and int(match["round"]) == run.round

        # An epoch needs all workers: each of its steps ends in an average over them.
        line = await self._cluster.output.first(
            f"an epoch of round {run.round}", lambda line: of_this_round(line.text), since=since
        )
        names = [node.node_id for node in run.nodes if node.HasField("assignment")]
        jobs = await asyncio.gather(*(self._cluster.get_job(name) for name in names))
        expect(all(job.round == run.round for job in jobs), f"agents have left round {run.round} unasked")
        return Training(run, {rank: worker for job in jobs for rank, worker in _workers(job)}, line.time)

    async def kill_worker(self, before: Training) -> tuple[Training, Recovery]:
        """Fault a: the worker of the highest rank."""
        rank = max(before.workers)
        victim = before.workers[rank]
        os.kill(victim.pid, signal.SIGKILL)
        return await self._next_round(
            before,
            time.time(),
            fault=f"a  worker of rank {rank} on {victim.node} (pid {victim.pid}) killed with SIGKILL",
            noticed_by=f"agent {victim.node}",
            cause=pb.ROUND_END_CAUSE_WORKER_FAILED,
            node=victim.node,
            says="SIGKILL",
            workers=4,
        )

    async def hang_worker(self, before: Training) -> tuple[Training, Recovery]:
        """Fault b: a worker other than rank 0, which hangs inside its `expires` block."""
        rank = min(before.workers) + 1
        victim = before.workers[rank]
        self._hang_file.write_text(str(rank))
        after, recovery = await self._next_round(
            before,
            time.time(),
            fault=f"b  worker of rank {rank} on {victim.node} (pid {victim.pid}) hangs in a step of training, "
            f"which may take {STEP_TIMEOUT:g} s",
            noticed_by="timer service",
            cause=pb.ROUND_END_CAUSE_WORKER_FAILED,
            node=victim.node,
            says="'step'",
            workers=4,
        )
        expect(not self._hang_file.exists(), "the worker that should hang never read its hang file")
        return after, recovery

    async def kill_agent(self, before: Training) -> tuple[Training, Recovery]:
        """Fault c, first half: the survivor trains on alone."""
        victim = next(node.node_id for node in before.run.nodes if node.assignment.group_rank == 0)
        agent = self._cluster.programs[victim]
        workers = {worker.pid for worker in before.workers.values() if worker.node == victim}
        killed = await agent.kill()
        expect(len(workers) == self._job.workers and workers < killed.pids, "the agent had other workers")
        return await self._next_round(
            before,
            killed.at,
            fault=f"c  agent {victim} (pid {agent.pid}) killed with SIGKILL; its {len(workers)} workers and its "
            f"spawner were dead {killed.all_dead - killed.at:.2f} s later",
            noticed_by="rendezvous service",
            cause=pb.ROUND_END_CAUSE_NODE_LOST,
            node=victim,
            says="connection broke",
            workers=2,
        )

    async def restart_agent(self, before: Training) -> tuple[Training, Recovery]:
        """Fault c, second half: the agent that was killed comes back."""
        name = next(name for name in NODES if not self._cluster.programs[name].running)
        next_round = self._next_round(
            before,
            time.time(),
            fault=f"c  agent {name} started again",
            noticed_by="rendezvous service",
            cause=pb.ROUND_END_CAUSE_NODE_JOINED,
            node=name,
            says="joined",
            workers=4,
        )
        _, result = await asyncio.gather(self._cluster.start_agent(name, self._job), next_round)
        return result

    async def kill_rendezvous(self, before: Training) -> tuple[Training, Recovery]:
        """Fault d: no worker is restarted."""
        agents = [self._cluster.programs[name] for name in NODES]
        already = [len(agent.log.items) for agent in agents]
        former = self._cluster.programs[RENDEZVOUS]
        injected = (await former.kill()).at
        await self._cluster.start_rendezvous()
        ready = time.time()
        resumed = [
            await agent.log.first(
                f"{agent.name} to resume", lambda line: line.event == "resumed", since=lines
            )
            for agent, lines in zip(agents, already, strict=True)
        ]
        run = await self._cluster.get_run(self._job.run_id)
        after = await self._trained(run, since=len(self._cluster.output.items))
        expect(run.phase == pb.PHASE_FINAL, "the round did not outlive the rendezvous service")
        expect(run.round == before.run.round, f"round {run.round} took the place of {before.run.round}")
        expect(after.workers == before.workers, "workers were restarted")
        return after, Recovery(
            fault=f"d  rendezvous service (pid {former.pid}) killed with SIGKILL and started again, "
            f"ready {ready - injected:.2f} s later",
            noticed_by="agents",
            detail="both took up their leases where they were; no worker was restarted",
            injected=injected,
            noticed=max(line.time for line in resumed),
            down_since=injected,
            workers_back=None,
            trained=after.proved,
            rounds=(before.run.round, run.round),
            workers=(before.run.world_size, run.world_size),
            restarts=run.restart_count,
        )

    async def _next_round(
        self,
        before: Training,
        injected: float,
        *,
        fault: str,
        noticed_by: str,
        cause: pb.RoundEndCause.ValueType,
        node: str,
        says: str,
        workers: int,
    ) -> tuple[Training, Recovery]:
        """Wait for the end of the round that a fault hit, and for the next one; check both."""
        hit = before.run.round
        since = len(self._cluster.output.items)
        ended = await self._watch.until(f"round {hit} to end", lambda run: run.last_round_end.round >= hit)
        end = ended.run.last_round_end
        expect(
            (end.round, end.cause, end.node_id) == (hit, cause, node) and says in end.detail,
            f"round {end.round} ended for another reason than expected: {end.detail}",
        )
        after = await self.training(workers, after_round=hit, since=since)
        failures = int(cause == pb.ROUND_END_CAUSE_WORKER_FAILED)
        expect(after.run.restart_count == before.run.restart_count + failures, "restarts were miscounted")
        old, new = ({worker.pid for worker in each.workers.values()} for each in (before, after))
        expect(not old & new and len(new) == workers, "workers of the old round run in the new one")
        # A new node is no fault: until it has joined, the others train.
        down_since = ended.time if cause == pb.ROUND_END_CAUSE_NODE_JOINED else injected
        return after, Recovery(
            fault=fault,
            noticed_by=noticed_by,
            detail=end.detail,
            injected=injected,
            noticed=ended.time,
            down_since=down_since,
            workers_back=max(worker.started for worker in after.workers.values()),
            trained=after.proved,
            rounds=(hit, after.run.round),
            workers=(before.run.world_size, after.run.world_size),
            restarts=after.run.restart_count,
        )


FAULTS = (
    ("fault a: a worker is killed", Demo.kill_worker),
    ("fault b: a worker hangs", Demo.hang_worker),
    ("fault c: an agent is killed", Demo.kill_agent),
    ("fault c: it is started again", Demo.restart_agent),
    ("fault d: the rendezvous service is killed, and started again", Demo.kill_rendezvous),
)


def expect(condition: bool, otherwise: str) -> None:
    """Raise ClusterError, with a sentence about the failure, unless the condition holds."""
    if not condition:
        raise ClusterError(otherwise)


def _workers(job: agent_pb.Job) -> list[tuple[int, Worker]]:
    return [
        (worker.rank, Worker(job.node_id, worker.pid, worker.start_time.ToNanoseconds() / 1e9))
        for worker in job.workers
    ]


async def demo(var: Path) -> None:
    """Run the whole demonstration, on a cluster of its own."""
    folder = var / "demo"
    hang_file = folder / "hang"
    for old in (hang_file, var / "demo.json"):
        old.unlink(missing_ok=True)
    job = digits_job(
        folder,
        new_run_id(),
        *["--epochs", str(EPOCHS), "--epoch-seconds", str(EPOCH_SECONDS)],
        *["--step-timeout", str(STEP_TIMEOUT), "--hang-file", str(hang_file.absolute())],
        nodes="1:2",
        max_restarts=5,
        # Seconds that the survivors of a lost node wait for another one; 30, the default, suits a real cluster.
        # No back-off: the failures of workers here have different causes.
        conf={"last_call_timeout": "1", "restart_backoff": "0"},
    )
    async with LocalCluster(folder) as cluster:
        timeline = await cluster.unless_one_fails(show(cluster, job, hang_file))
    timeline.write(var / "demo.json")
    timeline.draw(var / "demo.svg")
    print(
        f"\n{timeline}\n\nThe same for programs: {var / 'demo.json'}; as a picture: {var / 'demo.svg'}. "
        "All processes are stopped.",
        flush=True,
    )


async def show(cluster: LocalCluster, job: Job, hang_file: Path) -> Timeline:
    """Run the job with all faults, from its first process to its last; return the timeline."""
    watch = await start_cluster(cluster, job)
    progress = Progress()
    demo = Demo(cluster, job, watch, hang_file)
    timeline = Timeline(job.run_id, progress.began)
    async with progress.shown(watch, cluster.output):
        now = await demo.training(4, after_round=0, since=0)
        for fault, inject in FAULTS:
            progress.say(f"--- {fault}")
            now, recovery = await inject(demo, now)
            timeline.recoveries.append(recovery)
        timeline.detail, timeline.accuracy = await finish(cluster, watch)
        timeline.ended = time.time()
    return timeline


if __name__ == "__main__":
    sys.exit(end_well(demo, (__doc__ or "").splitlines()[0]))
