"""The check that this process still owns its runs, for replies that no commit has just covered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from rallypoint.rendezvous.base.errors import NotOwner

CheckOwned: TypeAlias = Callable[[str], None]
"""Called with a run_id before anything is sent about that run that no append has just covered; raises NotOwner."""


def always_owned(run_id: str) -> None:
    """Do nothing: no other process can ever own a run."""


def checked_by(guard: Callable[[], None] | None) -> CheckOwned:
    """Return a check that calls `guard`, and raises NotOwner if it raises: another process may own the runs."""
    if guard is None:
        return always_owned

    def check(run_id: str) -> None:
        try:
            guard()
        except Exception as error:
            raise NotOwner(run_id) from error

    return check
