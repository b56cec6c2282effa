"""Commands whose processes the kernel kills when the process that started them dies, however it dies."""

from __future__ import annotations

import os

MORTAL_ONCE_MORE = ("setpriv", "--pdeathsig", "KILL", "--")
"""Prefix of a command with which a mortal process changes its rights: the kernel clears its pdeathsig then."""

# The check of the parent follows the setting of pdeathsig: if the parent died before that, no signal would come.
_UNLESS_ORPHANED = ("sh", "-c", 'test "$PPID" = "$0" && exec "$@"')


def mortal(*command: str) -> list[str]:
    """Return a command whose process dies with this process; its process id is that of the wrapped command."""
    return [*MORTAL_ONCE_MORE, *_UNLESS_ORPHANED, str(os.getpid()), *command]
