"""A rendezvous service for torch's clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from torture.mortal_server import MortalServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MortalServer]:
    """A rendezvous service over SQLite."""
    server = MortalServer(tmp_path / "server")
    server.start()
    yield server
    server.close()
