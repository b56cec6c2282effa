"""The parts of the timer benchmarks measure correctly, and end when there is nothing to measure."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import expires, reap
from benchmarks.clients.block_costs import PACES, BlocksOrder, cost_of, costs_of
from benchmarks.clients.timer_requests import RequestsOrder, messages
from benchmarks.processes import BenchmarkError, running
from benchmarks.session import Session
from rallypoint.timer.v1 import timer_service_pb2 as pb
from support.waiting import wait_until


def _session(folder: Path, torch: Path | None = None) -> Session:
    return Session(folder, (), 1, torch, lambda line: None)


def _failing(every: int, error: type[Exception]) -> Callable[[], None]:
    calls = 0

    def block() -> None:
        nonlocal calls
        calls += 1
        if calls % every == 0:
            raise error

    return block


def test_a_block_that_raises_is_counted_and_not_timed() -> None:
    """Otherwise a block that raises at once would look fast."""
    cost = cost_of(_failing(4, BlockingIOError), 100, PACES["back-to-back"])
    assert cost.raised == 25
    assert 0 < cost.median <= cost.p99 <= cost.longest


def test_other_errors_are_not_taken_for_a_cost() -> None:
    """A defect of the benchmark is not counted as an error of a watchdog."""
    with pytest.raises(ZeroDivisionError):
        cost_of(_failing(4, ZeroDivisionError), 100, PACES["back-to-back"])


@pytest.mark.parametrize("pace", ["slept", "computed"])
def test_paced_blocks_begin_no_sooner_than_they_are_due(pace: str) -> None:
    """Paced blocks have the rate of the figures: one per millisecond."""
    began: list[float] = []
    start = time.perf_counter()
    cost_of(lambda: began.append(time.perf_counter()), 20, PACES[pace])
    assert all(moment >= start + (number + 1) * 0.001 for number, moment in enumerate(began))


def test_each_block_is_measured_in_each_pace() -> None:
    """Blocks to compare are measured in one process, in turns."""
    costs = costs_of({"ours": lambda: None, "floor": lambda: None}, BlocksOrder("", 4, 2, ""))
    assert sorted(costs) == sorted(f"{who}.{pace}" for who in ("ours", "floor") for pace in PACES)


def test_each_message_releases_the_timers_of_the_other_one() -> None:
    """Sent alternately, they acquire no timer twice, and only those of the last message remain."""
    both = [pb.SuperviseRequest.FromString(each) for each in messages(RequestsOrder("", 0, 1, 40, 1.0, 1.0))]
    held: set[tuple[str, str]] = set()
    for turn in range(6):
        for action in both[turn % 2].actions:
            if action.HasField("acquire"):
                name = (action.acquire.worker_id, action.acquire.scope)
                assert name not in held
                held.add(name)
            else:
                held.discard((action.release.worker_id, action.release.scope))
        assert len(held) == 20


def test_a_wait_for_a_worker_of_an_ended_agent_fails_with_its_log(tmp_path: Path) -> None:
    """The error has the end of the agent's log, and comes at once, not after the minute for a start."""
    log = tmp_path / "log"
    with running(["sh", "-c", "echo no such option >&2"], log) as process:
        process.wait()
        with pytest.raises(BenchmarkError, match="no such option"):
            reap._seconds_to_death(tmp_path, process, log)


def test_the_death_of_a_worker_is_noticed_and_timed(tmp_path: Path) -> None:
    """The time counts from the deadline that the worker reported."""
    log = tmp_path / "log"
    with running(["sleep", "60"], log) as process:
        due = time.monotonic() + 0.2
        tmp_path.joinpath("1.json").write_text(json.dumps({"pid": process.pid, "due": due}))
        late = reap._seconds_to_death(tmp_path, process, log, kill=True)
        assert 0 <= late <= time.monotonic() - due
        wait_until(lambda: process.poll() is not None, "the end of the process")


@pytest.mark.torch
@pytest.mark.timeout(240)  # torch is imported four times
def test_torch_does_the_work(tmp_path: Path) -> None:
    """The peer is torch itself: its clients guard blocks, and its servers kill a hung worker."""
    pytest.importorskip("torch")
    session = _session(tmp_path, Path(sys.executable))
    for kind in ("file", "queue"):
        costs = expires._torch(session, kind, 20)
        assert sorted(costs) == sorted(
            f"{scope}.{pace}" for scope in ("default", "explicit") for pace in PACES
        )
        (late,) = reap._torch(session, 1, kind=kind)
        assert late > 0
