"""A program that starts `rallypoint` at once, because it has imported everything: starter.py ARGUMENT…

For each line on stdin, the name of a log file, it forks a process that runs the command line of `rallypoint` with
the arguments, and writes its process id to stdout; when that has ended, its exit code, or minus the signal that ended
it. No code of gRPC runs in this process, so it may fork.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import rallypoint.cli.serve  # noqa: F401 (imported by `serve` on demand)
from rallypoint.cli.main import main

_PR_SET_PDEATHSIG = 1


def start(log: str) -> int:
    """Fork a process that becomes a `rallypoint`; return its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(file, stream)
        sys.argv[0] = "rallypoint"
        main()
    finally:
        os._exit(1)


def serve_orders() -> None:
    """Start one process for each line, and wait for its end."""
    for line in sys.stdin:
        pid = start(line.strip())
        print(pid, flush=True)  # noqa: T201
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201


if __name__ == "__main__":
    serve_orders()
