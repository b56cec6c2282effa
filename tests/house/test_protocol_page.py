"""docs/protocol.md has a line for each error of the contract, with its code; it, and the pages of the workers' sockets,
have the id of each checked rule."""

from __future__ import annotations

import re
from pathlib import Path

from hostile.contract import documented_reasons
from rallypoint.conformance.report import AGENTS, WORKERS
from rallypoint.conformance.rules import RULES, WORKER_RULES

_PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
_ROW = re.compile(r"^\| `([A-Z_]+)` \| ([A-Z_]+) \| ([\w, ]+) \| (.+) \|$", re.MULTILINE)


def test_each_error_of_the_contract_is_in_the_table_once_with_its_services() -> None:
    """An error of a member's stream has its rule."""
    contract = {
        (
            reason,
            code,
            service.rpartition(".")[2].removesuffix("Service").lower().replace("supervisor", "agent"),
        )
        for service, reasons in documented_reasons().items()
        for code, reason in reasons
    }
    every = sorted({service for _, _, service in contract})
    rows = _ROW.findall(_PAGE.read_text(encoding="utf-8"))
    found = []
    for reason, code, places, reaction in rows:
        services = places.removeprefix("Join, ")
        found += [(reason, code, each) for each in (every if services == "all" else services.split(", "))]
        assert bool(re.search(r"\bR\d\d\b", reaction)) == places.startswith("Join, "), reason
    assert sorted(found) == sorted(contract)
    assert rows == sorted(rows)


def test_the_page_and_the_kit_have_the_same_rules() -> None:
    """The duties of the page have the ids of the rules; its last section, which is about the kit, is left out."""
    duties = (
        _PAGE.read_text(encoding="utf-8").partition("\n## The life")[2].partition("\n## Check your agent")[0]
    )
    assert set(re.findall(r"\bR\d\d\b", duties)) == set(RULES)


def test_the_pages_of_the_sockets_and_the_kit_have_the_same_rules() -> None:
    """The section about the kit is left out."""
    for page, letter in (("timer-socket.md", "T"), ("store-socket.md", "S")):
        duties = _PAGE.with_name(page).read_text(encoding="utf-8").partition("\n## Check your worker")[0]
        expected = {rule for rule in WORKER_RULES if rule.startswith(letter)}
        assert set(re.findall(rf"\b{letter}\d\d\b", duties)) == expected


def test_each_rule_has_a_scenario() -> None:
    for kit in (AGENTS, WORKERS):
        assert {rule for each in kit.scenarios.values() for rule in each.rules} == set(kit.rules)
