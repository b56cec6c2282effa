"""A worker with an unrecoverable error ends the whole job at once, and schedulers do not restart it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from local_cluster import Job, LocalCluster
from support.marks import slow
from support.waiting import PATIENCE

pytestmark = pytest.mark.integration

FAILING_CODE = {
    "raises": """
from rallypoint.worker import Unrecoverable, record

@record
def main():
    raise Unrecoverable("the loss is not a number")

if os.environ["RANK"] == "1":
    main()
""",
    "exits": """
if os.environ["RANK"] == "1":
    sys.exit(93)
""",
}
REASON = {
    "raises": "Unrecoverable: the loss is not a number",
    "exits": "exited with code 93 (unrecoverable error, not restarted)",
}


def failure_files(folder: Path) -> list[dict[str, Any]]:
    """Return the failure files of all agents."""
    return [json.loads(path.read_text()) for path in folder.glob("logs/*/failure.json")]


@pytest.mark.parametrize("way", [slow("raises"), "exits"])
async def test_all_agents_end_with_93_and_no_restart(tmp_path: Path, way: str) -> None:
    """Remaining restarts are not used; the failure files have "retry": "never"."""
    worker = tmp_path / "worker.py"
    worker.write_text(f"import os, sys, time\n{FAILING_CODE[way]}\ntime.sleep(3600)\n")
    async with LocalCluster(tmp_path / "cluster") as cluster:
        await cluster.start_rendezvous()
        job = Job("run-1", (str(worker),), nodes="2", workers=1, max_restarts=5, log_dir=tmp_path / "logs")
        agents = [await cluster.start_agent(name, job) for name in "ab"]
        assert [await agent.ended(PATIENCE) for agent in agents] == [93, 93]
        run = await cluster.get_run("run-1")
    assert (run.round, run.restart_count, run.run_end.failure.permanent) == (1, 0, True)
    for agent in agents:
        assert f"reason     {REASON[way]}" in agent.report
    documents = failure_files(tmp_path)
    assert sorted(document["node_id"] for document in documents) == ["a", "b"]
    for document in documents:
        assert (document["exit_code"], document["retry"], document["outcome"]) == (93, "never", "failed")
        first = document["first_failure"]
        assert (first["rank"], first["exit_code"], first["permanent"]) == (1, 93, True)
