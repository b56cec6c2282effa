"""Common fixtures of the torture tests."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _silent_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the client's log: hundreds of clients lose streams all the time, and would hide the real failure."""
    monkeypatch.setattr(logging.getLogger("rallypoint.rendezvous.client"), "disabled", True)
