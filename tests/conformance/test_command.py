"""`rallypoint conformance` reports by rule, and a command line that can't work is refused in one line."""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli.cli_process import RALLYPOINT, clean_environment, rallypoint, refusal
from rallypoint.conformance.report import AGENTS, WORKERS
from rallypoint.conformance.rules import RULES
from rallypoint.conformance.server import ScriptedService
from support.processes import fresh_marker, gone, living
from support.waiting import PATIENCE, wait_until

_REFERENCE = Path(__file__).with_name("reference_client.py")
_CLIENT = f"{sys.executable} {_REFERENCE} {{address}} {{run_id}} {{node_id}} {{worker}} {{timer}}"


def test_list_shows_each_rule_and_scenario() -> None:
    listed = rallypoint("conformance", "--list").stdout
    for kit in (AGENTS, WORKERS):
        assert all(f"{rule}  {text}\n" in listed for rule, text in kit.rules.items())
        assert all(f"{name} (" in listed for name in kit.scenarios)


def test_a_rule_that_holds() -> None:
    result = rallypoint("conformance", "--client", _CLIENT, "--scenario", "environment")
    assert result.returncode == 0, result.stdout
    assert "R46 PASS" in result.stdout
    assert "R29" not in result.stdout, "no scenario of it was played"
    assert "1/1 environment: ok" in result.stderr


def test_a_rule_that_is_broken() -> None:
    client = f"{_CLIENT} leaks-credentials"
    result = rallypoint("conformance", "--client", client, "--rule", "R47", "--json")
    assert result.returncode == 1, result.stdout
    rules = {each["rule"]: each for each in json.loads(result.stdout)["rules"]}
    assert rules["R47"] == {
        "rule": "R47",
        "text": RULES["R47"],
        "status": "FAIL",
        "scenario": "environment",
        "expected": "no credentials, as RALLYPOINT_TLS_CONFORMANCE",
        "seen": "RALLYPOINT_TLS_CONFORMANCE",
    }
    assert rules["R46"]["status"] == "PASS"
    assert "1/1 environment: broke R47" in result.stderr


def test_rules_after_a_broken_one_are_skipped_with_the_reason() -> None:
    client = f"{_CLIENT} joins-without-address"
    result = rallypoint("conformance", "--client", client, "--scenario", "environment")
    assert result.returncode == 1, result.stdout
    assert f"R47 SKIPPED {RULES['R47']} (environment ended at R10)" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "--client COMMAND is missing"),
        (["--client", "true {address} {run_id} {worker}"], "--client: {node_id} is missing"),
        (
            ["--client", "no-such-program {address} {run_id} {node_id} {worker}"],
            "no program 'no-such-program'",
        ),
        (["--client", "true '"], "can't be split into words"),
        (["--client", _CLIENT, "--worker", "true"], "--client and --worker exclude each other"),
        (["--worker", "no-such-program"], "--worker: there is no program 'no-such-program'"),
        (["--worker", "true", "--rule", "R01"], "--rule: there is no rule 'R01'"),
        (["--client", _CLIENT, "--rule", "R99"], "--rule: there is no rule 'R99'"),
        (["--client", _CLIENT, "--scenario", "rest"], "--scenario: there is no scenario 'rest'"),
    ],
)
def test_a_command_line_that_cannot_work(arguments: list[str], part: str) -> None:
    assert part in refusal(rallypoint("conformance", *arguments))


def test_a_client_that_ends_at_once_is_shown_with_its_last_lines() -> None:
    client = "sh -c 'echo no such flag: --run >&2; exit 4' {address} {run_id} {node_id} {worker}"
    result = rallypoint("conformance", "--client", client)
    line = refusal(result)
    assert "exit code 4 before it opened a stream" in line
    assert "no such flag: --run" in line


@pytest.mark.parametrize(
    ("program", "ending"),
    [("sh -c 'echo no socket >&2; exit 4'", "ended with exit code 4"), ("sleep 60", "was silent")],
)
def test_a_worker_that_carries_out_no_step_is_shown_with_its_last_lines(program: str, ending: str) -> None:
    line = refusal(rallypoint("conformance", "--worker", program, "--timeout", "1"))
    assert f"--worker: the worker {ending} before it had a result" in line
    assert ("no socket" in line) == ("exit" in program)


def test_the_report_of_a_worker() -> None:
    """It has only the rules of workers, and the reason for those that are skipped."""
    worker = f"{sys.executable} {_REFERENCE.with_name('reference_worker.py')}"
    result = rallypoint("conformance", "--worker", f"{worker} packets", "--rule", "T15", "--rule", "S05")
    assert result.returncode == 0, result.stdout
    assert f"T16 SKIPPED {WORKERS.rules['T16']} (table: the worker uses no table)" in result.stdout
    assert "S05 PASS" in result.stdout
    assert "R01" not in result.stdout
    result = rallypoint("conformance", "--worker", f"{worker} stream no-frames", "--rule", "T02")
    assert result.returncode == 1, result.stdout
    assert "T02 FAIL" in result.stdout


def _is_worker(pid: int) -> bool:
    """Return True for a worker of the kit that has written its record."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:  # it has ended
        return False
    return words[1:2] == ["-IS"] and Path(words[2]).with_name(f"{pid}.json").exists()


def test_a_signal_while_the_scripted_service_stops_leaves_none_running() -> None:
    """A process that runs when the event loop is closed shows a traceback, which is an error in tests."""

    async def interrupted() -> None:
        async with ScriptedService(None) as service, asyncio.timeout(0):
            await service.stop()

    with pytest.raises(TimeoutError):
        asyncio.run(interrupted())
    gc.collect()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_client_and_its_workers(number: int) -> None:
    with fresh_marker() as marker:
        kit = subprocess.Popen(
            [str(RALLYPOINT), "conformance", "--client", _CLIENT, "--scenario", "service-restarts"],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=clean_environment(MARKER=marker),
        )
        wait_until(lambda: any(map(_is_worker, living(marker))), "a worker that has begun")
        kit.send_signal(number)
        _, errors = kit.communicate(timeout=PATIENCE)
        assert kit.returncode == 130, errors
        assert "Traceback" not in errors
        wait_until(lambda: gone(marker), "the end of the client and its worker")
