"""torch's own timers over our socket: torch's promises about them hold, with any change of its clock."""

from __future__ import annotations

import ast
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from support.processes import modules_after

TREES = [Path(__file__).parents[2] / tree for tree in ("services", "agent")]


def test_torch_is_imported_by_its_own_package_only() -> None:
    """The import costs a second and a gigabyte: the command line, the agent and workers without torch avoid it."""
    importers = {
        path.relative_to(tree)
        for tree in TREES
        for path in tree.rglob("*.py")
        if any(_names_torch(node) for node in ast.walk(ast.parse(path.read_text())))
    }
    modules = {path.name for path in importers if path.parent == Path("rallypoint/torch")}
    without = {"__init__.py", "companion.py", "lightning.py", "settings.py", "transformers.py"}
    assert modules | without == {path.name for path in (TREES[1] / "rallypoint/torch").glob("*.py")}
    assert len(modules) == len(importers)
    others = "rallypoint.torch, rallypoint.cli.main, rallypoint.launcher.launch"
    loaded = modules_after(f"import {others}, rallypoint.timer, rallypoint.worker")
    assert not [name for name in loaded if name.partition(".")[0] == "torch"]


def _names_torch(node: ast.AST) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and not node.level:
        names = [node.module or ""]
    return any(name.split(".")[0] == "torch" for name in names)


class Recorded:
    """Replaces `rallypoint.timer.expires`: records the current timers."""

    now: ClassVar[list[Recorded]] = []

    def __init__(self, after: float, scope: str, signal: int | None) -> None:
        assert 0 < after <= 315_360_000.0
        self.after, self.scope, self.signal = after, scope, signal

    def __enter__(self) -> None:
        self.now.append(self)

    def __exit__(self, *_: Any) -> None:
        self.now.remove(self)


def held() -> dict[str, float]:
    """Return the timeout of each scope that is timed now; fail if a scope is twice."""
    assert len({each.scope for each in Recorded.now}) == len(Recorded.now)
    return {each.scope: each.after for each in Recorded.now}


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch's timers, with our client, whose timers are only recorded."""
    timer = pytest.importorskip("torch.distributed.elastic.timer")
    from rallypoint.torch import timer as module

    monkeypatch.setattr(module, "expires", Recorded)
    monkeypatch.setattr(Recorded, "now", [])
    timer.configure(module.RallypointTimerClient())
    return timer


@pytest.fixture
def client(timer: Any) -> Any:
    """Our client, as torch calls it."""
    from rallypoint.torch.timer import RallypointTimerClient

    return RallypointTimerClient()


@pytest.mark.torch
def test_torchs_blocks_are_guarded_for_as_long_as_they_last(timer: Any) -> None:
    """The scope is given, or the block's own file and line, where torch has one of contextlib; an error ends it too."""
    with timer.expires(after=60, scope="step"):
        assert held() == {"step": pytest.approx(60.0, abs=5)}
        with timer.expires(after=600):
            (default,) = set(held()) - {"step"}
            assert default == f"{__file__}#{sys._getframe().f_lineno - 2}"
    with pytest.raises(ValueError, match="diverged"), timer.expires(after=60, scope="step"):
        raise ValueError("diverged")
    assert held() == {}


@pytest.mark.torch
def test_acquiring_a_scope_again_replaces_its_deadline(client: Any) -> None:
    """Each scope has one timer, and one release ends it; a release without a timer has no effect."""
    client.acquire("step", time.time() + 60)
    client.acquire("step", time.time() + 600)
    client.acquire("save", time.time() + 60)
    assert held() == {"save": pytest.approx(60.0, abs=5), "step": pytest.approx(600.0, abs=5)}
    client.release("step")
    client.release("step")
    client.release("never")
    assert list(held()) == ["save"]


@pytest.mark.torch
@pytest.mark.parametrize("signal", [None, 0, 10])
def test_the_client_chooses_the_signal(timer: Any, signal: int | None) -> None:
    """torch's file client does so too; 0 kills no process there either."""
    from rallypoint.torch.timer import RallypointTimerClient

    with timer.expires(after=60, client=RallypointTimerClient(signal=signal)):
        assert [each.signal for each in Recorded.now] == [signal]


@pytest.mark.torch
def test_an_invalid_time_is_refused() -> None:
    """The error comes before a timer starts."""
    pytest.importorskip("torch.distributed.elastic.timer")
    from rallypoint.torch.timer import RallypointTimerClient

    with pytest.raises(ValueError, match="expiration_time is nan; expected seconds since the epoch"):
        RallypointTimerClient().acquire("step", math.nan)


@pytest.mark.torch
def test_a_negative_time_is_a_release(client: Any) -> None:
    """torch's requests use it so."""
    client.acquire("step", time.time() + 60)
    client.acquire("step", -1)
    client.acquire("save", -1)
    assert held() == {}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("after", "expected"), [(-5.0, 1e-9), (0.0, 1e-9), (math.inf, 315_360_000.0), (1e12, 315_360_000.0)]
)
def test_any_time_that_torch_takes_is_taken(client: Any, after: float, expected: float) -> None:
    """A past time expires at once, and one beyond ten years after ten."""
    client.acquire("step", time.time() + after)
    assert held()["step"] == pytest.approx(expected)


@pytest.mark.torch
def test_a_scope_without_a_name_is_taken(client: Any) -> None:
    """Our own client would use its caller's line instead."""
    client.acquire("", time.time() + 60)
    assert list(held()) == ["unnamed"]
    client.release("")
    assert held() == {}


@pytest.mark.torch
def test_the_clock_may_be_set_while_a_timer_runs(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the distance to the deadline at the time of the call counts."""
    now = 1_000_000.0
    monkeypatch.setattr(time, "time", lambda: now)
    client.acquire("step", now + 60)
    now += 3600
    assert held() == {"step": 60.0}


@pytest.mark.torch
def test_a_forked_child_begins_without_timers(client: Any) -> None:
    """Another thread may be changing timers at the time; the parent keeps its timers."""
    client.acquire("step", time.time() + 60)
    with client._changing:
        busy = threading.Thread(target=client.acquire, args=("save", time.time() + 60))
        busy.start()
        pid = os.fork()
        if not pid:
            client.release("step")
            client.acquire("load", time.time() + 60)
            os._exit(0 if list(held()) == ["step", "load"] and list(client._held) == ["load"] else 1)
    busy.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert sorted(held()) == ["save", "step"]


@pytest.mark.torch
def test_threads_share_a_scope_without_losing_a_timer(client: Any) -> None:
    """The last timer has replaced the others; none is left without a release."""

    def work() -> None:
        for _ in range(200):
            client.acquire("step", time.time() + 60)
            client.release("step")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held() == {}


@pytest.mark.torch
def test_a_block_without_an_agent_is_refused() -> None:
    """It is not entered: a program must not run without the timers that it expects."""
    pytest.importorskip("torch.distributed.elastic.timer")
    program = (
        "from torch.distributed.elastic import timer\n"
        "from rallypoint.torch.timer import RallypointTimerClient\n"
        "timer.configure(RallypointTimerClient())\n"
        "with timer.expires(after=60): print('entered')\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RALLYPOINT_")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "RuntimeError: no agent guards this process: RALLYPOINT_TIMER_SOCKET is not set" in done.stderr
