"""A SQLite journal is held by one process, and notices commits that its log has lost."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
from pathlib import Path
from typing import Any

import pytest

from rallypoint.rendezvous.journal.journal import JournalError
from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rendezvous.journal.entries import record
from rendezvous.journal.files import append, child, fill, killed, recover, refused, reopen
from support.marks import slow
from support.replacing import instead_of
from support.waiting import PATIENCE


def test_a_second_process_is_locked_out(path: Path) -> None:
    """It gets an error in one line; once the first is dead, however it died, the next one can open it."""
    script = """
        async def main():
            journal = SqliteJournal(path)
            await journal.open()
            await journal.append([record(1)])
            print("open", flush=True)
            sys.stdin.readline()
        asyncio.run(main())
    """
    holder = child(script, path)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "open\n"
    with pytest.raises(JournalError, match=r"in use by another process.*--journal"):
        recover(path)
    holder.send_signal(signal.SIGKILL)
    holder.communicate(timeout=PATIENCE)
    assert len(recover(path).records) == 1


async def test_the_lock_keeps_out_a_second_journal_of_the_same_process(
    journal: SqliteJournal, path: Path
) -> None:
    """And the refusal does not take the lock from its holder."""
    for _ in range(2):
        with pytest.raises(JournalError, match="in use"):
            await reopen(path)
    await journal.append([record(1)])


def test_an_impossible_path_is_refused_in_one_line(tmp_path: Path) -> None:
    """A folder that is a file, a file that is a folder."""
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "file" / "rendezvous.db", tmp_path / "folder"):
        with pytest.raises(JournalError) as refusal:
            recover(place)
        assert str(refusal.value).startswith(f"can't open the journal {place}: ")
        assert "\n" not in str(refusal.value)


async def test_only_its_user_can_read_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same holds for its log, from before SQLite opens it; wider modes are narrowed."""
    private = {path.name + end: 0o600 for end in ("", "-wal", ".lock")}
    found: list[int] = []

    def modes() -> dict[str, int]:
        return {each.name: stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()}

    @instead_of(monkeypatch, sqlite3, "connect")
    def look(connect: Any, *given: Any, **more: Any) -> Any:
        found.append(modes()[path.name])
        return connect(*given, **more)

    umask = os.umask(0)
    try:
        for _ in range(2):
            journal = SqliteJournal(path)
            await journal.open()
            assert modes() == private
            await journal.close()
            path.with_name(path.name + ".lock").unlink()
            killed(CRASHED, path.with_name("crashed.db"))
            for end in ("", "-wal"):
                left = path.with_name("crashed.db" + end).replace(path.with_name(path.name + end))
                left.chmod(0o644)
            path.with_name("crashed.db.lock").unlink()
    finally:
        os.umask(umask)
    assert found[0] == found[-1] == 0o600


# ---- a log that lost something


CRASHED = """
    async def main():
        journal = SqliteJournal(path)
        await journal.open()
        for revision in range(1, 11):
            await journal.append([record(revision)])
        os.kill(os.getpid(), signal.SIGKILL)
    asyncio.run(main())
"""


@pytest.fixture
def crashed(path: Path) -> Path:
    """A journal all of which is still in its log."""
    killed(CRASHED, path)
    return path


@pytest.mark.parametrize("damage", ["removed", "cut", "flipped", "emptied"])
def test_a_log_that_lost_acknowledged_commits_is_noticed(crashed: Path, damage: str) -> None:
    """To SQLite alone the log just ends there."""
    log = crashed.with_name(crashed.name + "-wal")
    whole = log.read_bytes()
    if damage == "removed":
        log.unlink()
    elif damage == "emptied":
        log.write_bytes(b"")
    elif damage == "cut":
        log.write_bytes(whole[:-4096])
    else:
        log.write_bytes(whole.replace(b"fact 7\0", b"fact 8\0"))
    message = refused(crashed)
    assert "has lost commits that were acknowledged" in message
    assert "rendezvous.db.lock counts 10" in message
    log.write_bytes(whole)
    assert len(recover(crashed).records) == 10


def test_without_its_lock_file_a_journal_opens_with_the_remaining_records(crashed: Path) -> None:
    """After the lock file is removed, as the message advises; from then on commits are counted again."""
    log = crashed.with_name(crashed.name + "-wal")
    log.write_bytes(log.read_bytes().replace(b"fact 7\0", b"fact 8\0"))
    refused(crashed)
    crashed.with_name(crashed.name + ".lock").unlink()
    assert len(recover(crashed).records) == 6
    assert len(recover(crashed).records) == 6


def test_a_journal_that_was_moved_away_is_not_missed(crashed: Path) -> None:
    """The message advises to move a damaged one away; the service must then start without it."""
    for each in crashed.parent.glob("rendezvous.db*"):
        if not each.name.endswith(".lock"):
            each.rename(each.with_name(f"old-{each.name}"))
    assert list(recover(crashed).records) == []
    fill(crashed)
    assert len(recover(crashed).records) == 100


async def test_a_count_that_lags_behind_is_no_damage(path: Path) -> None:
    """After loss of power the lock file may be older than the journal."""
    lock = path.with_name(path.name + ".lock")
    await append(path, [record(1)], [record(2)])
    older = lock.read_bytes()
    await append(path, [record(3)], [record(4)])
    assert lock.read_bytes() != older
    lock.write_bytes(older)
    assert len((await reopen(path)).records) == 4


# ---- a log that grows


@pytest.mark.parametrize(("runs", "commits", "bound"), [slow(1, 1500, 18 << 20), (100, 200, 24 << 20)])
async def test_the_log_is_bounded(path: Path, runs: int, commits: int, bound: int) -> None:
    """Also if many commits change one page each, or a few of them many."""
    journal = SqliteJournal(path)
    await journal.open()
    log = path.with_name(path.name + "-wal")
    longest = 0
    for revision in range(1, commits + 1):
        await journal.append([record(revision, f"run{run}", 500) for run in range(runs)])
        longest = max(longest, (await journal._in_writer(log.stat)).st_size)
    await journal.close()
    assert longest < bound
    assert not path.with_name(path.name + "-wal").exists()
