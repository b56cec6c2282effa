"""What all torture has in common."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _silent_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of clients lose their streams over and over; that they say so each time would bury what failed."""
    monkeypatch.setattr(logging.getLogger("rallypoint.rendezvous.client"), "disabled", True)
