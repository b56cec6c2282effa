"""`rallypoint replicas`: the replicas of the rendezvous service, for people and for programs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from cli.cli_process import rallypoint, service
from rallypoint.cli import operator
from rallypoint.cli.main import main
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb


def _answer(**more: Any) -> pb.ListReplicasResponse:
    answer = pb.ListReplicasResponse(answered_by="b-29400", journal="etcd", shards=64)
    answer.replicas.add(name="a-29400", address="10.0.0.1:29400", instance="1", shards=3, leaving=True)
    answer.replicas.add(name="b-29400", address="10.0.0.2:29400", instance="2", shards=61)
    answer.MergeFrom(pb.ListReplicasResponse(**more))
    return answer


def _shown(monkeypatch: pytest.MonkeyPatch, answer: pb.ListReplicasResponse, *arguments: str) -> str:
    monkeypatch.setattr(operator, "call", lambda *_: answer)
    result = CliRunner().invoke(main, ["replicas", *arguments])
    assert (result.exit_code, result.stderr) == (0, "")
    return result.output


def test_replicas_are_shown_in_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has their names, the number of shards of each, the one that leaves and the one that replied."""
    assert [line.split() for line in _shown(monkeypatch, _answer()).splitlines()] == [
        ["replica", "address", "shards", "since", "state"],
        ["a-29400", "10.0.0.1:29400", "3", "-", "LEAVING"],
        ["b-29400", "10.0.0.2:29400", "61", "-", "answers"],
    ]


def test_shards_without_an_owner_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that wait are the first thing that an operator must see."""
    lines = _shown(monkeypatch, _answer(free_shards=5)).splitlines()
    assert lines[-1] == "5 of 64 shards have no owner at present: their runs wait"


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (
            pb.RunPlace(shard=7, owner_name="b-29400", owner_address="10.0.0.2:29400"),
            "run digits is in shard 7, which b-29400 owns, at 10.0.0.2:29400",
        ),
        (
            pb.RunPlace(shard=7),
            "run digits is in shard 7, which has no owner at present: it waits for a replica to take it over",
        ),
    ],
)
def test_a_runs_replica_is_shown(monkeypatch: pytest.MonkeyPatch, place: pb.RunPlace, told: str) -> None:
    """It is the replica to look at when a run has trouble."""
    assert _shown(monkeypatch, _answer(run=place), "--run", "digits").splitlines()[-1] == told


def test_a_service_with_a_journal_of_its_own_is_its_only_replica() -> None:
    """The command works with every rendezvous service, so that scripts need not know its journal."""
    with service("rendezvous", "--journal", "memory") as address:
        told = rallypoint("replicas", "--rdzv-endpoint", address, "--run", "digits", "--json")
    assert (told.returncode, told.stderr) == (0, "")
    answer = json.loads(told.stdout)
    (replica,) = answer["replicas"]
    assert replica["address"] == address
    assert replica["shards"] == answer["shards"] == 1
    assert answer["journal"] == "memory"
    assert answer["answeredBy"] == replica["name"]
    assert answer["run"] == {"shard": 0, "ownerName": replica["name"], "ownerAddress": address}
