"""Our own agent keeps every rule that the kit checks."""

from __future__ import annotations

import pytest

from cli.cli_process import RALLYPOINT
from rallypoint.conformance.report import AGENTS, Report, play_all
from rallypoint.conformance.rules import RULES
from support.waiting import PATIENCE

_AGENT = [
    *(str(RALLYPOINT), "run", "--insecure", "--rdzv-endpoint", "{addresses}", "--rdzv-id", "{run_id}"),
    *("--timer-endpoint", "{timer}", "--node-id", "{node_id}", "--local-addr", "127.0.0.1"),
    *("--shutdown-timeout", "5", "{worker}"),
]
_QUICK = ("re-forming", "environment", "broken-streams", "lease-lost")


def _lines(report: Report) -> str:
    return "\n".join(each.line() for each in report.results())


async def test_our_agent_passes_quick_scenarios() -> None:
    report = await play_all(
        AGENTS, _AGENT, AGENTS.choose([], _QUICK), timeout=PATIENCE, jobs=3, progress=print
    )
    assert not report.failed, _lines(report)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
async def test_our_agent_passes_everything(workers: int) -> None:
    """It does with one and with two workers."""
    agent = [*_AGENT[:2], "--nproc-per-node", str(workers), *_AGENT[2:]]
    report = await play_all(AGENTS, agent, AGENTS.choose([], []), timeout=PATIENCE, jobs=3, progress=print)
    statuses = {each.rule: each.status for each in report.results()}
    assert statuses == {rule: "SKIPPED" if rule == "R50" else "PASS" for rule in RULES}, _lines(report)


@pytest.mark.slow
async def test_our_agent_over_tls() -> None:
    """It trusts only the right server."""
    agent = [*_AGENT[:2], "--tls-ca", "{ca}", *_AGENT[3:]]
    names = ("wrong-certificate", "broken-streams")
    report = await play_all(AGENTS, agent, AGENTS.choose([], names), timeout=PATIENCE, jobs=2, progress=print)
    assert not report.failed, _lines(report)
    assert "R50" in report.findings["wrong-certificate"].held
