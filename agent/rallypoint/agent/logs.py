"""Where workers' output goes: the log directory, and which streams the console sees.

    <log_dir>/<run_id>_<random>/attempt_<n>/<local_rank>/{stdout.log,stderr.log,error.json,hang.txt}

The layout is torchrun's, but for hang.txt; `n` counts the starts of the group on this host, so no attempt overwrites
another.
"""

from __future__ import annotations

import enum
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

STDOUT_FILE = "stdout.log"
STDERR_FILE = "stderr.log"
ERROR_FILE = "error.json"
HANG_FILE = "hang.txt"

_LONGEST_RUN_ID = 64  # characters of it in a directory name, which may have 255 bytes
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class LogError(Exception):
    """Logs can't be written where they were asked for; or an option about them makes no sense."""


class Streams(enum.IntFlag):
    """A worker's output streams, by the numbers of torchrun's -r and -t."""

    NONE = 0
    STDOUT = 1
    STDERR = 2
    BOTH = 3


@dataclass(frozen=True, slots=True)
class Redirect:
    """Which streams of which workers: the value of `-r/--redirects` or `-t/--tee`.

    Attributes:
        default: for the workers that are not named.
        by_local_rank: for those that are.
    """

    default: Streams = Streams.NONE
    by_local_rank: Mapping[int, Streams] = field(default_factory=dict)

    def of(self, local_rank: int) -> Streams:
        """The streams of one worker."""
        return self.by_local_rank.get(local_rank, self.default)

    @classmethod
    def parse(cls, text: str, option: str, workers: int | None = None) -> Self:
        """Reads `3`, for all workers, or `0:1,1:2`, by local rank; who is not named there gets 0.

        Args:
            text: the option's value. 0 is neither stream, 1 stdout, 2 stderr, 3 both.
            option: its name, for the error.
            workers: how many workers the host has, if known; a local rank past them is an error.

        Raises:
            LogError: in one line, what is wrong and what is expected.
        """
        if ":" not in text:
            return cls(_parse_streams(text, text, option))
        by_local_rank: dict[int, Streams] = {}
        for pair in text.split(","):
            rank, _, streams = pair.partition(":")
            if not re.fullmatch(r"[0-9]{1,9}", rank.strip()):
                raise LogError(f"{option} {text}: {rank.strip()!r} is not a local rank; {_EXPECTED}")
            local_rank = int(rank)
            if local_rank in by_local_rank:
                raise LogError(f"{option} {text}: local rank {local_rank} is there twice; name it once")
            if workers is not None and local_rank >= workers:
                raise LogError(
                    f"{option} {text}: there is no local rank {local_rank}; "
                    f"this host has {workers} worker{'s' * (workers != 1)}, counted from 0"
                )
            by_local_rank[local_rank] = _parse_streams(streams, text, option)
        return cls(Streams.NONE, by_local_rank)


_EXPECTED = (
    "expected 0 (no stream), 1 (stdout), 2 (stderr) or 3 (both), or a list by local rank such as 0:3,1:2"
)


def _parse_streams(digit: str, text: str, option: str) -> Streams:
    if digit.strip() not in {"0", "1", "2", "3"}:
        raise LogError(f"{option} {text}: {digit.strip()!r} names no stream; {_EXPECTED}")
    return Streams(int(digit))


@dataclass(frozen=True, slots=True)
class WorkerLogs:
    """The files of one worker in one attempt.

    Attributes:
        stdout: exists, empty, before the worker starts.
        stderr: likewise.
        error_file: written by the worker if it raises (TORCHELASTIC_ERROR_FILE).
    """

    stdout: Path
    stderr: Path
    error_file: Path

    @property
    def hang_file(self) -> Path:
        """Written by the agent if a timer of the worker runs out: what it was doing."""
        return self.stderr.with_name(HANG_FILE)


@dataclass(frozen=True, slots=True)
class ConsoleCopy:
    """One stream of one worker that the agent's console shows.

    Attributes:
        path: the file to follow.
        stream: where to: STDOUT or STDERR.
        prefix: put before each line; empty for a verbatim copy.
    """

    path: Path
    stream: Streams
    prefix: bytes = b""


class LogDirectory:
    """The directory of one run on this host.

    Attributes:
        path: `<log_dir>/<run_id>_<random>`.
    """

    def __init__(self, path: Path) -> None:
        """Use `LogDirectory.create`."""
        self.path = path
        self._attempts = 0

    @classmethod
    def create(cls, log_dir: Path | None, run_id: str) -> Self:
        """Makes the directory, new and unlike any other, readable by its owner only.

        Args:
            log_dir: where; made if it isn't there. None: a fresh `rallypoint_*` directory for temporary files.
            run_id: any text; what has no place in a file name becomes `_`.

        Raises:
            LogError: it can't be made.
        """
        try:
            if log_dir is None:
                log_dir = Path(tempfile.mkdtemp(prefix="rallypoint_"))
            log_dir.mkdir(parents=True, exist_ok=True)
            # Absolute: workers may run in another directory.
            return cls(Path(tempfile.mkdtemp(prefix=f"{safe_name(run_id)}_", dir=log_dir.absolute())))
        except OSError as error:
            where = log_dir or tempfile.gettempdir()
            raise LogError(
                f"cannot make a log directory in {where}: {error.strerror}; choose another with --log-dir"
            ) from error

    def new_attempt(self, local_ranks: Iterable[int]) -> dict[int, WorkerLogs]:
        """Makes the directories and empty files of the next start of the group.

        Args:
            local_ranks: of the workers to be started.

        Returns:
            The files by local rank.

        Raises:
            LogError: they can't be made.
        """
        attempt = self.path / f"attempt_{self._attempts}"
        logs: dict[int, WorkerLogs] = {}
        try:
            attempt.mkdir()
            self._attempts += 1
            for local_rank in local_ranks:
                folder = attempt / str(local_rank)
                folder.mkdir()
                logs[local_rank] = WorkerLogs(folder / STDOUT_FILE, folder / STDERR_FILE, folder / ERROR_FILE)
                logs[local_rank].stdout.touch()
                logs[local_rank].stderr.touch()
        except OSError as error:
            raise LogError(f"cannot make the log files in {attempt}: {error.strerror}") from error
        return logs


def safe_name(run_id: str) -> str:
    """Makes a run's id fit to be part of a file name; not unique, and no path whatever it was."""
    return _UNSAFE.sub("_", run_id)[:_LONGEST_RUN_ID].lstrip(".-") or "run"


def console_copies(
    logs: Mapping[int, WorkerLogs], role: str, redirect: Redirect, tee: Redirect
) -> list[ConsoleCopy]:
    """Decides what the console shows: all that isn't redirected, and what is teed, with a prefix.

    A stream both redirected and teed is teed. (Unlike torchrun, the files have every stream anyway: the report of
    a failure needs them.)

    Args:
        logs: the files by local rank.
        role: the workers' role; the prefix of a teed line is `[<role><local_rank>]:`.
        redirect: streams that the console must not show.
        tee: streams that it shows with a prefix.
    """
    copies: list[ConsoleCopy] = []
    for local_rank, files in logs.items():
        prefix = os.fsencode(f"[{role}{local_rank}]:")
        for stream, path in ((Streams.STDOUT, files.stdout), (Streams.STDERR, files.stderr)):
            if stream in tee.of(local_rank):
                copies.append(ConsoleCopy(path, stream, prefix))
            elif stream not in redirect.of(local_rank):
                copies.append(ConsoleCopy(path, stream))
    return copies
