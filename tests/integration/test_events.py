"""A real job records its events in a file, in metrics, and in a log line at the end of a restart."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.mortal import mortal
from support.waiting import PATIENCE, wait_until

RALLYPOINT = Path(sys.executable).with_name("rallypoint")
WORKER = Path(__file__).with_name("measuring_worker.py")

pytestmark = pytest.mark.integration


def _agent(folder: Path, *flags: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Run `rallypoint run` with two workers; its log is in `folder`/agent.log."""
    return _running(
        folder,
        *("run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--log-format", "json"),
        *("--log-dir", str(folder / "logs"), *flags, str(WORKER), str(folder)),
    )


@contextmanager
def _running(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [str(RALLYPOINT), *arguments]
    with (folder / "agent.log").open("wb") as log:
        agent = subprocess.Popen(mortal(*command), stderr=log, stdout=log, env=_environment())
    try:
        yield agent
    finally:
        if agent.poll() is None:
            agent.send_signal(signal.SIGTERM)
        agent.wait(PATIENCE)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("RALLYPOINT_", "PET_"))}


def _up(folder: Path, round_: int) -> None:
    wait_until(
        lambda: all((folder / f"up.{round_}.{rank}").exists() for rank in (0, 1)),
        f"the workers of round {round_}",
    )


def _figures(folder: Path) -> dict[str, float]:
    """Return the metrics, from the address in the agent's log."""
    log = folder / "agent.log"
    found = re.search(r"http://127\.0\.0\.1:\d+/metrics", log.read_text())
    assert found is not None, log.read_text()
    with urllib.request.urlopen(found.group(), timeout=PATIENCE) as answer:  # noqa: S310 (our own)
        lines = answer.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {re.sub(r'(,)?run_id="[^"]*"(,)?', "", name): float(value) for name, _, value in samples}


def test_a_restart_is_reported_in_events_metrics_and_a_log_line(tmp_path: Path) -> None:
    """Events and metrics cover the job from its first round to its end, with the time of each part of the restart."""
    events = tmp_path / "events.jsonl"
    flags = ["--metrics-address", "127.0.0.1:0", "--event-log-handler", f"file:{events}"]
    with _agent(tmp_path, *flags) as agent:
        _up(tmp_path, 1)
        (tmp_path / "fail").touch()
        _up(tmp_path, 2)

        def settled() -> bool:
            figures = _figures(tmp_path)
            total = figures.get('rallypoint_agent_restart_seconds_count{part="total",role="default"}')
            return total == 1 and figures['rallypoint_worker_seconds_count{name="step",role="default"}'] == 4

        wait_until(settled, "the figures of a restart and of all four workers")
        figures = _figures(tmp_path)
        parts = ("detected", "told", "stopped", "reformed", "started")
        for part in parts:
            assert figures[f'rallypoint_agent_restart_seconds_count{{part="{part}",role="default"}}'] == 1
        assert figures['rallypoint_agent_rendezvous_seconds_count{role="default"}'] == 2
        assert figures['rallypoint_agent_workers{role="default"state="running"}'] == 2
        assert sum(value for name, value in figures.items() if "worker_failures_total" in name) == 1
        (tmp_path / "finish").touch()
        assert agent.wait(PATIENCE) == 0
    told = [json.loads(line) for line in events.read_text().splitlines()]
    _assert_events(told, parts)
    assert re.search(
        r"running again after \d+\.\d\d s \(detected \d+\.\d\d, told \d+\.\d\d, stopped \d+\.\d\d, "
        r"re-formed \d+\.\d\d, started \d+\.\d\d\)",
        (tmp_path / "agent.log").read_text(),
    )


def _assert_events(told: list[dict[str, Any]], parts: tuple[str, ...]) -> None:
    agent = [each["event"] for each in told if each["source"] == "AGENT" and each["event"] != "AGENT_STATE"]
    # These come at no fixed position.
    ordered = [name for name in agent if name not in ("TOLD", "STOPPED", "WATCHDOG")]
    assert ordered == [
        *("RENDEZVOUS", "ASSIGN_WORKER_RANKS", "DETECTED"),
        *("RENDEZVOUS", "ASSIGN_WORKER_RANKS", "REFORMED", "STARTED", "RESTARTED", "SUCCEEDED"),
    ]
    states = [each["state"] for each in told if each["event"] == "AGENT_STATE"]
    assert states == ["INIT", "HEALTHY", "UNHEALTHY", "STOPPED", "HEALTHY", "SUCCEEDED"]
    workers = [
        (each["event"], each["round"], each["rank"])
        for each in told
        if each["source"] == "WORKER" and each["event"] != "MEASURED"
    ]
    assert sorted(workers) == sorted(
        [
            *(("START", round_, rank) for round_ in (1, 2) for rank in (0, 1)),
            *(("FAILED", 1, 1), ("TERMINATED", 1, 0), ("SUCCEEDED", 2, 0), ("SUCCEEDED", 2, 1)),
        ]
    )
    (failed,) = [each for each in told if each["event"] == "FAILED"]
    assert failed["kind"] == "exit_code"  # as in failure.json
    (restarted,) = [each for each in told if each["event"] == "RESTARTED"]
    assert tuple(restarted["parts"]) == parts
    assert restarted["restart_count"] == 1
    others = sum(seconds for part, seconds in restarted["parts"].items() if part != "told")
    # Each part begins where the previous one ends; only `told` overlaps with `stopped`.
    assert restarted["duration"] == pytest.approx(others, abs=1e-3)
    assert all(each.get("duration", 0) >= 0 for each in told)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_of_its_events_does_not_affect_a_job(tmp_path: Path) -> None:
    """The log has one line about it, and the job succeeds."""
    with _agent(tmp_path, "--event-log-handler", "file:/dev/full") as agent:
        (tmp_path / "fail").touch()
        (tmp_path / "finish").touch()
        assert agent.wait(PATIENCE) == 0
    assert (tmp_path / "agent.log").read_text().count("an event is lost") == 1


@pytest.mark.slow
def test_events_on_the_console_are_lines_of_the_agents_log(tmp_path: Path) -> None:
    """They are there with the flag of torchrun: `--event-log-handler console`."""
    with _agent(tmp_path, "--event-log-handler", "console") as agent:
        (tmp_path / "fail").touch()
        (tmp_path / "finish").touch()
        assert agent.wait(PATIENCE) == 0
    lines = [
        json.loads(line) for line in (tmp_path / "agent.log").read_text().splitlines() if line[:1] == "{"
    ]
    assert {"event START", "event FAILED", "event RENDEZVOUS"} <= {line["event"] for line in lines}


@pytest.mark.slow
def test_a_daemons_metrics_count_ended_jobs_and_drop_their_workers(tmp_path: Path) -> None:
    """Its metrics count all jobs, but have workers of running jobs only."""
    with _running(tmp_path, "serve", "agent", "--port", "0", "--metrics-address", "127.0.0.1:0"):
        log = tmp_path / "agent.log"
        wait_until(lambda: "SupervisorService" in log.read_text(), "the daemon")
        lines = (json.loads(line) for line in log.read_text().splitlines())
        (address,) = (line["address"] for line in lines if "SupervisorService" in str(line.get("services")))
        for program, code in (("true", 0), ("false", 1)):
            command = [str(RALLYPOINT), "submit", "--agents", address, "--no-python", program]
            done = subprocess.run(
                mortal(*command), env=_environment(), check=False, timeout=PATIENCE, capture_output=True
            )
            assert done.returncode == code, done.stderr
        wait_until(
            lambda: _figures(tmp_path).get('rallypoint_agent_run_total{role="default"}') == 2, "both ends"
        )
        figures = _figures(tmp_path)
        assert figures['rallypoint_agent_run_success_no_retries_total{role="default"}'] == 1
        assert figures['rallypoint_agent_run_failed_no_retries_total{role="default"}'] == 1
        assert not any(name.startswith("rallypoint_agent_workers{") for name in figures)


@pytest.mark.slow
def test_without_a_handler_or_metrics_workers_have_no_metrics_socket(tmp_path: Path) -> None:
    """Without an event handler or metrics, workers have no metrics socket in their environment."""
    with _agent(tmp_path) as agent:
        _up(tmp_path, 1)
        (worker, *_) = (
            path for path in Path("/proc").glob("[0-9]*/environ") if str(tmp_path).encode() in _read(path)
        )
        assert b"RALLYPOINT_METRICS_SOCKET" not in _read(worker)
        (tmp_path / "fail").touch()
        (tmp_path / "finish").touch()
        assert agent.wait(PATIENCE) == 0


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
