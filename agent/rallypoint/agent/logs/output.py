"""Copies the output of one attempt's workers to log files, console and filtered files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rallypoint.agent.logs.follower import Console, Follower, OutputThread
from rallypoint.agent.logs.lines import LineFilter, line_prefix
from rallypoint.agent.logs.plan import FILTERED_STDERR_FILE, FILTERED_STDOUT_FILE, Attempt, ConsoleCopy
from rallypoint.agent.logs.rotation import Rotation
from rallypoint.agent.logs.streams import LogError, OutputOptions, Redirect, Streams
from rallypoint.agent.logs.terminal import Terminal, environment_of_viewed
from rallypoint.agent.logs.watch import FileWatch
from rallypoint.rpc.logs import get_logger

ROTATION_TIMEOUT = 2.0
"""Seconds that the end of an attempt waits until the pipes of rotated logs are empty; usually milliseconds. A file
system that hangs must not delay the restart: the copier continues by itself."""


_log = get_logger("rallypoint.agent")


@dataclass(frozen=True, slots=True)
class _WorkerStream:
    """One stream of one worker, with the prefix of its lines."""

    local_rank: int
    stream: Streams
    path: Path
    prefix: bytes


class WorkerOutput:
    """Copies the output of one attempt for as long as its workers run; see OutputCopy."""

    def __init__(
        self,
        options: OutputOptions,
        attempt: Attempt,
        console: Console,
        pipes: Path,
        terminal: Terminal | None = None,
    ) -> None:
        """Set up; `open` makes the files.

        Args:
            options: of the job.
            attempt: its files.
            console: shows the streams that the options select.
            pipes: folder for the named pipes, if logs are rotated.
            terminal: of one of the workers; None: no worker has one.
        """
        self._options = options
        self._attempt = attempt
        self._console = console
        self._folder_of_pipes = pipes
        self._terminal = terminal
        self._rotation: Rotation | None = None
        self._filtered: list[tuple[OutputThread, int]] = []
        self._watch: FileWatch | None = None
        self._followers: list[Follower] = []
        self._filters: list[Follower] = []

    def open(self) -> None:
        """Make the files and pipes for the workers. Needs a running loop. `finish` cleans up, also after an error.

        Raises:
            LogError: a file or pipe can't be made.
        """
        options = self._options
        streams = _streams(options, self._attempt)
        copies = console_copies(streams, options)
        if (terminal := self._terminal) is not None:
            copies = [_with_terminal(copy, self._attempt, terminal) for copy in copies]
        # Two streams of one terminal are one file.
        self._followers = [
            self._console.follow(copy) for copy in {copy.path: copy for copy in copies}.values()
        ]
        if options.duplicate_stdout_filters or options.duplicate_stderr_filters:
            self._make_filters(streams)
        if options.log_max_bytes is not None:
            self._rotation = Rotation(
                self._attempt.workers,
                self._folder_of_pipes,
                max_bytes=options.log_max_bytes,
                keep_files=options.log_keep_files,
            )
        if terminal is not None:
            try:
                terminal.begin(self._file(terminal.local_rank, terminal.log_stream))
            except OSError as error:
                raise LogError(f"cannot write the log of the terminal: {error.strerror}") from error

    def source(self, local_rank: int) -> Path | None:
        """Return the path that the worker opens as standard input; None: it inherits that of this process."""
        terminal = self._terminal
        if terminal is not None and terminal.reads and local_rank == terminal.local_rank:
            return terminal.path
        # A terminal itself is never inherited: the worker would take keys from a shell.
        inherits = local_rank == self._options.input_rank and not os.isatty(0)
        return None if inherits else Path(os.devnull)

    def target(self, local_rank: int, stream: Streams) -> Path:
        """Return the path that the worker opens as this stream."""
        terminal = self._terminal
        if terminal is not None and local_rank == terminal.local_rank and stream in terminal.streams:
            return terminal.path
        return self._file(local_rank, stream)

    def environment(self, local_rank: int, given: Mapping[str, str]) -> dict[str, str]:
        """Return variables about the console for a worker; `given`: its environment so far."""
        terminal = self._terminal
        if terminal is not None and local_rank == terminal.local_rank and Streams.STDOUT in terminal.streams:
            return {}
        return environment_of_viewed(self._options, local_rank, self._attempt.base_rank + local_rank, given)

    def stopping(self) -> None:
        """Note that the workers are being stopped."""
        if self._terminal is not None:
            self._terminal.stopping()

    def _file(self, local_rank: int, stream: Streams) -> Path:
        if self._rotation is not None:
            return self._rotation.target(local_rank, stream)
        logs = self._attempt.workers[local_rank]
        return logs.stdout if stream is Streams.STDOUT else logs.stderr

    def is_complete(self, local_rank: int) -> bool:
        """True if no output of the worker is known to be missing from its files."""
        terminal = self._terminal
        if terminal is not None and local_rank == terminal.local_rank and not terminal.complete:
            return False
        return self._rotation is None or self._rotation.is_complete(local_rank)

    @property
    def delayed(self) -> bool:
        """True if output of an ended worker may not be in its file yet."""
        return self._rotation is not None or self._terminal is not None

    async def flush(self, local_rank: int, timeout: float) -> bool:
        """Wait until all present output of a worker is in its files; false if that takes over `timeout` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                if self._terminal is not None and local_rank == self._terminal.local_rank:
                    await self._terminal.flush()
                return self._rotation is None or await self._rotation.flush(local_rank, timeout)
        return False

    def start(self) -> None:
        """Begin to copy; called before any worker is started."""
        for follower in (*self._followers, *self._filters):
            follower.start()

    async def finish(self, timeout: float) -> bool:
        """Copy the rest, after the last writer has ended; false if that takes over `timeout` seconds."""
        complete = True
        if self._terminal is not None:
            await self._terminal.finish(timeout)
        if self._rotation is not None:
            complete = await self._rotation.finish(ROTATION_TIMEOUT)
        shown = await asyncio.gather(*(follower.finish(timeout) for follower in self._followers))
        await asyncio.gather(*(follower.finish(timeout) for follower in self._filters))
        for follower in self._filters:
            await follower.abandon()
        while self._filtered:
            output, fd = self._filtered.pop()
            await output.close(timeout)
            if output.error is not None:
                folder, reason = str(self._attempt.folder), output.error.strerror
                _log.error("the file of filtered lines is not complete", folder=folder, reason=reason)
            os.close(fd)
        if self._watch is not None:
            self._watch.close()
        return complete and all(shown)

    def _make_filters(self, streams: Iterable[_WorkerStream]) -> None:
        self._watch, options = FileWatch(), self._options
        for stream, texts, name in (
            (Streams.STDOUT, options.duplicate_stdout_filters, FILTERED_STDOUT_FILE),
            (Streams.STDERR, options.duplicate_stderr_filters, FILTERED_STDERR_FILE),
        ):
            if not texts:
                continue
            path = self._attempt.folder / name
            try:
                fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise LogError(f"cannot make {path}: {error.strerror}") from error
            output = OutputThread(fd)
            self._filtered.append((output, fd))
            choose = LineFilter(texts)
            for source in filtered_streams(streams, stream, options.tee):
                self._filters.append(Follower(source.path, output, self._watch, source.prefix, choose=choose))


def _with_terminal(copy: ConsoleCopy, attempt: Attempt, terminal: Terminal) -> ConsoleCopy:
    """Show the terminal's file as soon as it grows, on the stream that the terminal is."""
    logs = attempt.workers[terminal.local_rank]
    if copy.path == (logs.stdout if terminal.log_stream is Streams.STDOUT else logs.stderr):
        return replace(copy, stream=terminal.log_stream, live=True)
    return copy


def console_copies(streams: Iterable[_WorkerStream], options: OutputOptions) -> list[ConsoleCopy]:
    """Select the streams for the console: all that are not redirected, and teed streams with a prefix.

    A stream both redirected and teed is teed. (Unlike torchrun, the files have every stream anyway: the report of a
    failure needs them.)
    """
    copies: list[ConsoleCopy] = []
    for source in streams:
        if source.stream in options.tee.of(source.local_rank):
            copies.append(ConsoleCopy(source.path, source.stream, source.prefix))
        elif source.stream not in options.redirects.of(source.local_rank):
            copies.append(ConsoleCopy(source.path, source.stream))
    return copies


def filtered_streams(streams: Iterable[_WorkerStream], stream: Streams, tee: Redirect) -> list[_WorkerStream]:
    """Select the streams for a filtered file: the teed ones, as torchrun does; if none is teed, all.

    (torchrun makes an empty file then.)
    """
    candidates = [source for source in streams if source.stream is stream]
    teed = [source for source in candidates if stream in tee.of(source.local_rank)]
    return teed or candidates


def _streams(options: OutputOptions, attempt: Attempt) -> list[_WorkerStream]:
    """Return the streams of the workers selected by the filter of local ranks."""
    found: list[_WorkerStream] = []
    for local_rank, logs in attempt.workers.items():
        if options.local_ranks_filter is None or local_rank in options.local_ranks_filter:
            rank = attempt.base_rank + local_rank
            prefix = line_prefix(options.line_prefix, role=options.role, local_rank=local_rank, rank=rank)
            found.append(_WorkerStream(local_rank, Streams.STDOUT, logs.stdout, prefix))
            found.append(_WorkerStream(local_rank, Streams.STDERR, logs.stderr, prefix))
    return found
