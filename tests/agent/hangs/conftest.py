"""A slow machine does not make a process look silent: tests of a time limit set it themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.agent.hangs import diagnostics, python_stacks, reaper
from rallypoint.agent.hangs.python_stacks import StackPipe
from support.waiting import PATIENCE


@pytest.fixture(autouse=True)
def _generous_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for processes, and for their inspection, as long as a loaded machine needs."""
    monkeypatch.setattr(python_stacks, "FIRST_OUTPUT_TIMEOUT", PATIENCE)
    monkeypatch.setattr(python_stacks, "QUIET", 0.5)
    monkeypatch.setattr(reaper, "SIGNAL_TIMEOUT", PATIENCE)
    monkeypatch.setattr(reaper, "LOOK_TIMEOUT", PATIENCE)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[StackPipe]:
    """A pipe for one worker."""
    made = StackPipe.make(tmp_path / "stacks")
    yield made
    made.close()


@pytest.fixture
def no_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behave as if py-spy were not installed."""

    async def spy(_pid: int) -> str:
        return ""

    monkeypatch.setattr(diagnostics, "spy", spy)
