"""A worker that dies, raises or hangs costs one restart, or ends the job with the same report on all hosts."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest

from integration.scene import scene
from support.waiting import PATIENCE

pytestmark = pytest.mark.integration


async def test_a_killed_worker_restarts_all_four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGKILL of one worker on one of two hosts, all run in the next round, with the same restart count."""
    async with scene(tmp_path, monkeypatch, max_restarts=1) as stage:
        await stage.start_agents("a", "b")
        first = await stage.started(4)
        killed = time.time()
        os.kill(first[3]["pid"], signal.SIGKILL)
        second = await stage.started(4, round_=2)
        jobs = [await stage.cluster.get_job(name) for name in ("a", "b")]
        last_exec = max(worker.start_time.ToNanoseconds() / 1e9 for job in jobs for worker in job.workers)
        last_start = max(fields["at"] for fields in second)
        figures = (
            f"last exec {last_exec - killed:.3f} s, last worker's first line {last_start - killed:.3f} s"
        )
        print(f"killed → {figures}")  # noqa: T201
        assert 0 < last_exec - killed < 10
        assert 0 < last_start - killed < 15
        assert [fields["environment"]["TORCHELASTIC_RESTART_COUNT"] for fields in first] == ["0"] * 4
        assert [fields["environment"]["TORCHELASTIC_RESTART_COUNT"] for fields in second] == ["1"] * 4
        assert not {fields["pid"] for fields in first} & {fields["pid"] for fields in second}
        run = await stage.cluster.get_run("run-1")
        assert (run.round, run.restart_count, run.world_size) == (2, 1, 4)
        assert re.match(r"worker of rank 3 on node [ab] failed: killed by SIGKILL", run.last_round_end.detail)
        await stage.finish()


async def test_a_worker_that_raises_is_reported_on_all_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report has rank, host, pid, exit code, time and traceback, also on a host without a failed worker."""
    began = time.time()
    async with scene(tmp_path, monkeypatch, "raise", "3") as stage:
        agents = await stage.start_agents("a", "b")
        # The other three may be stopped before they print a line.
        failed = await stage.cluster.output.first(
            "the worker of rank 3", lambda line: line.event == "started" and line.fields["rank"] == 3
        )
        assert [await agent.ended(PATIENCE) for agent in agents] == [1, 1]
        reports = [agent.report for agent in agents]
        assert reports[0] == reports[1]
        rows = dict(
            re.findall(r"^  (rank|host|pid|exit code|time|reason|log) +(.+)$", reports[0], re.MULTILINE)
        )
        assert rows["rank"].split()[0] == "3"
        assert socket.gethostname() in rows["host"]
        assert rows["pid"] == str(failed.fields["pid"])
        assert rows["exit code"].split()[0] == "1"
        assert rows["reason"] == "ValueError: batch 7 is empty"
        when = time.strptime(rows["time"][:19], "%Y-%m-%d %H:%M:%S")
        assert int(began) <= time.mktime(when) <= time.time()
        assert 'raise ValueError(f"batch {batch} is empty")' in reports[0]
        assert ", in load" in reports[0]
        assert "ValueError: batch 7 is empty" in Path(rows["log"]).read_text()  # noqa: ASYNC240


async def test_a_hung_worker_is_killed_by_its_timer_and_the_job_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that exceeds its timeout ends its worker; the reason of the round's end names the block."""
    async with scene(tmp_path, monkeypatch, "hang", "2", max_restarts=1) as stage:
        await stage.cluster.start_timer()
        await stage.start_agents("a", "b")
        second = await stage.started(4, round_=2)
        assert [fields["environment"]["TORCHELASTIC_RESTART_COUNT"] for fields in second] == ["1"] * 4
        run = await stage.cluster.get_run("run-1")
        assert "worker of rank 2 on node" in run.last_round_end.detail
        assert "did not leave 'step' within 0.5 s" in run.last_round_end.detail
        await stage.finish()
