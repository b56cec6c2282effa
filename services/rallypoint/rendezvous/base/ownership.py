"""Whether this process may still tell anything of its runs: asked where no commit has just shown it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from rallypoint.rendezvous.base.errors import NotOwner

CheckOwned: TypeAlias = Callable[[str], None]
"""Called with a run_id before anything is told of that run which no append has just vouched for; raises NotOwner."""


def always_owned(run_id: str) -> None:
    """The check where nobody else can ever own a run."""


def checked_by(guard: Callable[[], None] | None) -> CheckOwned:
    """The check that a guard makes, which raises, whatever it raises, once the runs may be another's."""
    if guard is None:
        return always_owned

    def check(run_id: str) -> None:
        try:
            guard()
        except Exception as error:
            raise NotOwner(run_id) from error

    return check
