"""A worker learns at once that its host leaves, reports to its agent when its state is saved, at almost no cost."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rallypoint.worker import checkpoint_saved, notice, should_checkpoint
from support.waiting import PATIENCE


@pytest.fixture
def announce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Make this process a worker; return a function that announces that the host leaves, as in docs/draining.md."""
    # The package has a function of the module's name.
    monkeypatch.setattr(sys.modules["rallypoint.worker.notice"], "_board", None)
    monkeypatch.setenv("RALLYPOINT_NOTICE", str(tmp_path / "notice"))
    monkeypatch.setenv("RANK", "3")
    pipes: list[int] = []

    def post() -> int:
        pipe = tmp_path / "saved"
        os.mkfifo(pipe)
        pipes.append(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))
        content = {"reason": "maintenance", "deadline": time.monotonic() + 60, "saved": str(pipe)}
        (tmp_path / "notice").write_text(json.dumps(content))
        return pipes[-1]

    return post


def test_nothing_is_due_until_it_is_announced(announce: Callable[[], int]) -> None:
    """Then it is, with the reason and the remaining time."""
    assert not should_checkpoint()
    assert notice() is None
    announce()
    assert should_checkpoint()
    told = notice()
    assert told is not None
    assert told.reason == "maintenance"
    assert 0 < told.seconds_left <= 60


def test_a_time_that_is_over_is_not_negative(announce: Callable[[], int], tmp_path: Path) -> None:
    """The worker is about to be stopped."""
    announce()
    content = json.loads((tmp_path / "notice").read_text())
    (tmp_path / "notice").write_text(json.dumps({**content, "deadline": 0.5}))
    told = notice()
    assert told is not None
    assert told.seconds_left == 0


def test_a_worker_reports_its_checkpoint_once_and_is_not_asked_again(announce: Callable[[], int]) -> None:
    """It may go on training until it is stopped."""
    pipe = announce()
    assert checkpoint_saved()
    assert os.read(pipe, 100) == b"3\n"
    assert not should_checkpoint()
    assert notice() is not None


def test_without_an_announcement_nothing_is_reported(announce: Callable[[], int]) -> None:
    """On the hosts that stay, for example, ranks agree to save, and all of them report it."""
    assert not checkpoint_saved()
    announce()
    assert should_checkpoint()


def test_an_agent_that_is_gone_blocks_no_worker(announce: Callable[[], int]) -> None:
    """There is no reader; its workers are about to be killed."""
    os.close(announce())
    assert not checkpoint_saved()


def test_outside_of_an_agent_nothing_is_ever_due(
    announce: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same program runs on a laptop."""
    monkeypatch.delenv("RALLYPOINT_NOTICE")
    announce()
    assert not should_checkpoint()
    assert notice() is None
    assert not checkpoint_saved()


def test_a_fork_looks_for_itself(announce: Callable[[], int], tmp_path: Path) -> None:
    """A worker may be the fork of a process that checked before it had this worker's environment."""
    assert not should_checkpoint()
    announce()
    (tmp_path / "elsewhere").write_text((tmp_path / "notice").read_text())
    (tmp_path / "notice").unlink()
    child = multiprocessing.get_context("fork").Process(
        target=_check_another_notice, args=(tmp_path / "elsewhere",)
    )
    child.start()
    child.join(PATIENCE)
    assert child.exitcode == 7
    assert not should_checkpoint()


def _check_another_notice(path: Path) -> None:
    os.environ["RALLYPOINT_NOTICE"] = str(path)
    os._exit(7 if should_checkpoint() else 1)


def test_it_costs_little(announce: Callable[[], int]) -> None:
    """It is called in every step. A microsecond or so of processor time; the bound is a slow machine's."""
    began = time.thread_time()
    for _ in range(1000):
        should_checkpoint()
    assert time.thread_time() - began < 0.5
