"""Output of many workers on one terminal: whole lines, each with a prefix that says whose it is."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from rallypoint.agent.v1 import supervisor_service_pb2 as pb

LONGEST = 128 * 1024
"""Bytes of a line without an end that are kept back; a longer one goes out in pieces."""


_Source = TypeVar("_Source", bound=Hashable)


class LineSink(Protocol):
    """Where lines go: rallypoint.agent.logs.follower.OutputThread, for one."""

    async def write(self, data: bytes) -> None:
        """Returns when all of it is taken; one write's bytes are never mixed with another's."""


class Lines(Generic[_Source]):
    """Puts pieces of output together to lines. Bytes are never decoded."""

    def __init__(self, outputs: Mapping[int, LineSink]) -> None:
        """`outputs`: by the number of the stream."""
        self._outputs = outputs
        # By whose output it is: the line that has no end yet, its prefix, and whether its beginning is out.
        self._unfinished: dict[tuple[_Source, int], tuple[bytes, bytes, bool]] = {}

    @property
    def sources(self) -> set[_Source]:
        """Whose last line has no end yet."""
        return {source for source, _ in self._unfinished}

    async def add(self, source: _Source, stream: int, prefix: bytes, data: bytes) -> None:
        """Output of a worker.

        Args:
            source: Whose.
            stream: Which of its streams.
            prefix: What comes before each line.
            data: A piece; its first line may go on where that of the piece before had no end.
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
        """Nothing more comes of a worker: its last line goes out, whether or not it has an end."""
        for key in [key for key in self._unfinished if key[0] == source]:
            rest, prefix, in_line = self._unfinished.pop(key)
            await self._outputs[key[1]].write((b"" if in_line else prefix) + rest + b"\n")


# ---- What is worth telling of a job that runs on many hosts, made of what each of them says. Pure.


class JobStatusLines:
    """Turns the states of a job on its hosts into sentences; what all hosts say alike is told once."""

    def __init__(self, max_restarts: int) -> None:
        """`max_restarts`: of the run."""
        self._max_restarts = max_restarts
        self._waiting = 0, ""  # after which round, and for what
        self._stopped_round = 0
        self._running_round = 0
        self._restarts = 0
        self._shown: dict[str, str] = {}

    def update(self, label: str, job: pb.Job) -> Iterator[str]:
        """What is new in the state of the job on a host."""
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
                how = f" with exit code {job.exit_code}" if job.exit_code else ""
                yield from self._once(label, f"{label} has ended{how}: {job.detail}")

    def lose(self, label: str, why: str) -> Iterator[str]:
        """A host can't be followed any more."""
        yield from self._once(label, f"{label} is lost: {why}")

    def _is_new(self, job: pb.Job) -> bool:
        """Whether a host that waits does so after the latest round, and for something else than told."""
        latest = max(self._waiting[0], self._running_round)
        return job.round >= latest and (job.round, job.detail) != self._waiting

    def _once(self, label: str, sentence: str) -> Iterator[str]:
        if self._shown.get(label) != sentence:
            self._shown[label] = sentence
            yield sentence


def lost_in_words(piece: pb.StreamLogsResponse) -> str:
    """What is missing before a piece of output."""
    lost = f"{piece.lost_bytes} bytes" if piece.lost_bytes > 0 else "whole attempts"
    return f"{lost} of rank {piece.rank}'s output are gone already"
