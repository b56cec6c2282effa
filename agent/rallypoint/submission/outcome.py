"""The exit code of a job that ran on many hosts, made of those of its hosts."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.agent.job.result import FAILED, PERMANENT, REFUSED, SUCCEEDED, UNFIT


def exit_code_of(codes: Sequence[int | None], *, succeeded: bool | None = None) -> int:
    """The exit code that says how the job ended.

    Args:
        codes: Of its hosts; None: the host was lost.
        succeeded: Whether the run did, as its rendezvous service says; None: nobody knows.
    """
    known = [code for code in codes if code is not None]
    if succeeded:
        return SUCCEEDED
    # What ends a run comes before what becomes of single hosts, as that one is not fit, or was told to leave.
    for grave in (PERMANENT, FAILED):
        if grave in known:
            return grave
    if SUCCEEDED in known and succeeded is None:
        return SUCCEEDED
    for grave in (UNFIT, REFUSED):
        if grave in known:
            return grave
    return next((code for code in known if code != SUCCEEDED), FAILED)
