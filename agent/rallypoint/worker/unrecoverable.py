"""The exception of a worker that no restart can help."""

from __future__ import annotations

UNRECOVERABLE = 93
"""Exit code of such a worker, the same as in NVIDIA's resiliency extension; the agent recognises it."""


class Unrecoverable(Exception):
    """An error that no restart can help: missing data, a loss that is not a number, a wrong configuration.

    Raised from a function decorated with `record`, it ends the worker with exit code 93. The run is then closed at
    once, even if restarts are left, and its agents exit with 93 too, so that the scheduler does not retry. A worker
    may also call `sys.exit(93)`.
    """


# Users see this name in tracebacks: it is the name that they import.
Unrecoverable.__module__ = "rallypoint.worker"
