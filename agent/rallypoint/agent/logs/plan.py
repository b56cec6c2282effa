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
import re
import shutil
import tempfile
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
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


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
        path: the file to follow.
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

    @classmethod
    def create(cls, log_dir: Path | None, run_id: str, keep_attempts: int = 0) -> Self:
        """Make a new directory with a unique name, readable by its owner only.

        Args:
            log_dir: its parent; made if missing. None: a new `rallypoint_*` directory for temporary files.
            run_id: any text; characters not allowed in a file name become `_`.
            keep_attempts: number of latest attempts to keep; 0: all. See `superfluous`.

        Raises:
            LogError: it can't be made.
        """
        try:
            if log_dir is None:
                log_dir = Path(tempfile.mkdtemp(prefix="rallypoint_"))
            log_dir.mkdir(parents=True, exist_ok=True)
            # Absolute: workers may run in another directory.
            path = Path(tempfile.mkdtemp(prefix=f"{safe_name(run_id)}_", dir=log_dir.absolute()))
            return cls(path, keep_attempts)
        except OSError as error:
            parent = log_dir or "the temporary folder"
            raise LogError(
                f"cannot make a log directory in {parent}: {error.strerror}; choose another with --log-dir"
            ) from error

    def new_attempt(
        self, local_ranks: Iterable[int], base_rank: int = 0, one_file: int | None = None
    ) -> Attempt:
        """Make the directories and empty files of the next start of the group.

        Args:
            local_ranks: of the workers to be started.
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


def safe_name(run_id: str) -> str:
    """Turn a run's id into a safe part of a file name; not unique, and never a path."""
    return _UNSAFE.sub("_", run_id)[:_LONGEST_RUN_ID].lstrip(".-") or "run"
