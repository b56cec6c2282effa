"""What a worker raises when no restart can mend it."""

from __future__ import annotations

UNRECOVERABLE = 93
"""Exit code of such a worker. NVIDIA's resiliency extension has it too; the agent knows it as its own."""


class Unrecoverable(Exception):
    """No restart can mend this: the data is not there, the loss is not a number, the configuration is wrong.

    Raised out of a function decorated with `record`, it ends the worker with exit code 93: the run is closed at once,
    however many restarts it has left, and its agents end with 93 as well, which tells the scheduler not to try again.
    A worker may as well call `sys.exit(93)`.
    """


# What a user raises and reads in a traceback is named as he imported it.
Unrecoverable.__module__ = "rallypoint.worker"
