"""Events and logs of a stock torchrun are those of `rallypoint run`, with one flag each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.cli_process import clean_environment
from torch_client.torchrun_job import TORCHRUN

pytestmark = [pytest.mark.torch, pytest.mark.integration, pytest.mark.timeout(600)]

# Rank 1 fails in its first attempt, once the other has had time to start.
WORKER = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("attempt", attempt, "of rank", rank)
(folder / f"{attempt}.{rank}").touch()
while not (folder / f"{attempt}.{1 - int(rank)}").exists():
    time.sleep(0.05)
if rank == "1" and attempt == "0":
    sys.exit(7)
while attempt == "0":
    time.sleep(1)
"""


@pytest.fixture(scope="module", autouse=True)
def torch() -> None:
    """Skip without torch, which has torchrun."""
    pytest.importorskip("torch")


def torchrun(folder: Path, destination: str) -> subprocess.CompletedProcess[str]:
    worker = folder / "worker.py"
    worker.write_text(WORKER)
    return subprocess.run(
        [
            *[str(TORCHRUN), "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"],
            *["--event-log-handler", "rallypoint", "--logs-specs", "rallypoint"],
            *["--redirects", "3", "--log-dir", str(folder / "logs"), str(worker), str(folder)],
        ],
        env=clean_environment(RALLYPOINT_EVENT_LOG_HANDLER=destination),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_events_of_a_stock_torchrun_have_our_form(tmp_path: Path) -> None:
    """Each start of a worker, its log files, its end, and the job's end; the log of the failed attempt stays."""
    result = torchrun(tmp_path, f"file:{tmp_path / 'events.jsonl'}")
    assert result.returncode == 0, result.stderr
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    workers = [(each["event"], each["restart_count"], each["rank"]) for each in events if "rank" in each]
    assert workers == [
        *[("LOGS", 0, 0), ("LOGS", 0, 1), ("START", 0, 0), ("START", 0, 1)],
        *[("LOGS", 1, 0), ("LOGS", 1, 1), ("START", 1, 0), ("START", 1, 1)],
        *[("SUCCEEDED", 1, 0), ("SUCCEEDED", 1, 1)],
    ]
    assert [each["event"] for each in events if each["source"] == "AGENT"][-1] == "SUCCEEDED"
    assert {each["role"] for each in events} == {"default"}
    assert len({each["run_id"] for each in events}) == 1
    for each in events:
        if each["event"] == "LOGS":
            printed = Path(each["stdout"]).read_text()
            assert printed.startswith(f"attempt {each['restart_count']} of rank {each['rank']}")


def test_a_destination_that_can_not_be_opened_costs_the_events_and_not_the_job(tmp_path: Path) -> None:
    """One line has the reason."""
    result = torchrun(tmp_path, "file:/nowhere/events.jsonl")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("torchrun's events are not recorded") == 1
    assert "can't write '/nowhere/events.jsonl'" in result.stderr


def test_logs_of_an_attempt_stay_when_membership_changes(tmp_path: Path) -> None:
    """The restart count is the same then. Workers get their own environment unchanged, with the file for errors."""
    from rallypoint.torch.events import RallypointLogsSpecs

    specs = RallypointLogsSpecs(log_dir=str(tmp_path))
    folders = []
    for _ in range(2):
        environments: dict[int, dict[str, str]] = {
            rank: {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "4"} for rank in (0, 1)
        }
        files = specs.reify(environments).error_files
        assert {rank: env["TORCHELASTIC_ERROR_FILE"] for rank, env in environments.items()} == files
        assert {env["TORCHELASTIC_RESTART_COUNT"] for env in environments.values()} == {"4"}
        folders += [Path(file).parent for file in files.values()]
    assert [folder.parent.name for folder in folders] == ["attempt_0", "attempt_0", "attempt_1", "attempt_1"]
    assert all(folder.is_dir() for folder in folders)


def test_torchrun_loads_no_grpc_for_events() -> None:
    """torchrun forks; and an event in another form than expected is a line of the log."""
    program = (
        "import sys\n"
        "from torch.distributed.elastic.events import Event, EventSource, record\n"
        "import torch.distributed.elastic.rendezvous\n"
        "record(Event('torchelastic.worker.status.START', EventSource.AGENT), 'rallypoint')\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('grpc', 'google')])\n"
    )
    done: Any = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=clean_environment()
    )
    assert done.stdout.strip() == "[]"
    assert done.stderr.count("another form than expected") == 1
    assert "Traceback" not in done.stderr
