"""The error of a failed launch as torch's own, for programs that catch torch's."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.distributed.elastic.multiprocessing import errors

from rallypoint.agent.failures.failure import WorkerFailure


@cache
def torch_error(error: type[Any]) -> type[Any]:
    """Return a subclass of an error that is torch's ChildFailedError too."""

    class ChildFailedError(error, errors.ChildFailedError):  # type: ignore[misc]  # torch has no types here
        """A job that did not succeed: torch's ChildFailedError, with the attributes of WorkersFailedError."""

        @property
        def failures(self) -> dict[int, errors.ProcessFailure]:
            """Return the failures by the global rank of their workers, the run's first failure first."""
            return {rank: _process_failure(failure) for rank, failure in super().failures.items()}

    return ChildFailedError


def _process_failure(failure: WorkerFailure) -> errors.ProcessFailure:
    """Return torch's form of a failure; torch reads its error file, if this host has it."""
    found = errors.ProcessFailure(failure.local_rank, failure.pid, failure.exit_code, failure.error_file)
    if not failure.error_file:
        found.message, found.timestamp = failure.message, int(failure.time)
    return found
