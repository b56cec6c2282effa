"""The watchdog commands show the reports of workers: their timers, the learned timeouts, and their progress."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.cli_process import rallypoint
from integration.scene import RUN
from local_cluster import Job, LocalCluster
from support.waiting import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.integration]

WORKER = Path(__file__).with_name("watched_worker.py")


async def test_operators_see_the_reports_of_workers(tmp_path: Path) -> None:
    """One timer service shows two workers on each of two hosts; `scopes --forget` deletes a learned timeout."""
    async with LocalCluster(tmp_path / "cluster") as cluster:
        await cluster.start_rendezvous()
        await cluster.start_timer()
        job = Job(RUN, (str(WORKER), str(tmp_path)), nodes="2", workers=2, log_dir=tmp_path / "logs")
        agents = await asyncio.gather(*(cluster.start_agent(name, job) for name in "ab"))

        async def shown(*arguments: str) -> str:
            flags = ["--timer-endpoint", cluster.timer_endpoint]
            result = await asyncio.to_thread(rallypoint, *arguments, *flags)
            assert (result.returncode, result.stderr) == (0, "")
            return result.stdout

        async def answer(*arguments: str, once: Callable[[Any], bool] = bool) -> Any:
            async with asyncio.timeout(PATIENCE):
                while not once(fields := json.loads(await shown(*arguments, "--json"))):
                    pass
            return fields

        def far_enough(fields: Any) -> bool:
            return (fields["workers"], fields["lowestStep"], fields["highestStep"]) == (4, "20", "30")

        progress = await answer("progress", RUN, once=far_enough)
        assert [each["step"] for each in progress["slowest"]] == ["20", "20", "20", "30"]
        assert progress["slowest"][3]["rank"] == 0
        assert progress["stallAfter"] == "600s"

        timers = await answer("timers", RUN, once=lambda fields: len(fields["timers"]) == 4)
        seen = {(each["nodeId"], each["scope"], each["after"], each["state"]) for each in timers["timers"]}
        assert seen == {(node, "wait", "600s", "TIMER_STATE_COUNTING") for node in "ab"}
        assert await shown("timers", RUN, "--expired") == "no expired timers\n"

        scopes = await answer("scopes", once=lambda fields: fields["scopes"][0]["count"] == str(31 + 3 * 21))
        assert (scopes["scopes"][0]["runId"], scopes["scopes"][0]["scope"]) == (RUN, "step")
        assert scopes["scopes"][0]["after"] == scopes["least"] == "10s"
        told = f"run {RUN} has forgotten the scope step and learns it again\n"
        assert await shown("scopes", RUN, "--forget", "step") == told
        assert (await answer("scopes", RUN))["scopes"] == []

        status = await shown("status", RUN, "--rdzv-endpoint", cluster.rendezvous_endpoint)
        assert "slowest worker: rank " in status.splitlines()[-1]
        assert ", at step 20 for " in status.splitlines()[-1]
        assert status.endswith("(10 behind the fastest)\n")

        (tmp_path / "finish").touch()
        assert await asyncio.gather(*(agent.ended(PATIENCE) for agent in agents)) == [0, 0]
        assert await shown("timers") == "no timers\n"
