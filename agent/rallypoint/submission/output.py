"""Output of many workers on one terminal: whole lines, each with a prefix that names its worker."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from rallypoint.agent.v1 import supervisor_service_pb2 as pb

LONGEST = 128 * 1024
"""Longest unfinished line in bytes that is held back; a longer line is printed in pieces."""


_Source = TypeVar("_Source", bound=Hashable)


class LineSink(Protocol):
    """A destination of lines, for example rallypoint.agent.logs.follower.OutputThread."""

    async def write(self, data: bytes) -> None:
        """Return when all of `data` is accepted; the bytes of two writes are never mixed."""


class Lines(Generic[_Source]):
    """Assemble pieces of output to lines. Bytes are never decoded."""

    def __init__(self, outputs: Mapping[int, LineSink]) -> None:
        """`outputs`: by the number of the stream."""
        self._outputs = outputs
        # By source and stream: the unfinished line, its prefix, and True if its beginning is printed already.
        self._unfinished: dict[tuple[_Source, int], tuple[bytes, bytes, bool]] = {}

    @property
    def sources(self) -> set[_Source]:
        """The sources whose last line is unfinished."""
        return {source for source, _ in self._unfinished}

    async def add(self, source: _Source, stream: int, prefix: bytes, data: bytes) -> None:
        """Print a piece of a worker's output, and hold back an unfinished last line.

        Args:
            data: The piece; it may continue the unfinished line of the piece before.
        """
        begun, of_begun, in_line = self._unfinished.pop((source, stream), (b"", prefix, False))
        data = begun + data
        end = data.rfind(b"\n") + 1
        out = b""
        if end:
            lines = data[: end - 1].replace(b"\n", b"\n" + prefix) + b"\n"
            out = lines if in_line else of_begun + lines
            in_line, of_begun = False, prefix
        rest = data[end:]
        if len(rest) >= LONGEST:
            out += rest if in_line else of_begun + rest
            rest, in_line = b"", True
        if rest or in_line:
            self._unfinished[source, stream] = rest, of_begun, in_line
        if out:
            await self._outputs[stream].write(out)

    async def finish(self, source: _Source) -> None:
        """Print a worker's unfinished last line: it has no further output."""
        for key in [key for key in self._unfinished if key[0] == source]:
            rest, prefix, in_line = self._unfinished.pop(key)
            await self._outputs[key[1]].write((b"" if in_line else prefix) + rest + b"\n")


# ---- Sentences about a job on many hosts, made of the hosts' states. Pure.


class JobStatusLines:
    """Turn the states of a job on its hosts into sentences; a sentence that holds for all hosts is printed once."""

    def __init__(self, max_restarts: int) -> None:
        """`max_restarts`: of the run."""
        self._max_restarts = max_restarts
        self._waiting = 0, ""  # the latest round, and the reason to wait
        self._stopped_round = 0
        self._running_round = 0
        self._restarts = 0
        self._shown: dict[str, str] = {}

    def update(self, label: str, job: pb.Job) -> Iterator[str]:
        """Yield sentences about changes in a host's state of the job."""
        match job.state:
            case pb.JOB_STATE_WAITING if self._is_new(job):
                self._waiting = job.round, job.detail
                yield f"{label} {job.detail}"
            case pb.JOB_STATE_STOPPING if job.round > self._stopped_round:
                self._stopped_round = job.round
                yield f"round {job.round} ends: {job.detail}"
            case pb.JOB_STATE_RUNNING if job.round > self._running_round:
                self._running_round = job.round
                again = ""
                if job.restart_count > self._restarts:
                    again = f" (restart {job.restart_count} of {self._max_restarts})"
                self._restarts = job.restart_count
                yield f"round {job.round} runs: {job.world_size} worker{'s' * (job.world_size != 1)}{again}"
            case pb.JOB_STATE_DRAINING:
                yield from self._once(label, f"{label} is drained: {job.detail}")
            case pb.JOB_STATE_ENDED:
                code = f" with exit code {job.exit_code}" if job.exit_code else ""
                yield from self._once(label, f"{label} has ended{code}: {job.detail}")

    def lose(self, label: str, why: str) -> Iterator[str]:
        """Report that a host can't be followed any more."""
        yield from self._once(label, f"{label} is lost: {why}")

    def _is_new(self, job: pb.Job) -> bool:
        """Return True if a host waits after the latest round, and for another reason than the last printed one."""
        latest = max(self._waiting[0], self._running_round)
        return job.round >= latest and (job.round, job.detail) != self._waiting

    def _once(self, label: str, sentence: str) -> Iterator[str]:
        if self._shown.get(label) != sentence:
            self._shown[label] = sentence
            yield sentence


def lost_in_words(piece: pb.StreamLogsResponse) -> str:
    """Describe the gap before a piece of output."""
    lost = f"{piece.lost_bytes} bytes" if piece.lost_bytes > 0 else "whole attempts"
    return f"{lost} of rank {piece.rank}'s output are no longer available"
