"""Journals: SQLite's in a folder of its own, etcd's in a location of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rendezvous.journal.etcd_shelf import EtcdShelf, etcd_shelf
from support.etcd_server import EtcdCluster


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of the journal, in a folder of its own."""
    folder = tmp_path / "var"
    folder.mkdir()
    return folder / "rendezvous.db"


@pytest.fixture
async def journal(path: Path) -> AsyncIterator[SqliteJournal]:
    """A journal, opened."""
    opened = SqliteJournal(path)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
async def shelf(etcd: EtcdCluster) -> AsyncIterator[EtcdShelf]:
    """A new location for a journal on etcd."""
    async with etcd_shelf(etcd.url) as opened:
        yield opened
