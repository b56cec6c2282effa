"""All hosts report the worker that failed first, not one of those that died of the consequences."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import pytest

from local_cluster import Job, LocalCluster
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from support.mortal import mortal
from torture.length import ordinarily

pytestmark = [pytest.mark.slow, pytest.mark.integration]

WORKER = Path(__file__).with_name("chained_worker.py")
PATIENCE = 60.0
REPEATS = ordinarily(4, in_full=50)
# The first worker ends before the others die, long after, or not before it is killed.
UNWINDING = ("0", "0.3", "3600")
DEATHS = ("record", "raise", "abort", "exit")


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run processes beside the test that use up the processor."""
    loops = [subprocess.Popen(mortal(sys.executable, "-c", "while True: pass")) for _ in range(processes)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


@pytest.mark.timeout(REPEATS * PATIENCE)
async def test_all_hosts_report_the_failure_of_rank_3(tmp_path: Path) -> None:
    """The others end 50 ms later, on both hosts, with slow or fast unwinding, on a busy machine or an idle one."""
    async with LocalCluster(tmp_path / "cluster") as cluster:
        await cluster.start_rendezvous()
        # Steps of 7 through the 12 pairs of both, so that within 12 runs all pairs occur.
        ways = islice(cycle(product(UNWINDING, DEATHS)), 0, 7 * REPEATS, 7)
        for number, (unwinding, death) in enumerate(ways):
            folder = tmp_path / str(number)
            folder.mkdir()
            with busy(3 * (number % 2) * (os.cpu_count() or 1)):
                await one_run(cluster, folder, f"run-{number}", unwinding, death)


@pytest.mark.timeout(4 * PATIENCE)
async def test_all_hosts_report_the_failure_of_a_hosts_only_worker(tmp_path: Path) -> None:
    """No other worker dies there, and its agent reads its error file only when the end of the run settles."""
    async with LocalCluster(tmp_path / "cluster") as cluster:
        await cluster.start_rendezvous()
        for death in ("record", "exit"):
            folder = tmp_path / death
            folder.mkdir()
            await one_run(cluster, folder, death, "3600", death, workers=1)


def failure_files(folder: Path) -> list[dict[str, Any]]:
    """Return the agents' reports for programs."""
    return [json.loads(path.read_text()) for path in folder.glob("logs/*/failure.json")]


async def one_run(
    cluster: LocalCluster, folder: Path, run_id: str, unwinding: str, death: str, *, workers: int = 2
) -> None:
    """Run a job of two hosts, whose worker of the last rank fails first."""
    command = (str(WORKER), str(folder), unwinding, death)
    job = Job(run_id, command, nodes="2", workers=workers, log_dir=folder / "logs")
    last = 2 * workers - 1
    names = [f"{run_id}-{name}" for name in "ab"]
    agents = [await cluster.start_agent(name, job) for name in names]
    assert [await agent.ended(PATIENCE) for agent in agents] == [1, 1]
    run = await cluster.get_run(run_id)
    told = f"unwinding {unwinding} s, others die by {death}: {run.run_end}"
    assert run.run_end.failure.rank == last, told
    assert run.run_end.failure.kind == pb.FAILURE_KIND_EXCEPTION, told
    assert run.run_end.detail.startswith(f"worker of rank {last} on node "), told
    for agent in agents:
        rows = dict(re.findall(r"^  (rank|reason|exit code) +(.+)$", agent.report, re.MULTILINE))
        assert rows["rank"].split()[0] == str(last)
        assert rows["exit code"] == "1"
        assert rows["reason"] == "ValueError: batch 7 is empty"
    documents = failure_files(folder)
    assert sorted(document["node_id"] for document in documents) == names
    for document in documents:
        first = document["first_failure"]
        assert (first["rank"], first["kind"], first["exit_code"]) == (last, "exception", 1)
        assert first["node"] == run.run_end.failure.node_id
        assert (document["outcome"], document["exit_code"], document["retry"]) == ("failed", 1, "here")
        assert {failure["rank"] for failure in document["local_failures"]} <= {*range(last + 1)}
