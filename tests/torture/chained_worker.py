"""A worker that dies after another has died: chained_worker.py FOLDER UNWINDING DEATH.

The last rank raises as soon as the others are connected to it, and takes UNWINDING seconds more to end; they notice,
and die of it 50 ms later: by DEATH `raise`, `record`, `exit` or `abort`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from pathlib import Path

from rallypoint.worker import record

FOLDER, UNWINDING, DEATH = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FIRST = WORLD_SIZE - 1
PORT = FOLDER / "port"
CONNECTED: list[socket.socket] = []


@record
def raise_when_all_are_there() -> None:
    """Wait for the other ranks, then fail."""
    listening = socket.create_server(("127.0.0.1", 0))
    unfinished = FOLDER / "port.new"
    unfinished.write_text(str(listening.getsockname()[1]))
    unfinished.rename(PORT)
    CONNECTED.extend(listening.accept()[0] for _ in range(WORLD_SIZE - 1))
    for peer in CONNECTED:
        peer.recv(1)
    raise ValueError("batch 7 is empty")


def unwind() -> None:
    """Close and wait, as a process group, a profiler or a tracker does at the end."""
    for peer in CONNECTED:
        peer.close()
    time.sleep(UNWINDING)


def wait_for_the_end() -> None:
    """Wait until the last rank is gone, as a collective would notice."""
    while not PORT.exists():
        time.sleep(0.01)
    peer = socket.create_connection(("127.0.0.1", int(PORT.read_text())))
    with peer, contextlib.suppress(ConnectionError):
        peer.sendall(b"x")
        peer.recv(1)
    time.sleep(0.05)


def die() -> None:
    """Die of the last rank's end."""
    wait_for_the_end()
    if DEATH == "exit":
        os._exit(7)
    if DEATH == "abort":
        os.abort()
    raise ConnectionError(f"rank {FIRST} has closed the connection")


if RANK == FIRST:
    try:
        raise_when_all_are_there()
    finally:
        unwind()
elif DEATH == "record":
    record(die)()
else:
    die()
