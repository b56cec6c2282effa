"""No process is taken for a silent one because the machine is slow: tests of a bound set it themselves."""

from __future__ import annotations

import pytest

from rallypoint.agent.hangs import python_stacks, reaper
from support.waiting import PATIENCE


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for processes, and for looks at them, as long as a loaded machine needs."""
    monkeypatch.setattr(python_stacks, "FIRST_OUTPUT_TIMEOUT", PATIENCE)
    monkeypatch.setattr(python_stacks, "QUIET", 0.5)
    monkeypatch.setattr(reaper, "SIGNAL_TIMEOUT", PATIENCE)
    monkeypatch.setattr(reaper, "LOOK_TIMEOUT", PATIENCE)
