"""Writes the promises of a version: the contract, encoded messages and journals that later versions must read."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from shutil import copyfile
from typing import Any

from compat import golden_journal
from compat.samples import contract, samples
from house.source import ROOT
from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rendezvous.journal.etcd_shelf import EtcdShelf, etcd_shelf
from support.etcd_server import etcd_cluster

RELEASED = ROOT / "tests" / "released"
PROTOS, WIRE, JOURNAL, PAIRS, EXPECTED = (
    "protos.binpb",
    "wire.json",
    "journal.db",
    "journal-etcd.json",
    "journal.json",
)


def versions(released: Path = RELEASED) -> list[str]:
    """Return the released versions, the oldest first."""
    found = [path.parent.name for path in released.glob(f"*/{PROTOS}")]
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


async def write(folder: Path) -> None:
    """Write the files of the present code into an empty folder."""
    write_protos(folder)
    write_wire(folder)
    await write_journal(folder)
    with tempfile.TemporaryDirectory() as data, etcd_cluster(Path(data)) as etcd:
        async with etcd_shelf(etcd.url) as shelf:
            await write_pairs(folder, shelf)


def write_protos(folder: Path) -> None:
    """Write the contract as an image, without comments, for `buf breaking`."""
    buf = Path(sys.executable).with_name("buf")
    command = [str(buf), "build", str(ROOT / "protos"), "--exclude-source-info", "-o", str(folder / PROTOS)]
    subprocess.run(command, check=True)


def write_wire(folder: Path) -> None:
    """Write samples of all messages."""
    encoded = {name: [_text(each) for each in samples(message)] for name, message in contract().items()}
    _dump(folder / WIRE, encoded)


async def write_journal(folder: Path) -> None:
    """Write a SQLite journal and its contents."""
    lease = await golden_journal.write(SqliteJournal(folder / JOURNAL))
    (folder / f"{JOURNAL}.lock").unlink()
    async with served_copy(folder) as service:
        _dump(folder / EXPECTED, {"lease": lease, "contents": await service.contents()})


async def write_pairs(folder: Path, shelf: EtcdShelf) -> None:
    """Write the keys and values of a journal in etcd that has the same contents."""
    await golden_journal.write(shelf.journal())
    space = shelf.place.space
    pairs = (await shelf.snapshot()).items()
    _dump(folder / PAIRS, {_text(key.removeprefix(space)): _text(value) for key, (value, _) in pairs})


@asynccontextmanager
async def served_copy(folder: Path) -> AsyncIterator[golden_journal.Served]:
    """Serve a copy of the SQLite journal in a folder."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / JOURNAL
        copyfile(folder / JOURNAL, copy)
        async with golden_journal.served(SqliteJournal(copy), f"unix:{temporary}/socket") as service:
            yield service


def wire(folder: Path) -> dict[str, list[bytes]]:
    """Read the samples of a version."""
    encoded = json.loads((folder / WIRE).read_text())
    return {name: [b64decode(each) for each in of_message] for name, of_message in encoded.items()}


def pairs(folder: Path) -> dict[str, bytes]:
    """Read the keys and values of its journal in etcd."""
    encoded = json.loads((folder / PAIRS).read_text())
    return {b64decode(key).decode(): b64decode(value) for key, value in encoded.items()}


def _text(data: bytes) -> str:
    return b64encode(data).decode()


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
