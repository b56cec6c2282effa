"""A stream has all output of workers, in order and once: over attempts, rotated files, breaks and the job's end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.fake_job import FakeJob, as_job, config
from rallypoint.agent.job.result import JobResult
from rallypoint.agent.logs.files import rotated_name
from rallypoint.agent.logs.watch import FileWatch
from rallypoint.agent.supervisor.log_stream import PIECE_BYTES, stream_logs
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.rpc.errors import ServiceError
from support.waiting import PATIENCE

OUT, ERR = pb.LOG_STREAM_STDOUT, pb.LOG_STREAM_STDERR


class LoggingJob(FakeJob):
    """A job with a log folder that the test fills."""

    def attempt(self, base_rank: int = 0) -> int:
        """Start the workers once more; return the number of the attempt."""
        assert self.log_dir is not None
        number = len(self.base_ranks)
        for local_rank in range(self.config.local_world_size):
            folder = self.log_dir / f"attempt_{number}" / str(local_rank)
            folder.mkdir(parents=True)
            (folder / "stdout.log").touch()
            (folder / "stderr.log").touch()
        self.base_ranks[number] = base_rank
        self.changed.notify()
        return number

    def file(self, local_rank: int = 0, name: str = "stdout.log", attempt: int | None = None) -> Path:
        """The path of a log file; None is the latest attempt."""
        assert self.log_dir is not None
        number = len(self.base_ranks) - 1 if attempt is None else attempt
        return self.log_dir / f"attempt_{number}" / str(local_rank) / name

    def write(self, data: bytes, local_rank: int = 0, name: str = "stdout.log") -> None:
        """Append output of a worker."""
        with self.file(local_rank, name).open("ab") as file:
            file.write(data)

    def rotate(self) -> None:
        """Rotate the file of worker 0's standard output."""
        path = self.file()
        begin = sum(each.stat().st_size for each in path.parent.glob("stdout.log.*"))
        path.rename(rotated_name(path, begin))
        path.touch()


@pytest.fixture
def job(tmp_path: Path) -> LoggingJob:
    """A job of two workers; none was started yet."""
    return LoggingJob(config=config(workers=2), log_dir=tmp_path)


async def pieces(job: FakeJob, **fields: Any) -> list[pb.StreamLogsResponse]:
    """Return all responses to a request."""
    async with asyncio.timeout(PATIENCE):
        async with aclosing(stream_logs(as_job(job), pb.StreamLogsRequest(**fields))) as stream:
            return [piece async for piece in stream]


async def text(job: FakeJob, **fields: Any) -> bytes:
    """Return worker 0's standard output for a request."""
    return b"".join(
        piece.data for piece in await pieces(job, ranks=(), stream=OUT, **fields) if not piece.rank
    )


async def refused(job: FakeJob, **fields: Any) -> str:
    """Return the fields for which a request is refused."""
    with pytest.raises(ServiceError) as caught:
        await pieces(job, **fields)
    return " ".join(field for field, _ in caught.value.field_violations)


async def test_existing_output_is_sent_by_worker_and_stream(job: LoggingJob) -> None:
    """Each piece has the rank that the worker had, and the cursor after it."""
    job.attempt(base_rank=4)
    job.write(b"out\n")
    job.write(b"\xff\x00no line", local_rank=1, name="stderr.log")
    found = {
        (piece.rank, piece.cursor.local_rank, piece.cursor.stream): piece.data for piece in await pieces(job)
    }
    assert found == {(4, 0, OUT): b"out\n", (5, 1, ERR): b"\xff\x00no line"}
    assert [piece.data for piece in await pieces(job, stream=ERR)] == [b"\xff\x00no line"]
    assert (await pieces(job))[0].cursor == pb.LogCursor(local_rank=0, stream=OUT, attempt=0, offset=4)


async def test_attempts_follow_one_another_with_the_ranks_they_had(job: LoggingJob) -> None:
    """All output of an attempt is sent before the next one's."""
    job.attempt(base_rank=0)
    job.write(b"first\n")
    job.attempt(base_rank=6)
    job.write(b"second\n")
    found = [(piece.rank, piece.cursor.attempt, piece.data) for piece in await pieces(job, stream=OUT)]
    assert found == [(0, 0, b"first\n"), (6, 1, b"second\n")]


async def test_pieces_are_bounded_and_streams_take_turns(job: LoggingJob) -> None:
    """A worker with much output does not delay the others for long."""
    job.attempt()
    job.write(b"x" * (3 * PIECE_BYTES + 5))
    job.write(b"other", local_rank=1)
    found = [(piece.rank, len(piece.data)) for piece in await pieces(job, stream=OUT)]
    assert found == [(0, PIECE_BYTES), (1, 5), (0, PIECE_BYTES), (0, PIECE_BYTES), (0, 5)]


@pytest.mark.parametrize(
    ("tail", "told"),
    [
        (0, b"before\none\ntwo\nthree\n"),
        (6, b"three\n"),
        (7, b"three\n"),
        (9, b"three\n"),
        (10, b"two\nthree\n"),
        (3, b"ee\n"),
        (1000, b"one\ntwo\nthree\n"),
    ],
)
async def test_a_tail_is_of_the_latest_attempt_and_begins_at_a_line(
    job: LoggingJob, tail: int, told: bytes
) -> None:
    """An exception is a last line that is longer than the requested tail."""
    job.attempt()
    job.write(b"before\n")
    job.attempt()
    job.write(b"one\ntwo\nthree\n")
    assert await text(job, tail_bytes=tail) == told


async def test_a_resumed_stream_loses_and_repeats_nothing(job: LoggingJob) -> None:
    """Any cursor can be resumed from; streams without a cursor start at their beginning."""
    job.attempt()
    job.write(b"0123456789")
    job.attempt()
    job.write(b"abcdef")
    cursor = pb.LogCursor(local_rank=0, stream=OUT, attempt=0, offset=7)
    assert await text(job, cursors=[cursor]) == b"789abcdef"
    cursor = pb.LogCursor(local_rank=0, stream=OUT, attempt=1, offset=6)
    assert await text(job, cursors=[cursor]) == b""
    job.write(b"err", name="stderr.log")
    assert [piece.data for piece in await pieces(job, cursors=[cursor])] == [b"err"]


async def test_rotated_files_are_one_stream_and_lost_bytes_are_counted(job: LoggingJob) -> None:
    """The number of lost bytes is in the piece that comes after them."""
    job.attempt()
    for part in (b"first.", b"second.", b"third."):
        job.write(part)
        job.rotate()
    job.write(b"last")
    assert await text(job) == b"first.second.third.last"
    rotated_name(job.file(), 0).unlink()
    first = (await pieces(job, stream=OUT))[0]
    assert (first.data, first.lost_bytes) == (b"second.", 6)
    cursor = pb.LogCursor(local_rank=0, stream=OUT, attempt=0, offset=2)
    resumed = (await pieces(job, stream=OUT, cursors=[cursor]))[0]
    assert (resumed.data, resumed.lost_bytes) == (b"second.", 4)


async def test_a_removed_attempt_is_reported_to_a_reader_within_it(job: LoggingJob) -> None:
    """The number is unknown; a reader without a cursor starts with the attempts that are kept."""
    job.attempt()
    job.write(b"gone")
    job.attempt()
    job.write(b"kept")
    for path in sorted(job.file(attempt=0).parent.parent.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    cursor = pb.LogCursor(local_rank=0, stream=OUT, attempt=0, offset=2)
    resumed = await pieces(job, stream=OUT, cursors=[cursor])
    assert [(piece.data, piece.lost_bytes) for piece in resumed] == [(b"kept", -1)]
    assert [(piece.data, piece.lost_bytes) for piece in await pieces(job, stream=OUT)] == [(b"kept", 0)]


class Follower:
    """A client that follows a job's standard output."""

    def __init__(self, job: FakeJob) -> None:
        self.stream = stream_logs(as_job(job), pb.StreamLogsRequest(follow=True, stream=OUT))

    @asynccontextmanager
    async def waiting_for(self, expected: bytes) -> AsyncIterator[None]:
        """Wait for more output before the block runs, and check at its end that exactly this arrived."""
        reading = asyncio.create_task(self._read(len(expected)))
        await asyncio.sleep(
            0.1
        )  # on a slow machine it may not wait yet; then the test does not cover the wake-up
        yield
        assert await asyncio.wait_for(reading, PATIENCE) == expected

    async def _read(self, size: int) -> bytes:
        seen = b""
        while len(seen) < size:
            seen += (await anext(self.stream)).data
        return seen

    async def rest(self) -> bytes:
        """Return the output until the end of the stream."""
        async with asyncio.timeout(PATIENCE):
            return b"".join([piece.data async for piece in self.stream])


@pytest.fixture(params=["watched", "unwatched"])
async def follower(
    job: LoggingJob, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Follower]:
    """Follow from before the first attempt: with file events of the kernel, and without."""
    if request.param == "unwatched":
        monkeypatch.setattr(FileWatch, "arm", lambda *_: False)
    following = Follower(job)
    yield following
    await following.stream.aclose()


async def test_a_follower_gets_all_output_over_restarts_and_rotation(
    job: LoggingJob, follower: Follower
) -> None:
    """The stream starts before the first attempt and ends with the job."""
    async with follower.waiting_for(b"one."):
        job.attempt()
        job.write(b"one.")
    async with follower.waiting_for(b"two."):
        job.write(b"two.")
    async with follower.waiting_for(b"three.four."):
        job.write(b"three.")
        job.rotate()
        job.write(b"four.")
    async with follower.waiting_for(b"five."):
        job.rotate()
        await asyncio.sleep(0)
        job.write(b"five.")
    async with follower.waiting_for(b"late.six."):
        job.write(b"late.")
        job.attempt()
        job.write(b"six.")
    job.write(b"last words")
    job.end(JobResult(0, "done"))
    assert await follower.rest() == b"last words"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tail_bytes": -1}, "tail_bytes"),
        ({"stream": 7}, "stream"),
        ({"cursors": [pb.LogCursor(local_rank=2, stream=OUT)]}, "cursors[0].local_rank"),
        ({"cursors": [pb.LogCursor(local_rank=0)]}, "cursors[0].stream"),
        ({"cursors": [pb.LogCursor(stream=OUT, attempt=1)]}, "cursors[0].attempt"),
        ({"cursors": [pb.LogCursor(stream=OUT, offset=-1)]}, "cursors[0].offset"),
        ({"cursors": [pb.LogCursor(stream=OUT)] * 5}, "cursors"),
        (
            {"stream": 7, "tail_bytes": -1, "cursors": [pb.LogCursor(local_rank=2, offset=-1)] * 2},
            "tail_bytes stream cursors[0].local_rank cursors[0].stream cursors[0].offset"
            " cursors[1].local_rank cursors[1].stream cursors[1].offset",
        ),
    ],
)
async def test_a_request_that_makes_no_sense_is_refused(
    job: LoggingJob, fields: dict[str, Any], field: str
) -> None:
    """The error names the field."""
    job.attempt()
    assert await refused(job, **fields) == field


async def test_unreadable_logs_are_reported(job: LoggingJob) -> None:
    """The file system may be gone; clients retry."""
    job.attempt()
    job.file().unlink()
    job.file().mkdir()
    with pytest.raises(ServiceError) as caught:
        await pieces(job)
    assert caught.value.reason == "LOGS_UNREADABLE"
