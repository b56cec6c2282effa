"""After any fault of disk or process a journal holds everything acknowledged, or reports that it does not.

The product's file code is on a disk that forgets, tears, lies, fills up and fails (`faulty_disk`). Each history comes
from a seed: calls that continue a model, faults in the middle of them, and restarts in between. A failure names its
seed; RALLYPOINT_JOURNAL_HISTORIES plays more of them.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rallypoint.rendezvous.journal import sqlite
from rallypoint.rendezvous.journal.journal import JournalError
from rallypoint.rendezvous.journal.sqlite import JournalFile, LockFile
from rendezvous.journal.faulty_disk import FaultyDisk, sqlite_library, under_sqlite
from rendezvous.journal.model import Model, plain, random_call
from support.replacing import instead_of

HISTORIES, BLOCKS = int(os.environ.get("RALLYPOINT_JOURNAL_HISTORIES", "60")), 3
STEPS = 12

pytestmark = pytest.mark.skipif(sqlite_library() is None, reason="SQLite is part of this interpreter")


class History:
    """One seed."""

    def __init__(self, seed: int, path: Path) -> None:
        self.chance = random.Random(f"{seed}/journal")
        self.disk = FaultyDisk(self.chance)
        self.path = path
        # The expected contents after each call; the index of the last acknowledged call.
        self.states = [Model()]
        self.acknowledged = 0
        # The written lock files, oldest first: after loss of power, an older one may be there.
        self.locks: list[bytes] = [b""]
        self.lies = False
        self.file = JournalFile(path)

    def play(self) -> None:
        self._open()
        for _ in range(STEPS):
            self._step()
        self._end(cut=self.chance.random() < 0.5)
        self._open()
        self.file.close()

    def _step(self) -> None:
        chance, disk = self.chance, self.disk
        if chance.random() < 0.4:
            disk.arm(chance.randrange(12), chance.choice(["kill", "full", "sync"]))
        if chance.random() < 0.05:
            disk.lying = self.lies = True
        calls = [random_call(chance, self.states[-1])]
        self.states.append(self.states[-1].after(calls[0]))
        try:
            self.file.commit(calls)
            if disk.dead:
                raise JournalError("the process was killed before it could say so")
            self.acknowledged = len(self.states) - 1
            # A lying disk may damage the file itself, page by page, and that can't be distinguished from intended data.
            if chance.random() < 0.3 and not disk.lying:
                self.file.shorten_log()
        except JournalError:
            self._end(cut=chance.random() < 0.5)
            self._open()
        else:
            self._note_lock()
            if chance.random() < 0.2:
                self._end(cut=chance.random() < 0.5, orderly=chance.random() < 0.5 and not disk.lying)
                self._open()

    def _note_lock(self) -> None:
        self.locks.append(self._lock.read_bytes())

    @property
    def _lock(self) -> Path:
        return self.path.with_name(f"{self.path.name}.lock")

    def _end(self, *, cut: bool, orderly: bool = False) -> None:
        """End the process, and perhaps the machine."""
        disk = self.disk
        disk.dead = disk.dead or not orderly
        self.file.close()
        if cut:
            disk.cut_power()
            self._lock.write_bytes(self.chance.choice(self.locks[-2:]))
        disk.mend()

    def _open(self) -> None:
        """Start the next process; it must find one of the possible states."""
        while True:
            self.file = JournalFile(self.path)
            if self.chance.random() < 0.1:
                self.disk.arm(self.chance.randrange(10), self.chance.choice(["kill", "full"]))
            try:
                found = plain(self.file.open())
            except JournalError as error:
                if "lost commits that were acknowledged" in str(error):
                    if not self.lies:
                        raise AssertionError("only a disk that lies loses commits") from error
                    self._accept_contents()
                    continue
                if not self.disk.struck:
                    raise AssertionError(f"a journal that is whole opens: {error}") from error
                self._end(cut=self.chance.random() < 0.5)
                continue
            if self.disk.dead:
                self._end(cut=False)
                continue
            break
        self.disk.mend()
        least = 0 if self.lies else self.acknowledged
        fitting = [at for at in range(least, len(self.states)) if self.states[at].recovered() == found]
        assert fitting, "a journal holds what was acknowledged, each call whole"
        del self.states[: fitting[-1]]
        del self.states[1:]
        self.acknowledged = 0
        if self.lies:
            self.locks.clear()  # those count commits that are gone
        self.lies = False
        self._note_lock()

    def _accept_contents(self) -> None:
        """Follow the message: continue with the present contents."""
        self._lock.unlink()
        self.locks = [b""]


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(block, HISTORIES, BLOCKS), marks=[pytest.mark.slow] if block else [])
        for block in range(BLOCKS)
    ],
    ids=str,
)
def test_a_journal_holds_all_acknowledged_calls(seeds: range, tmp_path: Path) -> None:
    """After kill, power loss, torn writes, a full, lying or failing disk: acknowledged calls are there, each whole."""
    play(seeds, tmp_path)


def play(seeds: range, folder: Path) -> None:
    """Play seeds until one fails."""
    for seed in seeds:
        history = History(seed, folder / f"{seed}" / "rendezvous.db")
        with under_sqlite(history.disk, folder):
            try:
                history.play()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error
            finally:
                history.disk.dead = True
                history.file.close()


def believe_the_log_without_sync(patch: pytest.MonkeyPatch) -> None:
    """Commits don't wait for the disk."""

    @instead_of(patch, JournalFile, "_connect")
    def hasty(connect: Any, self: JournalFile, version: int | None) -> object:
        connection = connect(self, version)
        connection.execute("PRAGMA synchronous = OFF")
        return connection


def sync_now_and_then(patch: pytest.MonkeyPatch) -> None:
    """Commits wait for the disk only when the log is carried over."""

    @instead_of(patch, JournalFile, "_connect")
    def hasty(connect: Any, self: JournalFile, version: int | None) -> object:
        connection = connect(self, version)
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection


def acknowledge_failed_commits(patch: pytest.MonkeyPatch) -> None:
    """A failed commit counts as made."""

    @instead_of(patch, JournalFile, "commit")
    def calm(commit: Any, self: JournalFile, calls: object) -> None:
        with contextlib.suppress(JournalError):
            commit(self, calls)


def commit_entry_by_entry(patch: pytest.MonkeyPatch) -> None:
    """The entries of a call become durable one after the other."""

    @instead_of(patch, JournalFile, "commit")
    def piecemeal(commit: Any, self: JournalFile, calls: list[list[object]]) -> None:
        for entries in calls:
            for entry in entries:
                commit(self, [[entry]])


def believe_unsynced_contents(patch: pytest.MonkeyPatch) -> None:
    """Contents found at the start are used, although their sync may have failed or never come."""
    patch.setattr(sqlite, "write_again", lambda path: None)


def count_commits_before_they_are_made(patch: pytest.MonkeyPatch) -> None:
    """The lock file counts a commit that may never be made."""
    write = LockFile.write
    patch.setattr(LockFile, "write", lambda self, number: write(self, number + 1))


Plant = Callable[[pytest.MonkeyPatch], None]
PLANTS: tuple[Plant, ...] = (
    believe_the_log_without_sync,
    sync_now_and_then,
    acknowledge_failed_commits,
    commit_entry_by_entry,
    believe_unsynced_contents,
    count_commits_before_they_are_made,
)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bug that is planted in the file code is found by a few hundred seeds."""
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"seed \d+: "):
        play(range(2000), tmp_path)
