"""A real job: agents with worker processes on the test's host, which must survive all faults of other hosts."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from cli.cli_process import RALLYPOINT
from ha.cluster import AGENTS, PATIENCE, Cluster
from ha.process import HostProcess
from ha.runs import run_until
from ha.waiting import until
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

WORKER = Path(__file__).with_name("counting_worker.py")
WORKERS = 2
"""The number of workers of each agent."""


class Job:
    """Agents of two workers each, which count until the test lets them finish.

    Attributes:
        run_id: The run.
    """

    def __init__(self, cluster: Cluster, run_id: str, folder: Path, programs: Sequence[Path]) -> None:
        """Start nothing yet; the workers write to `folder`. `programs`: the `rallypoint` of each agent."""
        self.run_id = run_id
        self._cluster = cluster
        self._folder = folder
        self._agents = [
            HostProcess(f"{run_id}-agent-{number}", cluster.network, folder, AGENTS)
            for number in range(len(programs))
        ]
        self._programs = programs
        folder.mkdir()
        self._lock = open(folder / "lock", "w", encoding="utf-8")  # noqa: SIM115 (held while workers are to count)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    async def start(self) -> pb.Run:
        """Start the agents; return the run when every worker counts."""
        for number, agent in enumerate(self._agents):
            agent.spawn(
                [
                    *[
                        str(self._programs[number]),
                        "run",
                        "--nnodes",
                        str(len(self._agents)),
                        "--nproc-per-node",
                        str(WORKERS),
                    ],
                    *["--insecure", "--rdzv-endpoint", self._cluster.endpoints, "--rdzv-id", self.run_id],
                    *["--node-id", f"node-{number}", "--max-restarts", "3"],
                    *["--log-dir", str(self._folder / "logs"), "--redirects", "2"],
                    *[str(WORKER), str(self._folder)],
                ]
            )
        await self.count_on()
        return await run_until(
            self._cluster, self.run_id, "the job's round", lambda run: run.phase == pb.PHASE_FINAL
        )

    def starts(self) -> list[str]:
        """Return a line for each worker process ever started: its rank, and the number of restarts before."""
        path = self._folder / "starts"
        return path.read_text().splitlines() if path.exists() else []

    async def count_on(self) -> None:
        """Wait until each worker has counted further than now."""
        before = self._counts()

        async def look() -> str:
            for agent in self._agents:
                agent.check_alive()
            now = self._counts()
            ahead = [rank for rank in now if now[rank] > before.get(rank, 0)]
            return "" if len(ahead) == WORKERS * len(self._agents) else f"{before} has become {now}"

        await until("all workers to count on", look)

    async def finish(self) -> list[int]:
        """Let the workers succeed; return the agents' exit codes."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        return list(await asyncio.gather(*(agent.ended(PATIENCE) for agent in self._agents)))

    def logs(self) -> str:
        """Return the logs of the agents."""
        return "\n".join(agent.log() for agent in self._agents)

    def close(self) -> None:
        """Kill all agents."""
        self._lock.close()
        for agent in self._agents:
            agent.close()

    def _counts(self) -> dict[str, int]:
        return {path.name: int(path.read_text() or 0) for path in self._folder.glob("count-*")}


@asynccontextmanager
async def running_job(
    cluster: Cluster, run_id: str, folder: Path, programs: Sequence[Path] = (RALLYPOINT, RALLYPOINT)
) -> AsyncIterator[Job]:
    """Run a job whose workers count; kill its processes after the block."""
    job = Job(cluster, run_id, folder, programs)
    try:
        await job.start()
        yield job
    finally:
        job.close()
