"""The jobs of one agent: those that run, and the last that ended; and which of them a request means."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from rallypoint.agent.job import Job
from rallypoint.rpc.errors import ServiceError

MOST_ENDED = 100
"""Jobs that are remembered after their end. Each takes some 50 KB; a caller who comes late finds out what became of
its job."""


@dataclass(frozen=True, slots=True)
class TakenJob:
    """A job that the agent has taken on.

    Attributes:
        job: the job.
        launch_id: by which its launch can be sent again; empty: none.
    """

    job: Job
    launch_id: str = ""

    @property
    def run_id(self) -> str:
        """Name of its run."""
        return self.job.config.run_id

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.job.result is None


class Jobs:
    """What an agent runs, and has run."""

    def __init__(self, *jobs: Job) -> None:
        """It has taken these on."""
        self._taken = [TakenJob(job) for job in jobs]

    def add(self, job: Job, launch_id: str = "") -> None:
        """The agent has taken a job on; past MOST_ENDED the oldest that ended is forgotten."""
        self._taken.append(TakenJob(job, launch_id))
        ended = [taken for taken in self._taken if not taken.running]
        for forgotten in ended[:-MOST_ENDED]:
            self._taken.remove(forgotten)

    @property
    def running(self) -> list[Job]:
        """The jobs that run, in the order in which they came."""
        return [taken.job for taken in self._taken if taken.running]

    @property
    def latest_first(self) -> list[TakenJob]:
        """All that run or are remembered."""
        return self._taken[::-1]

    def launched(self, launch_id: str) -> TakenJob | None:
        """The job that was launched by this id; None if none was, or it is forgotten."""
        return next(
            (taken for taken in self.latest_first if launch_id and taken.launch_id == launch_id), None
        )

    def find(self, run_id: str) -> TakenJob:
        """The job that a request means.

        Args:
            run_id: Name of its run; the latest job of that run is meant. Empty: the job that runs, or ran last.

        Raises:
            ServiceError: NO_JOB, WHICH_JOB.
        """
        running = [taken for taken in self.latest_first if taken.running]
        if not run_id and len(running) > 1:
            names = ", ".join(sorted(taken.run_id for taken in running))
            raise ServiceError(
                grpc.StatusCode.INVALID_ARGUMENT,
                "WHICH_JOB",
                f"this agent runs {len(running)} jobs: name the run of one of them ({names})",
                metadata={"run_ids": names},
            )
        for taken in (*running, *self.latest_first):
            if not run_id or taken.run_id == run_id:
                return taken
        if run_id:
            message = f"this agent runs no job of run {run_id!r}, and remembers none"
        else:
            message = "this agent runs no job, and has run none"
        raise ServiceError(grpc.StatusCode.NOT_FOUND, "NO_JOB", message)
