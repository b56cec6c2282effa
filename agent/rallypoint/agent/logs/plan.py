"""The log directory: paths of the workers' output, and the streams that the console shows.

    <log_dir>/<run_id>_<random>/attempt_<n>/<local_rank>/{stdout.log,stderr.log,error.json,hang.txt}
                                           /ranks/<global rank> -> ../<local_rank>
                                           /{filtered_stdout.log,filtered_stderr.log}

The layout is torchrun's, except hang.txt and the links; `n` counts the starts of the group on this host, so no attempt
overwrites another. In a log directory shared by all hosts, find a global rank with
`ls <log_dir>/<run_id>_*/attempt_*/ranks/7/`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rallypoint.agent.logs.streams import LogError, Streams

STDOUT_FILE = "stdout.log"
STDERR_FILE = "stderr.log"
ERROR_FILE = "error.json"
HANG_FILE = "hang.txt"
FILTERED_STDOUT_FILE = "filtered_stdout.log"
FILTERED_STDERR_FILE = "filtered_stderr.log"
RANKS_FOLDER = "ranks"

_LONGEST_RUN_ID = 64  # characters of it in a directory name, which may have 255 bytes
_PROBE, _BLOCK = ".probe", 4096  # file name, bytes
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")

# A folder among the temporary files: its name, and the file in it that the agent of its job holds locked.
_TEMPORARY = "rallypoint_"
_TEMPORARY_NAME = re.compile(_TEMPORARY + r"[a-z0-9_]{8}")
_LOCK = ".job.lock"
_KEPT = 7 * 86_400.0  # seconds after the last change of a file
_MOST_KEPT = 500  # of this user; beyond that, the oldest go sooner
_MOST_REMOVED = 32  # at the start of one job


@dataclass(frozen=True, slots=True)
class WorkerLogs:
    """The files of one worker in one attempt.

    Attributes:
        stdout: exists, empty, before the worker starts. May be rotated: rallypoint.agent.logs.files reads it whole.
        stderr: the same for standard error; the same file, if both are one terminal.
        error_file: written by the worker if it raises (TORCHELASTIC_ERROR_FILE).
    """

    stdout: Path
    stderr: Path
    error_file: Path

    @property
    def hang_file(self) -> Path:
        """Diagnostics of the worker; the agent writes them if one of its timers expires."""
        return self.stderr.with_name(HANG_FILE)


@dataclass(frozen=True, slots=True)
class ConsoleCopy:
    """One stream of one worker that the agent's console shows.

    Attributes:
        stream: the destination: STDOUT or STDERR.
        prefix: put before each line; empty for a verbatim copy.
        live: a person types and watches: every byte is shown at once.
    """

    path: Path
    stream: Streams
    prefix: bytes = b""
    live: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the group on this host.

    Attributes:
        number: the number in the folder's name.
        folder: `attempt_<number>`.
        base_rank: global rank of local rank 0.
        workers: the files by local rank.
    """

    number: int
    folder: Path
    base_rank: int
    workers: Mapping[int, WorkerLogs]


class LogDirectory:
    """The directory of one run on this host.

    Attributes:
        path: `<log_dir>/<run_id>_<random>`.
    """

    def __init__(self, path: Path, keep_attempts: int = 0) -> None:
        """Use `LogDirectory.create`."""
        self.path = path
        self._keep_attempts = keep_attempts
        self._attempts: list[Attempt] = []  # those with files on disk
        self._started = 0
        self._failed: int | None = None
        self._lock: int | None = None

    @classmethod
    def create(cls, log_dir: Path | None, run_id: str, keep_attempts: int = 0) -> Self:
        """Make a new directory with a unique name, readable by its owner only.

        Args:
            log_dir: its parent; made if missing. None: a new `rallypoint_*` directory for temporary files. In a thread,
                those that jobs of this user left there long ago are removed.
            run_id: any text; characters not allowed in a file name become `_`.
            keep_attempts: number of latest attempts to keep; 0: all. See `superfluous`.

        Raises:
            LogError: it can't be made.
        """
        try:
            lock = None
            if log_dir is None:
                log_dir = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
                lock = _lock(log_dir)
                threading.Thread(
                    target=remove_old, args=(log_dir.parent,), name="old-logs", daemon=True
                ).start()
            log_dir.mkdir(parents=True, exist_ok=True)
            # Absolute: workers may run in another directory.
            path = Path(tempfile.mkdtemp(prefix=f"{safe_name(run_id)}_", dir=log_dir.absolute()))
            # A full disk has room for folders and empty files: workers would fail at their first line.
            (path / _PROBE).write_bytes(bytes(_BLOCK))
            (path / _PROBE).unlink()
            directory = cls(path, keep_attempts)
            directory._lock = lock
            return directory
        except OSError as error:
            parent = log_dir or "the temporary folder"
            raise LogError(
                f"cannot make a log directory in {parent}: {error.strerror}; choose another with --log-dir"
            ) from error

    def close(self) -> None:
        """Let the folder be removed some days from now, if it is a temporary one."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.utime(self._lock)
            os.close(self._lock)
            self._lock = None

    def new_attempt(
        self, local_ranks: Iterable[int], base_rank: int = 0, one_file: int | None = None
    ) -> Attempt:
        """Make the directories and empty files of the next start of the group.

        Args:
            base_rank: global rank of local rank 0.
            one_file: local rank of the worker whose two streams are one; stderr.log stays empty.

        Raises:
            LogError: they can't be made.
        """
        folder = self.path / f"attempt_{self._started}"
        workers: dict[int, WorkerLogs] = {}
        try:
            folder.mkdir()
            attempt = Attempt(self._started, folder, base_rank, workers)
            self._started += 1
            for local_rank in local_ranks:
                path = folder / str(local_rank)
                path.mkdir()
                stdout, stderr = path / STDOUT_FILE, path / STDERR_FILE
                stdout.touch()
                stderr.touch()
                stderr = stdout if local_rank == one_file else stderr
                workers[local_rank] = WorkerLogs(stdout, stderr, path / ERROR_FILE)
        except OSError as error:
            raise LogError(f"cannot make the log files in {folder}: {error.strerror}") from error
        _name_by_rank(attempt)
        self._attempts.append(attempt)
        return attempt

    def note_failure(self) -> None:
        """Record that a worker of the latest attempt has failed: its report names files that should stay."""
        self._failed = self._started - 1

    def superfluous(self) -> list[Attempt]:
        """Return the attempts to remove with `remove_attempts`, each only once.

        The latest `keep_attempts` stay, and the latest in which a worker of this host failed: later attempts may have
        ended because of other hosts, and the report of the failure names its files.
        """
        if not self._keep_attempts:
            return []
        kept = {attempt.number for attempt in self._attempts[-self._keep_attempts :]} | {self._failed}
        superfluous = [attempt for attempt in self._attempts if attempt.number not in kept]
        self._attempts = [attempt for attempt in self._attempts if attempt.number in kept]
        return superfluous


def _name_by_rank(attempt: Attempt) -> None:
    """Link the workers' folders by global rank; in a subfolder, so that `attempt_0/*/stdout.log` has no duplicates."""
    # Some file systems have no links; the workers' folders can be found without them.
    with contextlib.suppress(OSError):
        ranks = attempt.folder / RANKS_FOLDER
        ranks.mkdir()
        for local_rank in attempt.workers:
            (ranks / str(attempt.base_rank + local_rank)).symlink_to(f"../{local_rank}")


def remove_attempts(attempts: Iterable[Attempt]) -> None:
    """Remove the files of attempts; ignores errors, and blocks for as long as the file system takes."""
    for attempt in attempts:
        shutil.rmtree(attempt.folder, ignore_errors=True)


# ---- Folders among the temporary files, which are removed some days after the end of their job.


def _lock(folder: Path) -> int:
    """Return a descriptor that keeps a folder from being removed; only programs that are forked inherit it."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    # Some network file systems have no locks: there, only the age of the files protects a folder.
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def remove_old(
    parent: Path, kept: float = _KEPT, most: int = _MOST_REMOVED, most_kept: int = _MOST_KEPT
) -> None:
    """Remove folders that jobs of this user left in `parent`; ignores errors, and blocks while files are deleted.

    A folder stays while its job runs, and if it has no lock file: then no job has made it. Links are not followed.

    Args:
        parent: the folder for temporary files.
        kept: seconds that a folder stays after the last change in it.
        most: number of folders to remove at once.
        most_kept: number of folders beyond which the oldest do not stay that long.
    """
    with contextlib.suppress(OSError):
        found = [entry for entry in os.scandir(parent) if _TEMPORARY_NAME.fullmatch(entry.name)]
        statuses = [(entry.stat(follow_symlinks=False), entry.path) for entry in found]
        own = sorted((status.st_mtime, path) for status, path in statuses if status.st_uid == os.getuid())
        for position, (_, path) in enumerate(own, start=1):
            surplus = position <= len(own) - most_kept
            with contextlib.suppress(OSError):
                most -= _remove_if_old(Path(path), time.time() - (0.0 if surplus else kept))
            if not most:
                break


def _remove_if_old(folder: Path, oldest: float) -> bool:
    """Remove a folder without changes since a moment, in Unix seconds; return whether it was removed."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.ExitStack() as stack:

        def opened(path: str | Path, flags: int, within: int | None = None) -> int:
            fd = os.open(path, flags, dir_fd=within)
            stack.callback(os.close, fd)
            return fd

        inside = opened(folder, flags | os.O_DIRECTORY)
        status = os.fstat(inside)
        if status.st_uid != os.getuid() or status.st_mtime >= oldest:
            return False
        fcntl.flock(opened(_LOCK, flags | os.O_NONBLOCK, inside), fcntl.LOCK_EX | fcntl.LOCK_NB)
        for _, folders, files, at in os.fwalk(dir_fd=inside):
            for name in (*folders, *files):
                if os.stat(name, dir_fd=at, follow_symlinks=False).st_mtime >= oldest:
                    return False
        # The lock file last: if this process ends before, another one goes on.
        for name in sorted(os.listdir(inside), key=_LOCK.__eq__):
            if stat.S_ISDIR(os.stat(name, dir_fd=inside, follow_symlinks=False).st_mode):
                shutil.rmtree(name, dir_fd=inside)
            else:
                os.unlink(name, dir_fd=inside)
        folder.rmdir()
    return True


def safe_name(run_id: str) -> str:
    """Turn a run's id into a safe part of a file name; not unique, and never a path."""
    return _UNSAFE.sub("_", run_id)[:_LONGEST_RUN_ID].lstrip(".-") or "run"
