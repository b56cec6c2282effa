"""What is worth telling of a job that runs on many hosts, made of what each of them says. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rallypoint.agent.v1 import supervisor_service_pb2 as pb


class Story:
    """Turns the states of a job on its hosts into sentences; what all hosts say alike is told once."""

    def __init__(self, max_restarts: int) -> None:
        """`max_restarts`: of the run."""
        self._max_restarts = max_restarts
        self._waiting = 0, ""  # after which round, and for what
        self._stopped_round = 0
        self._running_round = 0
        self._restarts = 0
        self._told: dict[str, str] = {}

    def tell(self, label: str, job: pb.Job) -> Iterator[str]:
        """What is new in the state of the job on a host."""
        match job.state:
            case pb.JOB_STATE_WAITING if self._is_news(job):
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

    def _is_news(self, job: pb.Job) -> bool:
        """Whether a host that waits does so after the latest round, and for something else than told."""
        latest = max(self._waiting[0], self._running_round)
        return job.round >= latest and (job.round, job.detail) != self._waiting

    def _once(self, label: str, sentence: str) -> Iterator[str]:
        if self._told.get(label) != sentence:
            self._told[label] = sentence
            yield sentence


def lost_in_words(piece: pb.StreamLogsResponse) -> str:
    """What is missing before a piece of output."""
    lost = f"{piece.lost_bytes} bytes" if piece.lost_bytes > 0 else "whole attempts"
    return f"{lost} of rank {piece.rank}'s output are gone already"
