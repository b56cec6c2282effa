"""What the command was started with: its environment, and its standard streams.

Importing gRPC's chassis sets variables that tame gRPC in this process; workers must not inherit them.
"""

from __future__ import annotations

import io
import os
import sys

ENVIRONMENT = dict(os.environ)


def complete_streams() -> None:
    """Put /dev/null where this program was started without a standard stream.

    The first socket that it opens would get the stream's number otherwise, and what workers print would go there.
    """
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)  # the programs that we start need it as much
            setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115 (for as long as we live)


complete_streams()
if isinstance(sys.stdout, io.TextIOWrapper):
    # Names come from users: what the terminal's encoding does not have must not end a command with a traceback.
    sys.stdout.reconfigure(errors="backslashreplace")
