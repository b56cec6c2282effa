"""A SQLite journal in a folder of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rallypoint.rendezvous.journal.sqlite import SqliteJournal


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
