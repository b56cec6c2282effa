"""A cluster of real processes whose workers follow orders, for tests that inject failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from local_cluster import Job, LocalCluster, RunWatch
from programs import Line, Program
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from support.processes import fresh_marker, gone
from support.waiting import PATIENCE

WORKER = Path(__file__).with_name("obedient_worker.py")
RUN = "run-1"


@dataclass
class Scene:
    """A cluster, and the one job that runs on it."""

    cluster: LocalCluster
    folder: Path
    job: Job

    async def start_agents(self, *names: str) -> list[Program]:
        """Start agents at the same time; return when all have joined."""
        return list(await asyncio.gather(*(self.cluster.start_agent(name, self.job) for name in names)))

    async def said(self, event: str, count: int, round_: int = 1) -> list[Mapping[str, Any]]:
        """Wait until `count` workers of a round have printed an event; return the fields, ordered by rank."""

        def lines() -> list[Line]:
            return [
                line
                for line in self.cluster.output.items
                if line.event == event and line.fields["round"] == round_
            ]

        await self.cluster.output.first(
            f"{count} workers of round {round_} to say {event!r}",
            lambda _: len(lines()) >= count,
            timeout=PATIENCE,
        )
        assert len(lines()) == count
        return sorted((line.fields for line in lines()), key=lambda fields: int(fields["rank"]))

    async def started(self, count: int, round_: int = 1) -> list[Mapping[str, Any]]:
        """Wait until `count` workers of a round have started; return their fields, ordered by rank."""
        return await self.said("started", count, round_)

    async def becomes(self, what: str, condition: Callable[[pb.Run], bool]) -> pb.Run:
        """Wait until the run fulfils a condition; return the run."""
        watch: RunWatch = self.cluster.watch(RUN)
        return (await watch.until(what, condition, PATIENCE)).run

    async def finish(self) -> None:
        """Let the workers end with success, and wait for the agents."""
        (self.folder / "finish").touch()
        for name, program in self.cluster.programs.items():
            if name not in ("rendezvous", "timer") and not program.told_to_end:
                assert await program.ended(PATIENCE) == 0, program.report

    def report(self, name: str) -> str:
        """Return an agent's report for users."""
        return self.cluster.programs[name].report


@asynccontextmanager
async def scene(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *order: str,
    nodes: str = "2",
    workers: int = 2,
    max_restarts: int = 0,
    conf: Mapping[str, str] | None = None,
) -> AsyncIterator[Scene]:
    """Run a rendezvous service and a job whose workers follow an order; afterwards none of their processes is left."""
    with fresh_marker() as marker:
        monkeypatch.setenv("SCENE_MARKER", marker)
        async with LocalCluster(folder / "cluster") as cluster:
            await cluster.start_rendezvous()
            command = (str(WORKER), str(folder), *(order or ("wait",)))
            job = Job(RUN, command, nodes, workers, max_restarts, conf or {}, folder / "logs")
            yield Scene(cluster, folder, job)
        assert gone(marker)
