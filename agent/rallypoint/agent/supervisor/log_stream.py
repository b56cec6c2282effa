"""Output of a job's workers as one stream that can be resumed; over restarts and rotated files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeAlias

import grpc

from rallypoint.agent.job.job import Job
from rallypoint.agent.logs.files import LogFile, Piece
from rallypoint.agent.logs.plan import STDERR_FILE, STDOUT_FILE
from rallypoint.agent.logs.watch import FALLBACK_INTERVAL, FileWatch
from rallypoint.agent.supervisor.operator_actions import workers_of
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.rpc.errors import ServiceError, invalid
from rallypoint.serving.requests import EveryField, count

PIECE_BYTES = 256 * 1024
"""Most bytes of a message. Several streams take turns, a piece each."""

GATHER = 0.05
"""Seconds that new output waits for more: many lines then share one message."""

LOG_STREAMS: dict[pb.LogStream.ValueType, str] = {
    pb.LOG_STREAM_STDOUT: STDOUT_FILE,
    pb.LOG_STREAM_STDERR: STDERR_FILE,
}
_Place: TypeAlias = tuple[int, int]  # attempt, offset


class _StreamReader:
    """Reads one stream of one worker, from one attempt on to the next."""

    def __init__(
        self, job: Job, local_rank: int, stream: pb.LogStream.ValueType, place: _Place | None, tail: int
    ) -> None:
        """`place`: the position to resume from; None: `tail` gives the first position, as in StreamLogsRequest."""
        self.due = True
        self._job = job
        self._local_rank = local_rank
        self._stream = stream
        self._tail = tail if place is None else 0
        self._resumed = place is not None
        self._attempt, self._offset = place if place is not None else (-1, 0)
        self._lost = 0
        self._file: LogFile | None = None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def read(self, watch: FileWatch, wake: asyncio.Event) -> tuple[pb.StreamLogsResponse | None, bool]:
        """Read the next piece, or None at the present end; when there is more, set `due` and `wake`.

        Returns:
            The piece, and True if the file is watched for more.
        """

        def grown() -> None:
            self.due = True
            wake.set()

        while True:
            latest = max(self._job.base_ranks, default=-1)
            if self._file is None and not self._open_next(latest):
                self.due = False
                return None, True  # the job's notifier announces the next attempt
            assert self._file is not None, "it was opened"
            try:
                piece, watched = self._file.read(self._offset, PIECE_BYTES), True
                if not piece.data and self._attempt == latest:
                    piece, watched = _read_and_watch(self._file, piece, watch, grown)
            except FileNotFoundError:
                self._lost = -1
                self._close()
                continue
            except OSError as error:
                raise _unreadable(self._file.path, error) from None
            if piece.data:
                return self._message(piece.begin, piece.data), True
            self._offset = min(self._offset, piece.begin)
            self._file.close()
            if self._attempt == latest:
                self.due = False
                return None, watched
            self._close()

    def _close(self) -> None:
        self.close()
        self._file = None

    def _open_next(self, latest: int) -> bool:
        """Open the file of the next attempt whose log is kept; False if there is none."""
        folder = self._job.log_dir
        if folder is None:
            return False
        attempt, offset = self._attempt, self._offset
        if self._resumed:
            self._resumed = False
        else:
            attempt, offset = (latest if self._tail else attempt + 1), 0
        while attempt <= latest:
            path = folder / f"attempt_{attempt}" / str(self._local_rank) / LOG_STREAMS[self._stream]
            if path.exists():
                self._file, self._attempt, self._offset = LogFile(path), attempt, offset
                self._begin_at_tail()
                return True
            if self._attempt >= 0:
                self._lost = -1
            attempt, offset = attempt + 1, 0
        return False

    def _begin_at_tail(self) -> None:
        if self._tail and self._file is not None:
            with suppress(OSError):  # the read that follows reports it
                begin, end = self._file.extent()
                offset = max(begin, end - self._tail)
                if offset > begin:
                    before = self._file.read(offset - 1, min(PIECE_BYTES, end - offset))
                    offset = before.begin + before.data.find(b"\n") + 1 if b"\n" in before.data else offset
                self._offset = offset
        self._tail = 0

    def _message(self, begin: int, data: bytes) -> pb.StreamLogsResponse:
        lost = self._lost or max(0, begin - self._offset)
        self._lost, self._offset = 0, begin + len(data)
        cursor = pb.LogCursor(
            local_rank=self._local_rank, stream=self._stream, attempt=self._attempt, offset=self._offset
        )
        rank = self._job.base_ranks[self._attempt] + self._local_rank
        return pb.StreamLogsResponse(rank=rank, cursor=cursor, data=data, lost_bytes=lost)


def _read_and_watch(
    file: LogFile, end: Piece, watch: FileWatch, grown: Callable[[], None]
) -> tuple[Piece, bool]:
    """Read on from an end of the file. The watch is armed before the read, so that no output is missed."""
    while True:
        identity = os.fstat(file.fileno()).st_ino
        watched = watch.arm(file.fileno(), grown)
        piece = file.read(end.begin, PIECE_BYTES)
        if piece.data or os.fstat(file.fileno()).st_ino == identity:
            return piece, watched


async def stream_logs(job: Job, request: pb.StreamLogsRequest) -> AsyncGenerator[pb.StreamLogsResponse, None]:
    """Yield the requested pieces. A slow reader delays no worker: the output stays in its files until it is read.

    Raises:
        ServiceError: INVALID_ARGUMENT, NO_WORKER, LOGS_UNREADABLE.
    """
    readers = _readers(job, request)
    with ExitStack() as stack:
        watch = FileWatch()
        stack.callback(watch.close)
        for reader in readers:
            stack.callback(reader.close)
        wake = stack.enter_context(job.changed.watch())
        attempts, ended = -1, False
        while True:
            wake.clear()
            # Before the read: a job that has ended writes no more output.
            ended, all_watched = job.result is not None, True
            if ended or max(job.base_ranks, default=-1) != attempts:
                attempts = max(job.base_ranks, default=-1)
                for reader in readers:
                    reader.due = True
            while due := [reader for reader in readers if reader.due]:
                for reader in due:
                    piece, watched = reader.read(watch, wake)
                    all_watched = all_watched and watched
                    if piece is not None:
                        yield piece
            if ended or not request.follow:
                return
            await _grown(wake, readers, all_watched=all_watched)


async def _grown(wake: asyncio.Event, readers: Sequence[_StreamReader], *, all_watched: bool) -> None:
    """Return when there is more output, or may be."""
    try:
        async with asyncio.timeout(None if all_watched else FALLBACK_INTERVAL):
            await wake.wait()
    except TimeoutError:
        for reader in readers:
            reader.due = True
    if any(reader.due for reader in readers):
        await asyncio.sleep(GATHER)  # collect more output for one message


def _readers(job: Job, request: pb.StreamLogsRequest) -> list[_StreamReader]:
    with EveryField() as check:
        check(count, "tail_bytes", request.tail_bytes, 0)
        if request.stream not in (pb.LOG_STREAM_UNSPECIFIED, *LOG_STREAMS):
            check.refuse("stream", f"there is no stream {request.stream}")
        places = check(_positions, job, request) or {}
    streams = [request.stream] if request.stream else list(LOG_STREAMS)
    local_ranks = list(range(job.config.local_world_size))
    if request.ranks:
        local_ranks = [worker.local_rank for worker in workers_of(job, request.ranks)]
    return [
        _StreamReader(job, local_rank, stream, places.get((local_rank, stream)), request.tail_bytes)
        for local_rank in local_ranks
        for stream in streams
    ]


def _positions(job: Job, request: pb.StreamLogsRequest) -> dict[tuple[int, pb.LogStream.ValueType], _Place]:
    outputs = len(LOG_STREAMS) * job.config.local_world_size
    if len(request.cursors) > outputs:
        raise invalid(
            "cursors", f"must have at most {outputs} entries, one for each output, not {len(request.cursors)}"
        )
    places = {}
    with EveryField() as check:
        for index, cursor in enumerate(request.cursors):
            field = f"cursors[{index}]"
            if not 0 <= cursor.local_rank < job.config.local_world_size:
                check.refuse(f"{field}.local_rank", f"there is no worker {cursor.local_rank} on this host")
            if cursor.stream not in LOG_STREAMS:
                check.refuse(f"{field}.stream", "must be standard output or standard error")
            if cursor.attempt not in job.base_ranks:
                check.refuse(f"{field}.attempt", f"there was no attempt {cursor.attempt}")
            check(count, f"{field}.offset", cursor.offset, 0)
            places[cursor.local_rank, cursor.stream] = cursor.attempt, cursor.offset
    return places


def _unreadable(path: Path, error: OSError) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE, "LOGS_UNREADABLE", f"can't read {path}: {error.strerror or error}"
    )
