"""The promises of every released version hold: its messages and journals are read, its contract is not broken.

The present code is one of the versions, as if it were released now: the first release needs no other.
"""

from __future__ import annotations

import json
import re
import subprocess
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from shutil import copyfile, copytree

import pytest

from compat import release
from compat.golden_journal import RUN, differences, served
from compat.samples import contract, decoded, samples, unknown_fields
from house.source import ROOT
from rallypoint.rendezvous.journal.journal import Journal
from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rendezvous.journal.etcd_shelf import etcd_shelf
from support.etcd_server import NEEDS_ETCD, EtcdCluster

PRESENT = "present"
every_version = pytest.mark.parametrize("version", [*release.versions(), PRESENT])


@every_version
def test_every_message_is_read_and_written_as_before(version: str, tmp_path: Path) -> None:
    """No field is unknown, and the bytes are the same: fields may have been added, and no other change."""
    if version == PRESENT:
        release.write_wire(tmp_path)
    wire = release.wire(_folder(version, tmp_path))
    assert len(wire) > 100
    for name, of_message in wire.items():
        assert name in contract(), f"the message {name} of version {version} is gone"
        for sample in of_message:
            message = decoded(name, sample)
            assert list(unknown_fields(message)) == [], name
            assert message.SerializeToString(deterministic=True) == sample, name


def test_a_sample_has_every_field() -> None:
    """It is in one of the samples of its message at least, and no two numbers or texts of a sample are the same."""
    for name, message in contract().items():
        fields: set[str] = set()
        for sample in samples(message):
            present = decoded(name, sample).ListFields()
            fields |= {field.name for field, _ in present}
            values = [
                value for _, value in present if isinstance(value, int | str | bytes) and value is not True
            ]
            numbers = [value for value in values if not isinstance(value, int) or value > 1_000]
            assert len(numbers) == len(set(numbers)), name
        assert fields == set(message.fields_by_name), name


@every_version
async def test_a_sqlite_journal_goes_on(version: str, tmp_path: Path) -> None:
    """It has the contents of its version; its nodes resume, and it can be written to."""
    if version == PRESENT:
        await release.write_journal(tmp_path)
    folder = _folder(version, tmp_path)
    copyfile(folder / release.JOURNAL, tmp_path / "copy.db")
    await _goes_on(lambda: SqliteJournal(tmp_path / "copy.db"), folder, tmp_path)


@NEEDS_ETCD
@every_version
async def test_a_journal_in_etcd_goes_on(version: str, tmp_path: Path, etcd: EtcdCluster) -> None:
    """The same holds for the keys and values of its version in etcd."""
    if version == PRESENT:
        await release.write_journal(tmp_path)
        async with etcd_shelf(etcd.url) as shelf:
            await release.write_pairs(tmp_path, shelf)
    folder = _folder(version, tmp_path)
    async with etcd_shelf(etcd.url) as shelf:
        for key, value in release.pairs(folder).items():
            await shelf.put(key, value)
        await _goes_on(shelf.journal, folder, tmp_path)


@pytest.mark.parametrize(
    ("pattern", "broken", "complaint"),
    [
        (r"(message JoinRun \{.*?string node_id = )2;", r"\g<1>99;", 'field "2"'),
        (r"(message JoinRun \{.*?)string node_id = 2;", r"\g<1>", 'field "2"'),
        (r"(message JoinRun \{.*?)string node_id = 2;", r'\g<1>reserved 2; reserved "node_id";', 'field "2"'),
        (r"(message JoinRun \{.*?)string node_id = 2;", r"\g<1>bytes node_id = 2;", "changed type"),
        (r"(message JoinRun \{.*?string )node_id = 2;", r"\g<1>node_name = 2;", "changed name"),
        (r"PHASE_FINAL = 3;", r"PHASE_AGREED = 3;", "changed name"),
        (r"rpc WatchRun\(.*?\n  rpc ", "rpc ", '"WatchRun"'),
    ],
    ids=["renumbered", "removed", "reserved", "type changed", "renamed", "value renamed", "rpc removed"],
)
def test_a_break_of_the_contract_is_found(pattern: str, broken: str, complaint: str, contracts: Path) -> None:
    """The check of `make lint` fails after the change, and passes before."""
    path = contracts / "protos" / "rallypoint" / "rendezvous" / "v1" / "rendezvous_service.proto"
    assert _breaking(contracts).returncode == 0
    changed, count = re.subn(pattern, broken, path.read_text(), count=1, flags=re.DOTALL)
    assert count == 1
    path.write_text(changed)
    result = _breaking(contracts)
    assert (result.returncode != 0, complaint in result.stdout) == (True, True), result.stdout + result.stderr


def test_the_latest_version_is_the_one_to_compare_with(contracts: Path) -> None:
    """Versions are ordered by their numbers, not by their letters; without any version there is nothing to compare."""
    released = contracts / "released"
    (released / "0.10.0").mkdir()
    (released / "0.10.0" / release.PROTOS).write_bytes(b"not an image")
    assert _breaking(contracts).returncode != 0
    assert release.versions(released) == ["0.9.0", "0.10.0"]
    result = subprocess.run(
        [CHECK, contracts / "protos", contracts / "none"], capture_output=True, text=True, check=True
    )
    assert "no release yet" in result.stderr


def test_differences_are_values_that_changed_or_are_gone() -> None:
    """More fields of a message are none; more messages in a list are one."""
    then = {"a": [{"b": 1}], "c": {"d": "e"}}
    assert differences({"a": [{"b": 1, "new": 2}], "c": {"d": "e"}}, then) == []
    assert differences({"a": [{"b": 2}], "c": {}}, then) == ["/a[0]/b: 2, was 1", "/c/d: None, was 'e'"]
    assert differences({"a": [{"b": 1}, {}], "c": {"d": "e"}}, then) != []


CHECK = ROOT / ".ci" / "check-breaking"


@pytest.fixture
def contracts(tmp_path: Path) -> Path:
    """A folder with a copy of `protos` and their release as version 0.9.0."""
    copytree(ROOT / "protos", tmp_path / "protos")
    (tmp_path / "released" / "0.9.0").mkdir(parents=True)
    release.write_protos(tmp_path / "released" / "0.9.0")
    return tmp_path


def _folder(version: str, fresh: Path) -> Path:
    return fresh if version == PRESENT else release.RELEASED / version


def _breaking(contracts: Path) -> subprocess.CompletedProcess[str]:
    command = [CHECK, contracts / "protos", contracts / "released"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


async def _goes_on(journal: Callable[[], Journal], folder: Path, tmp_path: Path) -> None:
    expected = json.loads((folder / release.EXPECTED).read_text())
    lease, then = expected["lease"], expected["contents"]
    endpoint = f"unix:{tmp_path}/socket"
    async with served(journal(), endpoint) as service:
        now = await service.contents()
        assert differences(now, then) == []
        assert {name: set(of_run) for name, of_run in now.items()} == {
            name: set(of_run) for name, of_run in then.items()
        }
        await service.continue_(lease, b64decode(lease["token"]))
    async with served(journal(), endpoint) as service:
        events = await service.events(RUN)
        before = then["events"][RUN]
        assert differences(events[: len(before)], before) == []
        assert events[len(before)]["kind"] == "EVENT_KIND_NODE_EVICTED"
