"""Temporary folders with the logs of jobs that ended days ago are removed; other folders stay."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

import pytest

from cli.cli_process import rallypoint
from rallypoint.agent.logs.plan import LogDirectory, remove_old
from support.waiting import wait_until

DAYS = 86_400.0


def age(folder: Path, days: float) -> None:
    """Set the time of the last change of everything in a folder."""
    then = time.time() - days * DAYS
    for path in sorted(folder.rglob("*"), reverse=True):
        os.utime(path, (then, then), follow_symlinks=False)
    os.utime(folder, (then, then))


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def a_job(days: float, *, runs: bool = False) -> Path:
    """Make a folder with the logs of a job that ended, or began, `days` ago."""
    logs = LogDirectory.create(None, "run")
    for thread in threading.enumerate():  # the start of a job starts this thread
        if thread.name == "old-logs":
            thread.join()
    logs.new_attempt(range(2)).workers[0].stdout.write_text("a line")
    if not runs:
        logs.close()
    age(logs.path.parent, days)
    return logs.path.parent


def test_an_old_folder_is_removed(temporary: Path) -> None:
    """It is removed with all its content; one of six days stays."""
    young, old = a_job(6), a_job(8)
    (old / "notes.txt").write_text("beside the folder of the run")
    age(old, 8)
    remove_old(temporary)
    assert not old.exists()
    assert len(list(young.rglob("stdout.log"))) == 2


def test_a_change_of_one_file_keeps_the_folder(temporary: Path) -> None:
    """The folders themselves do not change while workers write."""
    folder = a_job(8)
    (log,) = folder.glob("*/attempt_0/1/stderr.log")
    os.utime(log)
    remove_old(temporary)
    assert log.exists()


def test_the_time_counts_from_the_end_of_the_job(temporary: Path) -> None:
    """A job may have written nothing for days."""
    logs = LogDirectory.create(None, "run")
    age(logs.path.parent, 8)
    logs.close()
    remove_old(temporary)
    assert logs.path.exists()


def test_the_folder_of_a_running_job_stays(temporary: Path) -> None:
    """The age of its files does not matter."""
    folder = a_job(30, runs=True)
    remove_old(temporary)
    assert folder.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to others")
def test_the_folder_of_another_user_stays(temporary: Path) -> None:
    """This holds for root too."""
    folder = a_job(8)
    os.chown(folder, 65_534, 65_534)
    age(folder, 8)
    remove_old(temporary)
    assert len(list(folder.rglob("stdout.log"))) == 2


def test_links_are_not_followed(temporary: Path, tmp_path: Path) -> None:
    """A link may be in the place of a folder, inside a folder, or in the place of the lock file."""
    elsewhere = a_job(8).rename(tmp_path / "elsewhere")
    (temporary / "rallypoint_aaaaaaaa").symlink_to(elsewhere)
    inside, locked = a_job(0), a_job(0)  # aged below: the start of the second would remove the first
    (next(inside.glob("run_*")) / "link").symlink_to(elsewhere)
    (locked / ".job.lock").rename(tmp_path / "lock")
    (locked / ".job.lock").symlink_to(tmp_path / "lock")
    age(inside, 8)
    age(locked, 8)
    remove_old(temporary)
    assert not inside.exists()
    assert locked.exists()
    assert len(list(elsewhere.rglob("stdout.log"))) == 2


def test_a_folder_that_no_job_has_made_stays(temporary: Path) -> None:
    """Its name does not matter; it may be one for --log-dir."""
    own = temporary / "rallypoint_training"
    own.mkdir()
    LogDirectory.create(own, "run").close()
    age(own, 30)
    remove_old(temporary)
    assert list(own.iterdir())


def test_only_so_many_are_removed_at_once(temporary: Path) -> None:
    """The others are removed by the next job."""
    for folder in [a_job(0) for _ in range(5)]:  # aged below: each start would remove those before it
        age(folder, 8)
    remove_old(temporary, most=3)
    assert len(list(temporary.iterdir())) == 2


def test_there_are_only_so_many(temporary: Path) -> None:
    """The oldest are removed, even if they are young; those of running jobs stay."""
    running = a_job(0.4, runs=True)
    first, second, third = (a_job(days) for days in (0.3, 0.2, 0.1))
    remove_old(temporary, most_kept=2)
    assert [folder.exists() for folder in (running, first, second, third)] == [True, False, True, True]


def test_a_job_removes_folders_of_earlier_jobs(temporary: Path) -> None:
    """It leaves its own folder, which the next job can remove."""
    old = a_job(8)
    # A thread removes the folder, and the job may end before it does.
    command = ("run", "--standalone", "--no-python", "sleep", "1")

    def removed() -> bool:
        result = rallypoint(*command, environment={"TMPDIR": str(temporary)})
        assert result.returncode == 0, result.stderr
        return not old.exists()

    wait_until(removed, "a job removes the folder")
    own = [path for path in temporary.glob("rallypoint_????????") if list(path.glob("standalone-*"))]
    assert own
    for folder in own:
        age(folder, 8)
    remove_old(temporary)
    assert not any(folder.exists() for folder in own)
