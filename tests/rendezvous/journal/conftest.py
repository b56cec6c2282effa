"""Journals: SQLite's in a folder of its own, etcd's in a place of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rendezvous.journal.etcd_shelf import EtcdShelf, etcd_shelf
from support.etcd_server import ETCD, EtcdCluster, etcd_cluster


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the journal is, in a folder of its own."""
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


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """One member for all tests that do it no harm."""
    if ETCD is None:
        pytest.skip("needs the etcd command (apt install etcd-server)")
    with etcd_cluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture
async def shelf(etcd: EtcdCluster) -> AsyncIterator[EtcdShelf]:
    """A place for a journal on etcd that nobody used before."""
    async with etcd_shelf(etcd.url) as opened:
        yield opened
