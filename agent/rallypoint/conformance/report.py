"""Play scenarios, several at a time, and report the result of each rule."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from rallypoint.agent.sockets.worker_sockets import roomy_folder
from rallypoint.conformance import rounds, streams, watchdog, worker_store, worker_timers
from rallypoint.conformance.checks import Checks, ClientFailed, NotOffered, RuleBroken, Scenario
from rallypoint.conformance.rules import RULES, WORKER_RULES, Findings, RuleResult
from rallypoint.conformance.scene import SCENARIOS, open_scene
from rallypoint.conformance.worker_scene import WORKER_SCENARIOS, open_worker_scene
from rallypoint.rpc.endpoint import SettingError

__all__ = [
    "AGENTS",
    "NOT_PLAYED",
    "WORKERS",
    "Kit",
    "Report",
    "play_all",
    "rounds",
    "streams",
    "watchdog",
    "worker_store",
    "worker_timers",
]


NOT_PLAYED = "no scenario of it was played"


@dataclass(frozen=True)
class Kit:
    """The rules for programs of one kind, and the scenarios that check them.

    Attributes:
        option: The option of the command line of the program.
        placeholders: The names that must be in that command line, in braces.
        rules: The rules, by id.
        scenarios: The scenarios, by name.
        open_scene: Opens the scene of one play: words of the command line, a folder that does not exist yet, the name
            of the scenario, and seconds to wait for each expected action.
    """

    option: str
    placeholders: tuple[str, ...]
    rules: Mapping[str, str]
    scenarios: Mapping[str, Scenario]
    open_scene: Callable[[list[str], Path, str, float], AbstractAsyncContextManager[Checks]]

    def choose(self, rules: Iterable[str], names: Iterable[str]) -> list[Scenario]:
        """Return the scenarios of these names, and those that are there for these rules; all if none is given.

        Raises:
            SettingError: There is no such rule or scenario.
        """
        rules, names = set(rules), set(names)
        if unknown := rules - set(self.rules):
            raise SettingError(f"--rule: there is no rule {min(unknown)!r}; --list shows all")
        if unknown := names - set(self.scenarios):
            raise SettingError(f"--scenario: there is no scenario {min(unknown)!r}; --list shows all")
        if not rules and not names:
            return list(self.scenarios.values())
        return [each for each in self.scenarios.values() if each.name in names or rules & set(each.rules)]


AGENTS = Kit("--client", ("address", "run_id", "node_id", "worker"), RULES, SCENARIOS, open_scene)
WORKERS = Kit("--worker", (), WORKER_RULES, WORKER_SCENARIOS, open_worker_scene)


@dataclass(frozen=True)
class Report:
    """The findings of all scenarios of a kit that were played, by name."""

    kit: Kit
    findings: dict[str, Findings]

    def results(self) -> list[RuleResult]:
        """Return the result of each rule."""
        return [self._result(rule) for rule in self.kit.rules]

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
            if findings.broken and rule in self.kit.scenarios[name].rules
        ]
        cut += [
            f"{name}: {findings.left_out}"
            for name, findings in self.findings.items()
            if findings.left_out and rule in self.kit.scenarios[name].rules
        ]
        return RuleResult(rule, "SKIPPED", reason="; ".join(cut) or NOT_PLAYED)

    def to_json(self) -> str:
        """Return the report as JSON: the rules, and the scenarios with the rules that held."""
        rules = [
            {"rule": each.rule, "text": self.kit.rules[each.rule], "status": each.status}
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


async def play_all(
    kit: Kit,
    words: Sequence[str],
    scenarios: Sequence[Scenario],
    *,
    timeout: float,
    jobs: int,
    progress: Callable[[str], object],
) -> Report:
    """Play scenarios; the client of each is ended when this returns.

    Args:
        kit: The kit.
        words: The command line of the program, with placeholders.
        scenarios: The scenarios.
        timeout: Seconds to wait for each expected action of the client.
        jobs: How many scenarios are played at a time.
        progress: Called with a line after each scenario.

    Raises:
        SettingError: The program ends before it does anything.
    """
    report = Report(kit, {})
    limit = asyncio.Semaphore(jobs)
    folder = Path(tempfile.mkdtemp(prefix="rp-", dir=roomy_folder()))

    async def play(number: int, each: Scenario) -> None:
        async with limit:
            begun = asyncio.get_running_loop().time()
            findings = await _play(kit, list(words), each, folder / str(number), timeout)
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
        raise SettingError(f"{kit.option}: {group_error.exceptions[0]}") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    order = {each.name: number for number, each in enumerate(scenarios)}
    return Report(kit, dict(sorted(report.findings.items(), key=lambda item: order[item[0]])))


async def _play(kit: Kit, words: list[str], scenario: Scenario, folder: Path, timeout: float) -> Findings:
    async with kit.open_scene(words, folder, scenario.name, timeout) as scene:
        try:
            await scenario.play(scene)
        except RuleBroken:
            pass
        except NotOffered as left_out:
            scene.findings.left_out = str(left_out)
        return scene.findings
