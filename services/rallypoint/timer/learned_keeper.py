"""When what runs have learned is written to its file: soon after it changed, seldom, beside the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

from rallypoint.rpc.logs import get_logger
from rallypoint.timer.learned_file import LearnedFile, LearnedRun
from rallypoint.timer.refusals import TooMany
from rallypoint.timer.watchdog import Watchdog

log = get_logger(__name__)

# Seconds from a change to its writing; what is learned meanwhile is written with it, and lost if the process dies.
_INTERVAL = 5.0
# A large file on a slow disk takes no more than a twentieth of the time.
_PAUSE_PER_WRITE = 20.0
# The longest between two attempts to write what could not be written, in seconds.
_LONGEST_PAUSE = 60.0
# Scopes collected in one go: some 2 ms, after which the event loop has its turn.
_MOST_AT_ONCE = 2000


@asynccontextmanager
async def keep_learned(
    watchdog: Watchdog, file: LearnedFile, interval: float = _INTERVAL
) -> AsyncIterator[None]:
    """Restores what the file holds, and keeps it up to date for as long as the context lasts.

    Args:
        watchdog: knows nothing yet.
        file: not opened yet; closed at the end.
        interval: seconds from a change to its writing.

    Raises:
        SettingError: the file can't be used.
    """
    runs = await asyncio.to_thread(file.open, watchdog.table.settings.learned_retention)
    try:
        _restore(watchdog, runs)
        keeper = LearnedKeeper(watchdog, file, interval)
        watchdog.on_learned = keeper.changed
        keeping = asyncio.create_task(keeper.keep())
        try:
            yield
        finally:
            watchdog.on_learned = None
            keeper.end()
            await asyncio.wait({keeping})
    finally:
        file.close()


class LearnedKeeper:
    """Writes a file when it is told that something has changed."""

    def __init__(self, watchdog: Watchdog, file: LearnedFile, interval: float = _INTERVAL) -> None:
        self._table = watchdog.table
        self._file = file
        self._interval = self._pause = interval
        self._stale = self._ending = self._failing = False
        self._awake = asyncio.Event()
        self._hurry = asyncio.Event()

    def changed(self, at_once: bool) -> None:
        """A run has learned something. `at_once`: write it soon; it was forgotten, say, and must not come back."""
        self._stale = True
        self._awake.set()
        if at_once:
            self._hurry.set()

    def end(self) -> None:
        """Has `keep` write what is not written yet, and return."""
        self._ending = True
        self._awake.set()
        self._hurry.set()

    async def keep(self) -> None:
        """Writes whenever there is something to write, until `end`."""
        while not self._ending:
            await self._awake.wait()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), self._pause)
            self._awake.clear()
            self._hurry.clear()
            if self._stale:
                self._stale = False
                await self._write()
        if self._stale and not self._failing:
            await self._write()

    async def _write(self) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            await asyncio.to_thread(self._file.write, _let_go(await self._collect()))
        except Exception as error:
            # Whatever it is, timers must go on. The file is as it was.
            self._stale = True
            self._awake.set()
            self._pause = min(max(self._pause * 2, self._interval), _LONGEST_PAUSE)
            if not self._failing:
                log.error(
                    "can't keep what was learned; trying on", path=str(self._file.path), reason=str(error)
                )
            self._failing = True
        else:
            self._pause = max(self._interval, _PAUSE_PER_WRITE * (clock() - began))
            if self._failing:
                log.info("what was learned is kept again", path=str(self._file.path))
            self._failing = False

    async def _collect(self) -> deque[LearnedRun]:
        """All that was learned. What changes while it is collected is changed again, and written after this."""
        runs: deque[LearnedRun] = deque()
        for number, (run_id, learned) in enumerate(self._table.all_learned(), start=1):
            if not runs or runs[-1].run_id != run_id:
                runs.append(LearnedRun(run_id, []))
            runs[-1].scopes.append(learned)
            if number % _MOST_AT_ONCE == 0:
                await asyncio.sleep(0)
        return runs


def _let_go(runs: deque[LearnedRun]) -> Iterator[LearnedRun]:
    """Each in turn. To free a million objects at once would hold up every thread."""
    while runs:
        yield runs.popleft()


def _restore(watchdog: Watchdog, runs: list[LearnedRun]) -> None:
    scopes = lost = 0
    for run in runs:
        for learned in run.scopes:
            try:
                watchdog.table.restore(run.run_id, learned, watchdog.now())
                scopes += 1
            except TooMany:
                lost += 1
    if scopes or lost:
        log.info("what was learned before is known again", runs=len(runs), scopes=scopes)
    if lost:
        log.warning("not all that was learned fits the limits; the rest is forgotten", scopes=lost)
