"""A worker of `restart`, `newcomer` and `idle` that reports its start, and then does nothing.

Standard library only: it runs under torch's agent too, and its imports would count as time of the agent.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import time

PR_SET_PDEATHSIG = 1
LONGEST = 600.0
"""Seconds after which it ends by itself, even if its agent is gone."""


def announce(place: str) -> None:
    """Send this worker's rank, world size, process id and start time to the socket of the benchmark."""
    message = {
        "rank": int(os.environ["RANK"]),
        "world": int(os.environ["WORLD_SIZE"]),
        "pid": os.getpid(),
        "at": time.monotonic(),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as there:
        there.sendto(json.dumps(message).encode(), place)


if __name__ == "__main__":
    announce(sys.argv[1])
    # torch's agent leaves its workers behind when it is killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    time.sleep(LONGEST)
