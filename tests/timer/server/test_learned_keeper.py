"""Learned data is written soon, seldom and outside the event loop, and read at the next start."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest

from rallypoint.rpc.endpoint import SettingError
from rallypoint.timer.core.values import Learned, TimerSettings
from rallypoint.timer.server.learned import LearnedFile, LearnedKeeper, LearnedRun, keep_learned
from rallypoint.timer.server.watchdog import Watchdog
from support.waiting import until

SOON = 0.01


class File(LearnedFile):
    """A file on a disk that can be slow or broken; it counts writes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.written: list[dict[str, int]] = []
        self.threads: set[int] = set()
        self.attempts = 0
        self.broken = False
        self.let_go = threading.Event()
        self.let_go.set()

    def write(self, runs: Iterable[LearnedRun]) -> None:
        self.attempts += 1
        self.threads.add(threading.get_ident())
        assert self.let_go.wait(30)
        if self.broken:
            raise OSError(28, "No space left on device")
        runs = list(runs)
        super().write(runs)
        self.written.append({f"{run.run_id}/{each.scope}": each.count for run in runs for each in run.scopes})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "learned.json"


def observe(watchdog: Watchdog, scope: str, count: int, run_id: str = "run") -> None:
    subscription, _ = watchdog.subscribe(run_id, "a", 0)
    watchdog.observe(subscription, scope, count, 1.5)


async def test_the_next_service_restores_learned_data(path: Path) -> None:
    """All runs are restored; counts are neither lost nor added up over any number of restarts."""
    for _ in range(3):
        watchdog = Watchdog()
        async with keep_learned(watchdog, LearnedFile(path)):
            if not watchdog.table.learned_of("run"):
                observe(watchdog, "step", 100)
                observe(watchdog, "load", 7, run_id="other")
            assert watchdog.table.learned_of("run") == [Learned("step", 100, 1.5)]
            assert watchdog.table.learned_of("other") == [Learned("load", 7, 1.5)]
            # This causes a write each time.
            assert watchdog.on_learned is not None
            watchdog.on_learned(False)


async def test_many_observations_make_one_write(path: Path) -> None:
    """A thousand observations make one write, in another thread than the event loop's."""
    file, watchdog = File(path), Watchdog()
    async with keep_learned(watchdog, file, SOON * 10):
        subscription, _ = watchdog.subscribe("run", "a", 0)
        for _ in range(1000):
            watchdog.observe(subscription, "step", 1, 1.5)
        await until(lambda: bool(file.written))
    assert file.written == [{"run/step": 1000}]
    assert threading.get_ident() not in file.threads


async def test_nothing_learned_writes_nothing(path: Path) -> None:
    """There is no write during service, nor at the end."""
    file = File(path)
    async with keep_learned(Watchdog(), file, SOON):
        pass
    assert file.attempts == 0


async def test_the_end_writes_unwritten_data(path: Path) -> None:
    """It does not wait for the interval; data learned during the last write is written too."""
    file, watchdog = File(path), Watchdog()
    async with keep_learned(watchdog, file, interval=3600):
        observe(watchdog, "step", 5)
    assert file.written == [{"run/step": 5}]
    watchdog, file = Watchdog(), File(path)
    async with keep_learned(watchdog, file, SOON):
        file.let_go.clear()
        observe(watchdog, "step", 6)
        await until(lambda: file.attempts == 1)
        observe(watchdog, "step", 7)
        file.let_go.set()
    assert file.written[-1] == {"run/step": 18}


async def test_forgetting_is_written_at_once(path: Path) -> None:
    """It does not wait for the interval: a crash must not bring the data back."""
    file, watchdog = File(path), Watchdog()
    async with keep_learned(watchdog, file, interval=3600):
        observe(watchdog, "step", 5)
        observe(watchdog, "load", 5)
        watchdog.forget_scopes("run", "step")
        await until(lambda: bool(file.written))
        assert file.written == [{"run/load": 5}]


async def test_a_slow_disk_does_not_block_the_watchdog(path: Path) -> None:
    """While a write waits, the event loop and the watchdog go on; data learned then is written next."""
    file, watchdog = File(path), Watchdog()
    async with keep_learned(watchdog, file, SOON):
        file.let_go.clear()
        observe(watchdog, "step", 1)
        await until(lambda: file.attempts == 1)
        observe(watchdog, "step", 1)
        assert watchdog.table.learned_of("run") == [Learned("step", 2, 1.5)]
        file.let_go.set()
        await until(lambda: file.written[-1:] == [{"run/step": 2}])


async def test_a_broken_disk_is_logged_once_and_tried_again(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The service goes on; after the repair all data is written."""
    caplog.set_level("INFO")
    file, watchdog = File(path), Watchdog()
    async with keep_learned(watchdog, file, SOON):
        file.broken = True
        observe(watchdog, "step", 9)
        await until(lambda: file.attempts >= 3)
        assert caplog.text.count("can't write the file of learned durations") == 1
        assert "No space left on device" in caplog.text
        file.broken = False
        await until(lambda: file.written == [{"run/step": 9}])
    assert "the file of learned durations is written again" in caplog.text


async def test_a_disk_that_is_broken_at_the_end_lets_the_service_end(path: Path) -> None:
    """The file is unchanged and free for the next service."""
    file, watchdog = File(path), Watchdog()
    async with keep_learned(watchdog, file, SOON):
        file.broken = True
        observe(watchdog, "step", 9)
        await until(lambda: file.attempts >= 1)
    async with keep_learned(Watchdog(), LearnedFile(path), SOON):
        pass


async def test_much_is_collected_in_portions(path: Path) -> None:
    """The event loop runs every few milliseconds, however much was learned."""
    watchdog = Watchdog(TimerSettings(max_scopes_per_run=100_000))
    subscription, _ = watchdog.subscribe("run", "a", 0)
    for number in range(20_000):
        watchdog.observe(subscription, f"s{number}", 1, 1.0)
    collecting = asyncio.create_task(LearnedKeeper(watchdog, LearnedFile(path))._collect())
    turns = 0
    while not collecting.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 10
    (run,) = collecting.result()
    assert len(run.scopes) == 20_000


async def test_more_than_the_limits_allow_is_not_restored(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After the limits were lowered, the service starts and logs it."""
    watchdog = Watchdog()
    async with keep_learned(watchdog, LearnedFile(path)):
        for number in range(5):
            observe(watchdog, f"s{number}", 1)
    small = Watchdog(TimerSettings(max_scopes_per_run=2))
    async with keep_learned(small, LearnedFile(path)):
        assert len(small.table.learned_of("run")) == 2
    assert "some learned durations exceed the limits and were dropped scopes=3" in caplog.text


def test_a_damaged_file_keeps_it_from_starting(path: Path) -> None:
    """The file is kept, and its lock is released, so a repaired file can be opened."""

    async def start() -> None:
        async with keep_learned(Watchdog(), LearnedFile(path)):
            pass

    path.write_text("no JSON")
    for _ in range(2):
        with pytest.raises(SettingError, match="is damaged"):
            asyncio.run(start())
    assert path.read_text() == "no JSON"
    path.unlink()
    asyncio.run(start())
