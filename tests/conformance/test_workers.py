"""The kit for workers finds no fault in workers that keep every rule, and finds each planted bug by its rule."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from conformance.reference_worker import BUGS, FORMS
from rallypoint.conformance.report import WORKERS, Report, play_all
from rallypoint.conformance.rules import WORKER_RULES
from support.waiting import PATIENCE

_HERE = Path(__file__).parent
_REFERENCE = [sys.executable, str(_HERE / "reference_worker.py")]
_TABLE = {"T15", "T16", "T17"}
# Found because nothing happens within a time, or by watching for seconds.
_IDLE = {
    *(
        "drops-changes",
        "forgets-timers",
        "keeps-silent-connection",
        "never-connects-again",
        "no-look",
        "one-recv",
    ),
    *("one-send", "release-by-scope", "repeats-calls", "repeats-ended-timers", "step-of-32-bits"),
    *("waits-at-each-change", "waits-for-ever", "storm"),
}


def _lines(report: Report) -> str:
    return "\n".join(each.line() for each in report.results())


async def _play(words: list[str], rule: str = "", *, timeout: float = PATIENCE) -> Report:
    scenarios = WORKERS.choose([rule] if rule else [], [])
    return await play_all(WORKERS, words, scenarios, timeout=timeout, jobs=4, progress=print)


async def test_our_own_library_passes_everything() -> None:
    report = await _play([sys.executable, str(_HERE / "python_worker.py")])
    assert {each.rule: each.status for each in report.results()} == dict.fromkeys(WORKER_RULES, "PASS"), (
        _lines(report)
    )


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
async def test_a_worker_without_a_bug_passes_everything(form: str) -> None:
    report = await _play([*_REFERENCE, form])
    expected = {rule: "SKIPPED" if rule in _TABLE and form != "table" else "PASS" for rule in WORKER_RULES}
    assert {each.rule: each.status for each in report.results()} == expected, _lines(report)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
async def test_a_planted_bug_breaks_its_rule(bug: str) -> None:
    form, rule = BUGS[bug]
    report = await _play([*_REFERENCE, form, bug], rule, timeout=3.0 if bug in _IDLE else PATIENCE)
    result = next(each for each in report.results() if each.rule == rule)
    assert result.status == "FAIL", _lines(report)
    assert result.expected
    assert result.seen


def test_each_rule_is_broken_by_a_bug() -> None:
    assert {rule for _, rule in BUGS.values()} == set(WORKER_RULES)
