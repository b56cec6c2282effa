"""Play scenarios, several at a time, and report the result of each rule."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rallypoint.conformance import rounds, streams
from rallypoint.conformance.client import TestedClient
from rallypoint.conformance.rules import RULES, Findings, RuleResult
from rallypoint.conformance.scene import SCENARIOS, ClientFailed, RuleBroken, Scenario, Scene
from rallypoint.conformance.server import ScriptedService
from rallypoint.rpc.endpoint import SettingError

__all__ = ["SCENARIOS", "Report", "chosen_scenarios", "play_all", "rounds", "streams"]

_RUN_ID = "conformance"


@dataclass(frozen=True)
class Report:
    """The findings of all scenarios that were played, by name."""

    findings: dict[str, Findings]

    def results(self) -> list[RuleResult]:
        """Return the result of each rule."""
        return [self._result(rule) for rule in RULES]

    @property
    def failed(self) -> bool:
        """True if a rule was broken."""
        return any(each.broken for each in self.findings.values())

    def _result(self, rule: str) -> RuleResult:
        for name, findings in self.findings.items():
            if rule in findings.broken:
                expected, seen = findings.broken[rule]
                return RuleResult(rule, "FAIL", name, expected, seen)
        if any(rule in findings.held for findings in self.findings.values()):
            return RuleResult(rule, "PASS")
        cut = [
            f"{name} ended at {', '.join(findings.broken)}"
            for name, findings in self.findings.items()
            if findings.broken and rule in SCENARIOS[name].rules
        ]
        return RuleResult(rule, "SKIPPED", reason="; ".join(cut) or "no scenario of it was played")

    def to_json(self) -> str:
        """Return the report as JSON: the rules, and the scenarios with the rules that held."""
        rules = [
            {"rule": each.rule, "text": RULES[each.rule], "status": each.status}
            | {
                name: value
                for name in ("scenario", "expected", "seen", "reason")
                if (value := getattr(each, name))
            }
            for each in self.results()
        ]
        played = {
            name: {"held": sorted(findings.held), "broken": sorted(findings.broken)}
            for name, findings in self.findings.items()
        }
        return json.dumps({"rules": rules, "scenarios": played}, indent=2)


def chosen_scenarios(rules: Iterable[str], names: Iterable[str]) -> list[Scenario]:
    """Return the scenarios of these names, and those that are there for these rules; all if none is given.

    Raises:
        SettingError: There is no such rule or scenario.
    """
    rules, names = set(rules), set(names)
    if unknown := rules - set(RULES):
        raise SettingError(f"--rule: there is no rule {min(unknown)!r}; --list shows all")
    if unknown := names - set(SCENARIOS):
        raise SettingError(f"--scenario: there is no scenario {min(unknown)!r}; --list shows all")
    if not rules and not names:
        return list(SCENARIOS.values())
    return [each for each in SCENARIOS.values() if each.name in names or rules & set(each.rules)]


async def play_all(
    words: Sequence[str],
    scenarios: Sequence[Scenario],
    *,
    timeout: float,
    jobs: int,
    progress: Callable[[str], object],
) -> Report:
    """Play scenarios; the client of each is ended when this returns.

    Args:
        words: The command line of the client, with placeholders.
        scenarios: The scenarios.
        timeout: Seconds to wait for each expected action of the client.
        jobs: How many scenarios are played at a time.
        progress: Called with a line after each scenario.

    Raises:
        SettingError: The client ends before it opens a stream.
    """
    report = Report({})
    limit = asyncio.Semaphore(jobs)
    folder = Path(tempfile.mkdtemp(prefix="rp-"))

    async def play(number: int, each: Scenario) -> None:
        async with limit:
            begun = asyncio.get_running_loop().time()
            findings = await _play(list(words), each, folder / str(number), timeout)
            took = asyncio.get_running_loop().time() - begun
            report.findings[each.name] = findings
            result = f"broke {', '.join(findings.broken)}" if findings.broken else "ok"
            progress(f"{len(report.findings)}/{len(scenarios)} {each.name}: {result} ({took:.1f} s)")

    try:
        # The first alone: a client that can't start fails once.
        await play(0, scenarios[0])
        async with asyncio.TaskGroup() as group:
            for number, each in enumerate(scenarios[1:], 1):
                group.create_task(play(number, each))
    except* ClientFailed as group_error:
        raise SettingError(f"--client: {group_error.exceptions[0]}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    order = {each.name: number for number, each in enumerate(scenarios)}
    return Report(dict(sorted(report.findings.items(), key=lambda item: order[item[0]])))


async def _play(words: list[str], scenario: Scenario, folder: Path, timeout: float) -> Findings:
    async with ScriptedService() as service:
        values = {"address": service.addresses[0], "run_id": _RUN_ID, "node_id": f"node-{scenario.name}"}
        client = TestedClient(words, folder, values)
        scene = Scene(service, client, values, timeout)
        try:
            await scenario.play(scene)
        except RuleBroken:
            pass
        finally:
            await client.kill()
        return scene.findings
