"""The example clients of a worker's sockets pass the kit, and work under an agent."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from cli.cli_process import rallypoint
from clients.members import BUILT, EXAMPLES
from rallypoint.conformance.report import WORKERS, play_all
from rallypoint.conformance.rules import WORKER_RULES
from support.waiting import PATIENCE

_WORKERS = {
    "c": [str(EXAMPLES / "build" / "worker" / "worker")],
    "node": ["node", str(EXAMPLES / "worker" / "worker.mjs")],
}
_TABLE = {"T15", "T16", "T17"}

pytestmark = BUILT


@pytest.mark.parametrize("language", _WORKERS)
async def test_a_worker_passes_the_kit(language: str) -> None:
    """It passes all rules except those of tables."""
    scenarios = WORKERS.choose([], [])
    report = await play_all(WORKERS, _WORKERS[language], scenarios, timeout=PATIENCE, jobs=3, progress=print)
    expected = {rule: "SKIPPED" if rule in _TABLE else "PASS" for rule in WORKER_RULES}
    lines = "\n".join(each.line() for each in report.results())
    assert {each.rule: each.status for each in report.results()} == expected, lines


@pytest.mark.parametrize("language", _WORKERS)
def test_workers_of_an_agent_meet_in_the_store_and_one_that_hangs_is_killed(
    language: str, tmp_path: Path
) -> None:
    """The sockets are those of a real agent and its services."""
    store = "printf 'add\\tsum\\t5\\nset\\t%s\\tff00\\nwait\\t60\\t0\\t1\\nget\\t1\\t0\\nkeys\\t\\n' $RANK"
    hang = "printf 'acquire\\t1\\t0.5\\thangs\\nprogress\\t7\\n'; exec sleep 600"
    worker = shlex.join(_WORKERS[language])
    script = f"{{ {store}; }} | {worker} || exit 1; [ $RANK = 0 ] && exec sleep 600; {{ {hang}; }} | {worker}"
    result = rallypoint(
        *("run", "--standalone", "--nproc-per-node", "2", "--log-dir", tmp_path, "--redirects", "1"),
        *("--no-python", "sh", "-c", script),
    )
    assert result.returncode == 1, result.stderr
    assert "hangs" in result.stderr
    outputs = [path.read_text() for path in sorted(tmp_path.rglob("stdout.log"))]
    assert {text.splitlines()[0] for text in outputs} == {"ok\t5", "ok\t10"}
    assert all(text.splitlines()[1:5] == ["ok", "ok", "ok\tff00", "ok\t0\t1\tsum"] for text in outputs)
