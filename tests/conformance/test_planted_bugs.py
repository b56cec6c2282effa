"""The kit finds no fault in a client that keeps every rule, and finds each planted bug by its rule."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from conformance.reference_client import BUGS
from rallypoint.conformance.report import AGENTS, Report, play_all
from rallypoint.conformance.rules import RULES
from support.waiting import PATIENCE

pytestmark = pytest.mark.slow

_CLIENT = [
    sys.executable,
    str(Path(__file__).with_name("reference_client.py")),
    *("{addresses}", "{run_id}", "{node_id}", "{worker}", "{timer}"),
]
# Found by a number of streams in some seconds, which a client on a busy machine may not reach.
_OF_RATE = {"follows-redirects-for-ever", "message-for-each-change", "no-jitter", "storm", "watchdog-storm"}
# Found because nothing happens within a time, or by watching for many seconds.
_IDLE = {
    "ignores-owner", "done-after-success", "failure-once", "ignores-closed", "ignores-settling",
    "ignores-superseded-by", "joins-after-eviction", "joins-after-join-timeout", "joins-closed-run",
    "start-once", "keeps-workers-as-spare", "keeps-workers-in-joinable", "keeps-workers-without-lease",
    "never-starts", "no-depart", "no-failure-report", "no-jitter", "no-sigkill", "repeats-invalid-join",
    "success-once", "confirm-once", "hides-trouble", "no-clear", "subscribes-with-old-lease",
    "waits-for-a-silent-replica", "no-watchdog-after-refusal", "remembers-forgotten-scopes",
}  # fmt: skip
_OVER_TLS = {"R50"}


async def _play(*, bug: str = "", rule: str = "", tls: bool = False, timeout: float) -> Report:
    scenarios = AGENTS.choose([rule] if rule else [], [])
    return await play_all(
        AGENTS,
        [*_CLIENT, bug, *(["{ca}"] if tls else [])],
        scenarios,
        timeout=timeout,
        jobs=4,
        progress=print,
    )


@pytest.mark.parametrize("tls", [False, True])
async def test_a_client_without_a_bug_passes_everything(tls: bool) -> None:
    """In plaintext there are no certificates to check."""
    report = await _play(tls=tls, timeout=PATIENCE)
    expected = {rule: "SKIPPED" if rule in _OVER_TLS and not tls else "PASS" for rule in RULES}
    assert {each.rule: each.status for each in report.results()} == expected, "\n".join(
        each.line() for each in report.results()
    )


@pytest.mark.parametrize("bug", BUGS)
async def test_a_planted_bug_breaks_its_rule(bug: str) -> None:
    rule = BUGS[bug]
    for _ in range(3 if bug in _OF_RATE else 1):
        report = await _play(
            bug=bug, rule=rule, tls=rule in _OVER_TLS, timeout=5.0 if bug in _IDLE else PATIENCE
        )
        result = next(each for each in report.results() if each.rule == rule)
        if result.status == "FAIL":
            break
    assert result.status == "FAIL", "\n".join(each.line() for each in report.results())
    assert result.expected
    assert result.seen


def test_each_rule_is_broken_by_a_bug() -> None:
    assert set(BUGS.values()) == set(RULES)
