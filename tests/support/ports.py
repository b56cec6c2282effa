"""Loopback ports for services that a test starts itself."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

# Below the ports that Linux chooses itself, also for client connections.
_FIRST, _LAST = 20_000, 32_000
_draw = random.SystemRandom()  # no two test processes draw alike
# A process locks the byte of each port that it has drawn until it ends: its server may start late or stop for a while,
# and no other test process may take the port meanwhile.
_locks = Path(tempfile.gettempdir(), f"rallypoint-test-ports-{os.geteuid()}").open("ab")  # noqa: SIM115
_drawn: set[int] = set()


def free_port(count: int = 1) -> int:
    """Return the first of `count` successive ports on which no other process listens, now or later."""
    while True:
        first = _draw.randint(_FIRST, _LAST)
        if all(_reserve(port) for port in range(first, first + count)):
            return first


def _reserve(port: int) -> bool:
    if port in _drawn:
        return False
    try:
        fcntl.lockf(_locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        _drawn.add(port)
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
