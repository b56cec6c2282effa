"""The worker of the kit: a copy of this file, in a folder of its scenario, is the program that the client starts.

It imports the standard library alone. Files beside it control it and record its life:

- `plan.json`: `stubborn`, it ignores SIGTERM; `slow`, seconds from SIGTERM to its end; `child`, it has a child process
- `PID.json`: its environment, written when it has begun; `bound` is true if it could bind the master port
- `PID.term`: it got SIGTERM
- `PID.end`: the exit code with which it shall end
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
# Seconds. Without its folder it ends at once; this is for a kit that was killed.
_LONGEST_LIFE = 600.0
_POLL = 0.02


def _write(name: str, text: str) -> None:
    """Write a file at once: a reader never sees a part of it."""
    part = _FOLDER / f"{name}.part"
    part.write_text(text)
    part.rename(_FOLDER / name)


def _binds_port() -> bool | None:
    """Return whether the master port is free; None: this worker does not have to bind it."""
    if os.environ.get("RANK") != "0" or not os.environ.get("MASTER_PORT", "").isdigit():
        return None
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", int(os.environ["MASTER_PORT"])))
            listener.listen()
        except OSError:
            return False
    return True


def main() -> int:
    """Live as planned; return the exit code."""
    plan = json.loads((_FOLDER / "plan.json").read_text())
    stops: list[float] = []

    def stop(number: int, frame: object) -> None:
        _write(f"{os.getpid()}.term", "")
        if not plan.get("stubborn"):
            stops.append(time.monotonic() + plan.get("slow", 0.0))

    signal.signal(signal.SIGTERM, stop)
    child = bool(plan.get("child")) and os.fork() == 0
    if child:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    record = {"environment": dict(os.environ), "child": child, "bound": None if child else _binds_port()}
    _write(f"{os.getpid()}.json", json.dumps(record))
    end = time.monotonic() + _LONGEST_LIFE
    order = _FOLDER / f"{os.getpid()}.end"
    while not order.exists() and time.monotonic() < min([end, *stops]) and _FOLDER.exists():
        time.sleep(_POLL)
    return int(order.read_text()) if order.exists() else 128 + signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main())
