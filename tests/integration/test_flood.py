"""Workers that print at full speed block no process, lose no output, and cost the agent no memory.

`make bench ONLY=flood` measures the same at full size.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.clients.flooding import FloodOrder, lines
from cli.cli_process import RALLYPOINT, clean_environment
from support.marks import slow
from support.mortal import mortal
from support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.integration

_WORKERS = 8
_LINES = 30_000  # of each worker: 13 MB in total
_MOST_GROWTH = 6 << 20  # bytes
_TESTS = str(Path(__file__).parent.parent)


@pytest.fixture
def agent(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """An agent whose workers flood its console, which is not read yet; the test adds options."""
    order = FloodOrder(str(tmp_path), _LINES)
    with open(tmp_path / "agent.log", "wb") as log:
        process = subprocess.Popen(
            mortal(
                *(str(RALLYPOINT), "run", "--standalone", "--nproc-per-node", str(_WORKERS), "--tee", "3"),
                *("--log-dir", str(tmp_path / "logs"), "--log-format", "json", *request.param),
                *("--no-python", sys.executable, "-S", "-m", "benchmarks.clients.flooding"),
                json.dumps(asdict(order)),
            ),
            stdout=subprocess.PIPE,
            stderr=log,
            env=clean_environment(PYTHONPATH=_TESTS),
        )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    "agent", [(), slow(("--log-max-size", "1MiB", "--log-keep-files", "100"))], indirect=True
)
def test_a_flood_is_complete_and_costs_no_memory(agent: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """The console is not read until all is written, and then receives every line, in order for each worker."""
    assert agent.stdout is not None
    assert select.select([agent.stdout], [], [], PATIENCE)[0]
    before = _memory(agent.pid)
    results = [tmp_path / f"{rank}.json" for rank in range(_WORKERS)]
    wait_until(lambda: all(result.exists() for result in results), "the workers to have printed")
    shown: dict[bytes, list[bytes]] = defaultdict(list)
    rest, seen = b"", 0
    while seen < _WORKERS * _LINES:
        assert select.select([agent.stdout], [], [], PATIENCE)[0], f"{seen} lines were shown"
        *whole, rest = (rest + os.read(agent.stdout.fileno(), 1 << 20)).split(b"\n")
        seen += len(whole)
        for line in whole:
            prefix, _, content = line.partition(b":")
            shown[prefix].append(content)
    assert _memory(agent.pid) - before < _MOST_GROWTH
    (tmp_path / "go").touch()
    assert agent.stdout.read() == b""
    assert agent.wait(PATIENCE) == 0
    (attempt,) = tmp_path.glob("logs/*/attempt_0")
    for rank in range(_WORKERS):
        expected = lines(rank, 0, _LINES)
        place = attempt / str(rank)
        files = [*sorted(place.glob("stdout.log.*")), place / "stdout.log"]
        assert b"".join(file.read_bytes() for file in files) == expected
        assert b"\n".join([*shown[b"[default%d]" % rank], b""]) == expected
    said = [json.loads(line)["event"] for line in (tmp_path / "agent.log").read_text().splitlines()]
    assert said.count("starting workers") == 1
    assert not [event for event in said if "lease lost" in event or "console" in event]


def _memory(pid: int) -> int:
    """Return the peak memory of a process, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
