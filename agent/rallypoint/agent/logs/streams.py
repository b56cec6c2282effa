"""A worker's output streams, and the options for them."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

LEAST_ROTATED = 4096
"""Least size in bytes at which a file is rotated: with smaller files, the names would cost more than the content."""


class LogError(Exception):
    """Logs can't be written to the requested location, or an option about them is invalid."""


class Streams(enum.IntFlag):
    """A worker's output streams, by the numbers of torchrun's -r and -t."""

    NONE = 0
    STDOUT = 1
    STDERR = 2
    BOTH = 3


@dataclass(frozen=True, slots=True)
class Redirect:
    """Streams by worker: the value of `-r/--redirects` or `-t/--tee`."""

    default: Streams = Streams.NONE
    by_local_rank: Mapping[int, Streams] = field(default_factory=dict)

    def of(self, local_rank: int) -> Streams:
        """Return the streams of one worker."""
        return self.by_local_rank.get(local_rank, self.default)

    @classmethod
    def parse(cls, text: str, option: str, workers: int | None = None) -> Self:
        """Parse `3`, for all workers, or `0:1,1:2`, by local rank; workers not named there get 0.

        Args:
            text: the option's value. 0 is neither stream, 1 stdout, 2 stderr, 3 both.
            option: its name, for the error.
            workers: number of workers of the host, if known; a local rank not below it is an error.

        Raises:
            LogError: the text is invalid; one line.
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
                raise LogError(f"{option} {text}: local rank {local_rank} is named twice; name it once")
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
class OutputOptions:
    """Options for the output of a job's workers; each field is that of `JobConfig`."""

    role: str = "default"
    redirects: Redirect = field(default_factory=Redirect)
    tee: Redirect = field(default_factory=Redirect)
    local_ranks_filter: frozenset[int] | None = None
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    line_prefix: str | None = None
    log_max_bytes: int | None = None
    log_keep_files: int = 5
    input_rank: int | None = None
    tty: bool = False
