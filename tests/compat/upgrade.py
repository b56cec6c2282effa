"""Replicas of another revision are replaced one by one, and back: `make test-upgrade FROM=REVISION`.

The command of that revision is in RALLYPOINT_UPGRADE_FROM.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from cli.cli_process import RALLYPOINT
from ha.cluster import AGENTS, PATIENCE, REPLICAS, Cluster, running_cluster
from ha.crowd import WatchedCrowd, watched_crowd
from ha.job import WORKERS, Job, running_job
from ha.process import HostProcess
from ha.runs import run_everywhere
from ha.steady_writer import SteadyWriter

OLD = Path(os.environ["RALLYPOINT_UPGRADE_FROM"])
RUNS = [f"crowd-{number}" for number in range(8)]
NODES = 8
"""Number of nodes of each run."""
PAUSE = 0.5
"""Time between two writes of a node, seconds."""


class Load:
    """Runs and jobs that go on while replicas are replaced.

    Attributes:
        pauses: By step, the longest time until a node was with the next owner of its run, seconds.
    """

    def __init__(self, cluster: Cluster, crowds: list[WatchedCrowd], writers: list[SteadyWriter]) -> None:
        self.jobs: list[Job] = []
        self.pauses: dict[str, float] = {}
        self._cluster = cluster
        self._crowds = crowds
        self._writers = writers

    async def replace(self, name: str, program: Path) -> None:
        """Stop a replica in good order, start another program under its name, and wait until it owns its shards."""
        loop = asyncio.get_running_loop()
        moving = [
            crowd
            for run, crowd in zip(RUNS, self._crowds, strict=True)
            if await self._cluster.owner(run) == name
        ]
        assert moving, f"no run is on {name}"
        began = loop.time()
        assert await self._cluster.process(name).terminate() == 0
        resumed = [await crowd.resumed(began, PATIENCE) for crowd in moving]
        self._cluster.replicas.programs[name] = program
        await self._cluster.restart(name)
        await self._cluster.settled()
        for job in self.jobs:
            await job.count_on()
        await asyncio.gather(*(writer.go_on() for writer in self._writers))
        step = f"{name} to the {'present' if program == RALLYPOINT else 'old'} revision"
        self.pauses[step] = max(resumed) - began
        print(f"{step}: {loop.time() - began:.1f} s, nodes without a replica for {self.pauses[step]:.2f} s")  # noqa: T201


@pytest.mark.timeout(10 * PATIENCE)
async def test_replicas_of_two_versions_serve_together(tmp_path: Path) -> None:
    """No fact is added to any run, no worker restarts, no acknowledged write is lost; agents of both versions work."""
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(running_cluster(tmp_path / "cluster", replicas=False))
        cluster.replicas.programs = dict.fromkeys(REPLICAS, OLD)
        await cluster.replicas.open()
        await cluster.settled()
        crowds = [
            await stack.enter_async_context(watched_crowd(cluster.endpoints, run, NODES)) for run in RUNS
        ]
        await asyncio.gather(*(crowd.agree(PATIENCE) for crowd in crowds))
        writers = [
            await stack.enter_async_context(SteadyWriter(cluster.endpoints, node, node.name, PAUSE))
            for crowd in crowds
            for node in crowd.nodes
        ]
        load = Load(cluster, crowds, writers)

        async def new_job(name: str) -> None:
            """Start a job with an agent of each version, which meet in one round."""
            job = running_job(cluster, name, tmp_path / name, (OLD, RALLYPOINT))
            load.jobs.append(await stack.enter_async_context(job))

        await new_job("before")
        runs = {run: await run_everywhere(cluster, run) for run in [*RUNS, "before"]}
        for name in REPLICAS:
            await load.replace(name, RALLYPOINT)
        # The run of this name has failed before: the job opens it again, which the old revision does not know.
        first = HostProcess("between-first", cluster.network, tmp_path, AGENTS)
        stack.callback(first.close)
        same_run = ["--rdzv-endpoint", cluster.endpoints, "--rdzv-id", "between"]
        first.spawn([str(RALLYPOINT), "run", "--insecure", *same_run, "--no-python", "false"])
        assert await first.ended(PATIENCE) == 1, first.log()
        await new_job("between")
        runs["between"] = await run_everywhere(cluster, "between")
        for name in REPLICAS:
            await load.replace(name, OLD)

        acknowledged = sum([await writer.stop() for writer in writers])
        for run, before in runs.items():
            after = await run_everywhere(cluster, run)
            assert (after.revision, after.round) == (before.revision, before.round), f"{run}: {after}"
        assert [each for crowd in crowds for each in crowd.disturbances] == []
        assert [loss for crowd in crowds for node in crowd.nodes for loss in node.losses] == []
        for job in load.jobs:
            assert await job.finish() == [0, 0], job.logs()
            assert sorted(job.starts()) == sorted(f"{rank} 0" for rank in range(2 * WORKERS)), (
                "a worker was restarted"
            )
        assert cluster.replicas.complaints() == []
    longest = max(writer.longest_gap() for writer in writers)
    print(  # noqa: T201
        f"{len(load.pauses)} replicas replaced, {len(writers)} nodes in {len(RUNS)} runs, {len(load.jobs)} jobs with "
        f"agents of both revisions: 0 restarts, 0 leases lost, 0 of {acknowledged} acknowledged writes lost; longest "
        f"pause of a node {max(load.pauses.values()):.2f} s, of a writer {longest:.2f} s"
    )
