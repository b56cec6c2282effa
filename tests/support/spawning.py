"""One worker of a spawner at a time."""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.agent.spawner.client import Spawner, WorkerProcess
from rallypoint.agent.spawner.protocol import WorkerExit, WorkerSpec


async def spawn_one(
    spawner: Spawner, spec: WorkerSpec, on_exit: Callable[[WorkerExit], None]
) -> WorkerProcess:
    """Start a worker and wait for its exec."""
    (worker,) = spawner.submit([spec], on_exit)
    await spawner.wait_started([worker])
    return worker
