"""The workers of a host, as the agent's sockets look them up."""

from __future__ import annotations

from rallypoint.agent.hangs.hung_worker import HungWorker
from rallypoint.agent.spawner.spawner import read_process


class HostWorkers:
    """Workers that a test names; `expired` has the hung workers to reap."""

    def __init__(self, pids: dict[int, str] | None = None, base_rank: int = 0) -> None:
        """`pids`: worker names by process id; `base_rank`: rank of the first worker."""
        self.pids = pids or {}
        self.base_rank = base_rank
        self.expired: list[HungWorker] = []

    def worker_of(self, pid: int) -> str | None:
        """As in the product, a descendant belongs to its worker."""
        while pid not in self.pids:
            if (process := read_process(pid)) is None:
                return None
            pid = process.parent
        return self.pids[pid]

    def worker_at(self, local_rank: int) -> tuple[str, int] | None:
        return next(((name, pid) for pid, name in self.pids.items() if name[0] == str(local_rank)), None)

    def rank_of(self, worker: str) -> int | None:
        return self.base_rank + int(worker.partition("@")[0])

    async def reap(self, hang: HungWorker) -> bool | None:
        """Record the hang; unlike the product, kill no process."""
        self.expired.append(hang)
        return None
