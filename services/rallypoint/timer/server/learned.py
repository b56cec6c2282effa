"""The file of learned durations: it keeps the learned scopes of all runs when the timer service restarts.

One JSON document: a line with the format and a checksum of all that follows, then a line for each run. A scope is its
name, the number of its completions, and the longest in seconds. It is written whole to a temporary file beside it,
which is then renamed, so a complete file always exists. It may be some seconds behind: its counts are never too high.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from rallypoint.rpc.backoff import Backoff
from rallypoint.rpc.endpoint import SettingError
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.runtime_folder import open_private
from rallypoint.timer.core.values import (
    MAX_AFTER,
    MAX_SCOPE_BYTES,
    InvalidField,
    Learned,
    TooMany,
    check_name,
)
from rallypoint.timer.server.watchdog import Watchdog

FORMAT = 1

_CHOOSE = "choose another file with --learned, or keep nothing with --learned none"


@dataclass(frozen=True, slots=True)
class LearnedRun:
    """The learned scopes of a run."""

    run_id: str
    scopes: list[Learned]


@dataclass(frozen=True, slots=True)
class _Written:
    """A run in the file: its scopes as JSON, and when they last changed, in Unix seconds."""

    scopes: str
    changed_at: float


class LearnedFile:
    """The learned scopes of all runs, on disk. Locked by one process at a time. Its calls block."""

    def __init__(self, path: Path, wall_clock: Callable[[], float] = time.time) -> None:
        """Remember the path; the file and its folder are created when needed.

        `wall_clock` is Unix seconds, because the age of data must outlive the machine's monotonic clock.
        """
        self.path = path
        self._wall_clock = wall_clock
        self._written: dict[str, _Written] = {}
        self._lock = -1

    def open(self, retention: float) -> list[LearnedRun]:
        """Take the lock and read; runs unchanged for `retention` seconds are left out. Writes nothing to the file.

        An existing file gets mode 0600, as a new one has.

        Raises:
            SettingError: the file is in use, can't be read or written, is damaged, or of a newer version.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.path.with_name(self.path.name + ".lock"))
        except BlockingIOError:
            raise SettingError(
                f"the file of learned durations {self.path} is in use by another process: stop that one, or {_CHOOSE}"
            ) from None
        except OSError as error:
            raise self._unusable(error) from error
        try:
            self._written = _parse(self.path.read_bytes())
            # Not before it was checked: a file of another program stays as it is.
            os.close(open_private(self.path, os.O_RDONLY))
        except FileNotFoundError:
            self._written = {}
        except OSError as error:
            self.close()
            raise self._unusable(error) from error
        except _NewerFormatError as error:
            self.close()
            raise SettingError(
                f"the file of learned durations {self.path} is of a newer version of Rallypoint ({error}) and was not "
                f"touched: use that version, or {_CHOOSE}"
            ) from None
        except (ValueError, RecursionError, InvalidField) as error:
            self.close()
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise SettingError(
                f"the file of learned durations {self.path} is damaged ({reason}) and was not touched: restore it, "
                f"move it away to start learning from nothing, {_CHOOSE}"
            ) from None
        oldest = self._wall_clock() - retention
        self._written = {run_id: run for run_id, run in self._written.items() if run.changed_at >= oldest}
        return [
            LearnedRun(run_id, list(_scopes(json.loads(run.scopes)))) for run_id, run in self._written.items()
        ]

    def write(self, runs: Iterable[LearnedRun]) -> None:
        """Replace the content of the file by these runs, durably.

        Raises:
            OSError: writing failed; the file is unchanged.
        """
        now = self._wall_clock()
        written: dict[str, _Written] = {}
        for run in runs:
            # One run at a time: other threads can run between two, however many runs there are.
            scopes = json.dumps([(each.scope, each.count, each.longest) for each in run.scopes])
            former = self._written.get(run.run_id)
            unchanged = former is not None and former.scopes == scopes
            # A time in the future came from a wrong clock, and would never grow old.
            changed_at = min(now, former.changed_at) if former is not None and unchanged else now
            written[run.run_id] = _Written(scopes, changed_at)
        self._replace(written)
        self._written = written

    def close(self) -> None:
        """Release the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _replace(self, written: dict[str, _Written]) -> None:
        lines = [*_lines(written)]
        checksum = 0
        for line in lines:
            checksum = crc32(line, checksum)
        head = f'{{"format": {FORMAT}, "crc32": "{checksum:08x}", "runs": [\n'.encode()
        beside = self.path.with_name(self.path.name + ".new")
        try:
            with open(beside, "wb", opener=open_private) as file:
                file.write(head)
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self.path)
        except OSError:
            with suppress(OSError):
                beside.unlink()
            raise
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _unusable(self, error: OSError) -> SettingError:
        reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return SettingError(
            f"the file of learned durations {self.path} can't be used ({reason}): fix that, {_CHOOSE}"
        )


class _NewerFormatError(Exception):
    """The file was written by a newer version."""


def _locked(path: Path) -> int:
    """Open and lock a file of that name; return its descriptor.

    The file is never removed: a third process could then create and lock another one of that name.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(file)
        raise
    return file


def _lines(written: dict[str, _Written]) -> Iterator[bytes]:
    """Yield all lines but the first. A comma begins each following run, so that no run depends on the next."""
    comma = ""
    for run_id, run in written.items():
        name = json.dumps(run_id)
        line = f'{comma}{{"run_id": {name}, "changed_at": {run.changed_at!r}, "scopes": {run.scopes}}}\n'
        yield line.encode()
        comma = ","
    yield b"]}\n"


def _parse(content: bytes) -> dict[str, _Written]:
    """Return the runs of a file. Raises ValueError, InvalidField, RecursionError or _NewerFormatError."""
    document = json.loads(content)
    match document:
        case {"format": int(version)} if version > FORMAT:
            raise _NewerFormatError(f"it has format {version}, this version reads {FORMAT}")
        case {"format": 1, "crc32": str(checksum), "runs": list(runs)}:
            body = content.partition(b"\n")[2]
        case _:
            raise ValueError("it is not a file of learned durations")
    if f"{crc32(body):08x}" != checksum:
        raise ValueError("its checksum does not match")
    return dict(map(_run, runs))


def _run(entry: object) -> tuple[str, _Written]:
    match entry:
        case {
            "run_id": str(run_id),
            "changed_at": float(changed_at) | int(changed_at),
            "scopes": list(scopes),
        }:
            check_name("run_id", run_id)
            run_id.encode()  # JSON can hold strings that are not valid Unicode
            kept = [(each.scope, each.count, each.longest) for each in _scopes(scopes)]
            return run_id, _Written(json.dumps(kept), changed_at)
    raise ValueError("the entry of a run is malformed")


def _scopes(entries: Iterable[object]) -> Iterator[Learned]:
    for entry in entries:
        match entry:
            case [str(scope), int(count), float(longest) | int(longest)] if (
                1 <= count < 2**63 and 0 <= longest <= MAX_AFTER
            ):
                check_name("scope", scope, MAX_SCOPE_BYTES)
                scope.encode()
                yield Learned(scope, count, float(longest))
            case _:
                raise ValueError("the entry of a scope is malformed")


# ---- Writes the file soon after a change, but seldom, and outside the event loop.


log = get_logger(__name__)

# Seconds from a change to its writing; a process that dies in between loses the change.
_INTERVAL = 5.0
# The pause after a write, as a multiple of its duration: a large file on a slow disk takes at most 1/20 of the time.
_PAUSE_PER_WRITE = 20.0
# The longest pause between two attempts after a failed write, in seconds.
_LONGEST_PAUSE = 60.0
# Scopes collected in one step: some 2 ms, then the event loop runs.
_MOST_AT_ONCE = 2000


@asynccontextmanager
async def keep_learned(
    watchdog: Watchdog, file: LearnedFile, interval: float = _INTERVAL
) -> AsyncIterator[None]:
    """Restore the content of the file, and keep the file up to date for the duration of the context.

    Args:
        watchdog: a new one, without timers and scopes.
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
    """Writes the file when it is notified of a change."""

    def __init__(self, watchdog: Watchdog, file: LearnedFile, interval: float = _INTERVAL) -> None:
        self._table = watchdog.table
        self._file = file
        self._interval = self._pause = interval
        # Not drawn: one process writes one file.
        self._backoff = Backoff(lambda: 1.0, first=2 * interval, longest=_LONGEST_PAUSE)
        self._stale = self._ending = self._failing = False
        self._awake = asyncio.Event()
        self._hurry = asyncio.Event()

    def changed(self, at_once: bool) -> None:
        """Note a change. `at_once`: write it soon, for example a forgotten scope, which must not come back."""
        self._stale = True
        self._awake.set()
        if at_once:
            self._hurry.set()

    def end(self) -> None:
        """Make `keep` write the last changes and return."""
        self._ending = True
        self._awake.set()
        self._hurry.set()

    async def keep(self) -> None:
        """Write after each change, until `end`."""
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
            # No error of this file may stop the timers. The file is unchanged.
            self._stale = True
            self._awake.set()
            self._pause = self._backoff.next()
            if not self._failing:
                log.error(
                    "can't write the file of learned durations; will retry",
                    path=str(self._file.path),
                    reason=str(error),
                )
            self._failing = True
        else:
            self._backoff.reset()
            self._pause = max(self._interval, _PAUSE_PER_WRITE * (clock() - began))
            if self._failing:
                log.info("the file of learned durations is written again", path=str(self._file.path))
            self._failing = False

    async def _collect(self) -> deque[LearnedRun]:
        """Return all learned scopes. A change during the collection marks the file stale, so it is written again."""
        runs: deque[LearnedRun] = deque()
        for number, (run_id, learned) in enumerate(self._table.all_learned(), start=1):
            if not runs or runs[-1].run_id != run_id:
                runs.append(LearnedRun(run_id, []))
            runs[-1].scopes.append(learned)
            if number % _MOST_AT_ONCE == 0:
                await asyncio.sleep(0)
        return runs


def _let_go(runs: deque[LearnedRun]) -> Iterator[LearnedRun]:
    """Yield each run and drop it. To free a million objects at once would block every thread."""
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
        log.info("learned durations restored", runs=len(runs), scopes=scopes)
    if lost:
        log.warning("some learned durations exceed the limits and were dropped", scopes=lost)
