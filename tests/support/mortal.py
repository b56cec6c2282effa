"""Commands whose processes the kernel kills as soon as the one that started them is dead, however it died."""

from __future__ import annotations

import os

MORTAL_ONCE_MORE = ("setpriv", "--pdeathsig", "KILL", "--")
"""Before a command of a mortal process that gets other rights: there the kernel forgets what it was asked."""

# The look at the parent comes after the kernel was asked: had the parent died before, nobody would be told.
_UNLESS_ORPHANED = ("sh", "-c", 'test "$PPID" = "$0" && exec "$@"')


def mortal(*command: str) -> list[str]:
    """The command, with what makes its process die with this one; its process id is that of the command."""
    return [*MORTAL_ONCE_MORE, *_UNLESS_ORPHANED, str(os.getpid()), *command]
