"""The benchmarks of whole agents yield every figure, with a plausible number."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import idle as idling
from benchmarks import launch as launching
from benchmarks.clients.regrouping import RegroupOrder
from benchmarks.figures import Figure
from benchmarks.processes import BenchmarkError, client_command, driven
from benchmarks.regroup import newcomer, restart
from benchmarks.session import Session

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """A session that measures ours alone, once, and briefly."""
    monkeypatch.setattr(launching, "_TIMES", 1)
    monkeypatch.setattr(idling, "_SECONDS", 1.0)
    return Session(tmp_path, (), 1, None, lambda line: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("benchmark", "names"),
    [
        (launching.launch, ["launch.overhead", "launch.cpu"]),
        (restart, ["restart.running"]),
        (newcomer, ["newcomer.running"]),
        (idling.idle, ["idle.cpu", "idle.memory", "idle.resident"]),
    ],
)
def test_an_agent_is_measured_without_torch(
    session: Session, benchmark: Callable[[Session], Iterator[Figure]], names: list[str]
) -> None:
    """Our figures are there where torch is not installed."""
    figures = list(benchmark(session))
    assert session.failures == []
    assert [figure.name for figure in figures] == names
    for figure in figures:
        # An idle agent may use less CPU than one tick of the kernel's clock in a second.
        assert figure.value > 0 or figure.name == "idle.cpu"
        assert figure.peer is None


def test_a_world_that_does_not_form_is_an_error_after_the_timeout(tmp_path: Path) -> None:
    """A world that does not come about is an error after the timeout, and not an endless benchmark."""
    agent = [sys.executable, "-c", "import time; time.sleep(100)"]
    order = RegroupOrder("restart", agent, 1, 2, str(tmp_path), str(tmp_path / "log"), timeout=0.5)
    with pytest.raises(BenchmarkError, match=r"the first world: 0 of 2 workers within 0\.5 s"):
        driven(client_command("regrouping", order), tmp_path / "client.log", 60.0)


def test_python_files_are_compiled_as_an_installation_has_them(tmp_path: Path) -> None:
    """Otherwise the benchmark would measure the compiler: PYTHONDONTWRITEBYTECODE may be set in its environment."""
    probe = "import sys; print(sys.dont_write_bytecode, sys.pycache_prefix)"
    show = "from benchmarks.clients.launching import with_compiled as it; import json; print(json.dumps(it('/x')))"
    shown = subprocess.run(
        [sys.executable, "-c", show],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(__file__).parent.parent), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    seen = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        text=True,
        check=True,
        env=json.loads(shown.stdout),
    )
    assert seen.stdout.split() == ["False", "/x"]
