"""The peer is measured where torch is installed; without torch, or if it never ends, other figures are not affected."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import c10d
from benchmarks.session import Session


def _session(folder: Path, torch: Path | None, trials: int = 3) -> Session:
    return Session(folder, (), trials, torch, lambda line: None)


def _stand_in(folder: Path, script: str) -> Path:
    """Return an interpreter that runs a shell script instead."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def test_without_torch_there_is_no_peer(tmp_path: Path) -> None:
    """Most machines that run the benchmarks have no torch."""
    session = _session(tmp_path, None)
    assert c10d.c10d_rendezvous(session, 8) == (None, "")
    assert c10d.c10d_calls(session, "set", 8) is None


def test_an_endless_rendezvous_is_stopped_and_counts_as_its_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some c10d rendezvous never end; the result is the time limit, without a failure or an endless wait."""
    monkeypatch.setattr(c10d, "PATIENCE", 0.3)
    session = _session(tmp_path, _stand_in(tmp_path, "exec sleep 60"))
    assert c10d.c10d_rendezvous(session, 8) == (0.3, "c10d: 2 of 2 not finished in 0.3 s")
    assert session.failures == []


def test_the_median_is_of_those_that_came_to_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that hangs does not change the median of the others."""
    monkeypatch.setattr(c10d, "PATIENCE", 2.0)
    hang_once = 'mkdir "$0.hung" 2>/dev/null && exec sleep 60\necho \'{"first": 1, "last": 3}\''
    session = _session(tmp_path, _stand_in(tmp_path, hang_once))
    assert c10d.c10d_rendezvous(session, 8) == (3, "c10d: 1 of 3 not finished in 2 s")


def test_a_peer_that_fails_is_left_out(tmp_path: Path) -> None:
    """A broken torch is noted, and does not fail the benchmark."""
    session = _session(tmp_path, _stand_in(tmp_path, "exit 3"))
    assert c10d.c10d_rendezvous(session, 8) == (None, "c10d: failed")
    assert c10d.c10d_calls(session, "set", 8) is None


@pytest.mark.torch
@pytest.mark.timeout(240)  # torch is imported nine times
def test_torch_does_the_work(tmp_path: Path) -> None:
    """The peer is torch itself: its members complete a rendezvous, and its store replies."""
    pytest.importorskip("torch")
    session = _session(tmp_path, Path(sys.executable), trials=1)
    seconds, note = c10d.c10d_rendezvous(session, 2)
    assert seconds is not None
    assert 0 < seconds < 30
    assert note == ""
    for kind in ("set", "wait"):
        calls = c10d.c10d_calls(session, kind, members=2, each=3)
        assert calls is not None
        assert 0 < calls.first <= calls.last
