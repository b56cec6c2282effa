"""The file in which a timer service keeps what its runs have learned, so that it outlives the process.

One JSON document: a line with the format and a checksum of all that follows, then a line for each run. A scope in it
is its name, how many completions were seen, and the longest in seconds. Written whole, to a file beside it that then
takes its place, so there is always one or the other. It may be some seconds behind: counts in it are never too high.
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
from rallypoint.timer.core.core import MAX_AFTER
from rallypoint.timer.core.values import MAX_SCOPE_BYTES, InvalidField, Learned, TooMany, check_name
from rallypoint.timer.server.watchdog import Watchdog

FORMAT = 1

_CHOOSE = "choose another file with --learned, or keep nothing with --learned none"


@dataclass(frozen=True, slots=True)
class LearnedRun:
    """What a run has learned."""

    run_id: str
    scopes: list[Learned]


@dataclass(frozen=True, slots=True)
class _Written:
    """A run as it stands in the file: its scopes as JSON, and when they were last changed, in Unix seconds."""

    scopes: str
    changed_at: float


class LearnedFile:
    """What runs have learned, on disk. Held by one process at a time. Its calls block."""

    def __init__(self, path: Path, wall_clock: Callable[[], float] = time.time) -> None:
        """Touches nothing yet.

        Args:
            path: the file; it and its folder are made where they are missing.
            wall_clock: Unix seconds: how old something is has to outlive the machine's monotonic clock.
        """
        self.path = path
        self._wall_clock = wall_clock
        self._written: dict[str, _Written] = {}
        self._lock = -1

    def open(self, retention: float) -> list[LearnedRun]:
        """Takes the lock and reads; what didn't change for `retention` seconds is left out. Changes nothing.

        Raises:
            SettingError: it is in use, can't be read or written, is damaged, or of a newer version.
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
                f"move it away to learn anew, {_CHOOSE}"
            ) from None
        oldest = self._wall_clock() - retention
        self._written = {run_id: run for run_id, run in self._written.items() if run.changed_at >= oldest}
        return [
            LearnedRun(run_id, list(_scopes(json.loads(run.scopes)))) for run_id, run in self._written.items()
        ]

    def write(self, runs: Iterable[LearnedRun]) -> None:
        """Puts these runs in place of those in the file, to last.

        Raises:
            OSError: it could not; the file is as it was.
        """
        now = self._wall_clock()
        written: dict[str, _Written] = {}
        for run in runs:
            # One run at a time: other threads get their turn between two, however many there are.
            scopes = json.dumps([(each.scope, each.count, each.longest) for each in run.scopes])
            former = self._written.get(run.run_id)
            unchanged = former is not None and former.scopes == scopes
            # A time to come is the word of a clock that was wrong, and would never grow old.
            changed_at = min(now, former.changed_at) if former is not None and unchanged else now
            written[run.run_id] = _Written(scopes, changed_at)
        self._replace(written)
        self._written = written

    def close(self) -> None:
        """Lets the next process have it."""
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
            with beside.open("wb") as file:
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
            f"the file of learned durations {self.path} can't be used ({reason}): mend that, {_CHOOSE}"
        )


class _NewerFormatError(Exception):
    """Written by a version that knows more."""


def _locked(path: Path) -> int:
    """A file of that name, locked while it is open. Never removed: a third process would lock another one."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(file)
        raise
    return file


def _lines(written: dict[str, _Written]) -> Iterator[bytes]:
    """All but the first line. A comma begins the line that follows it, so that none has to know the next."""
    comma = ""
    for run_id, run in written.items():
        name = json.dumps(run_id)
        line = f'{comma}{{"run_id": {name}, "changed_at": {run.changed_at!r}, "scopes": {run.scopes}}}\n'
        yield line.encode()
        comma = ","
    yield b"]}\n"


def _parse(content: bytes) -> dict[str, _Written]:
    """The runs of a file. Raises ValueError, InvalidField, RecursionError or _NewerFormatError."""
    document = json.loads(content)
    match document:
        case {"format": int(version)} if version > FORMAT:
            raise _NewerFormatError(f"format {version}, where this one reads {FORMAT}")
        case {"format": 1, "crc32": str(checksum), "runs": list(runs)}:
            body = content.partition(b"\n")[2]
        case _:
            raise ValueError("it holds something else")
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
            run_id.encode()  # JSON can hold what is no text
            kept = [(each.scope, each.count, each.longest) for each in _scopes(scopes)]
            return run_id, _Written(json.dumps(kept), changed_at)
    raise ValueError("a run in it is none")


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
                raise ValueError("a scope in it is none")


# ---- When what runs have learned is written to its file: soon after it changed, seldom, beside the event loop.


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
        # Not drawn: one process writes one file.
        self._backoff = Backoff(lambda: 1.0, first=2 * interval, longest=_LONGEST_PAUSE)
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
            self._pause = self._backoff.next()
            if not self._failing:
                log.error(
                    "can't keep what was learned; trying on", path=str(self._file.path), reason=str(error)
                )
            self._failing = True
        else:
            self._backoff.reset()
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
