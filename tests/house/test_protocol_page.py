"""docs/protocol.md has a line for each error of the contract, with its code; it, and the pages of the workers' sockets,
have the id of each checked rule; and each duty of an agent has a rule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import Descriptor

from hostile.contract import documented_reasons
from rallypoint.conformance.report import AGENTS, WORKERS
from rallypoint.conformance.rules import RULES, WORKER_RULES
from rallypoint.conformance.watchdog import ENDS
from rallypoint.conformance.worker_store import ERRORS
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.timer.v1 import timer_service_pb2 as timer_pb

_PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
_OF_CALLS = {"agent", "rendezvous", "state"}  # beside streams: the program knows their purpose
_ROW = re.compile(r"^\| `([A-Z_]+)` \| ([A-Z_]+) \| ([\w, ]+) \| (.+) \|$", re.MULTILINE)


def test_each_error_of_the_contract_is_in_the_table_once_with_its_services() -> None:
    """An error that an agent or a worker may receive on its streams and sockets has its rule."""
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
        of_rules = places.startswith("Join, ") or not set(services.split(", ")) <= _OF_CALLS
        assert bool(re.search(r"\b[RS]\d\d\b", reaction)) == of_rules, reason
    assert sorted(found) == sorted(contract)
    assert rows == sorted(rows)


def test_the_kit_plays_each_error_that_has_a_rule_of_the_watchdog_or_the_store() -> None:
    timers = documented_reasons()["rallypoint.timer.v1.TimerService"]
    assert {(code.name, reason) for code, reasons in ENDS.items() for reason in reasons} == timers
    rows = _ROW.findall(_PAGE.read_text(encoding="utf-8"))
    of_store = {(code, reason) for reason, code, _, reaction in rows if re.search(r"\bS\d\d\b", reaction)}
    assert of_store <= {(code, reason) for _, code, reason, _ in ERRORS}


def _duties() -> str:
    """Return the page without its last section, which is about the kit."""
    return _PAGE.read_text(encoding="utf-8").partition("\n## The life")[2].partition("\n## Check your")[0]


def test_the_page_and_the_kit_have_the_same_rules() -> None:
    assert set(re.findall(r"\bR\d\d\b", _duties())) == set(RULES)


def _fields(message: Descriptor) -> Iterator[str]:
    for field in message.fields:
        yield field.name
        if field.message_type is not None and field.message_type.file == message.file:
            yield from _fields(field.message_type)


def test_each_duty_that_names_a_field_has_a_rule() -> None:
    """A duty is a paragraph, an item of a list or a row, up to the errors, which have their own test."""
    streams = (pb.JoinRequest, pb.JoinResponse, timer_pb.SuperviseRequest, timer_pb.SuperviseResponse)
    fields = {name for message in streams for name in _fields(message.DESCRIPTOR)}
    pieces = re.split(r"\n\n|\n(?=\| |- |\d+\. )", _duties().partition("\n## Errors")[0])
    duties = [
        (piece, named)
        for piece in pieces
        if (named := fields & set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", piece)))))
        and not piece.startswith("```")
    ]
    assert len(duties) > 20
    assert [each for each in duties if not re.search(r"\bR\d\d\b", each[0])] == []


def test_the_pages_of_the_sockets_and_the_kit_have_the_same_rules() -> None:
    """The section about the kit is left out."""
    for page, letter in (("timer-socket.md", "T"), ("store-socket.md", "S")):
        duties = _PAGE.with_name(page).read_text(encoding="utf-8").partition("\n## Check your worker")[0]
        expected = {rule for rule in WORKER_RULES if rule.startswith(letter)}
        assert set(re.findall(rf"\b{letter}\d\d\b", duties)) == expected


def test_each_rule_has_a_scenario() -> None:
    for kit in (AGENTS, WORKERS):
        assert {rule for each in kit.scenarios.values() for rule in each.rules} == set(kit.rules)
