"""The worker of the kit: a copy of this file, in a folder of its scenario, is the program that the client starts.

It imports the standard library alone. Files beside it control it and record its life:

- `plan.json`: `stubborn`, it ignores SIGTERM; `slow`, seconds from SIGTERM to its end; `child`, it has a child process;
  `timer`, seconds of a timer that it holds; `prints`, its last line on stderr
- `PID.json`: its environment, written when it has begun; `bound` is true if it could bind the master port
- `PID.term`: it got SIGTERM
- `PID.end`: the exit code with which it shall end
- `PID.turns`: how often it shall end its timer and start it again; 0: end it
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
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


class _SentTimer:
    """A timer in the scope "step", held over the agent's socket."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._stream = "RALLYPOINT_TIMER_SOCKET" not in os.environ
        kind = socket.SOCK_STREAM if self._stream else socket.SOCK_SEQPACKET
        self._socket = socket.socket(socket.AF_UNIX, kind)
        self._socket.connect(os.environ[f"RALLYPOINT_TIMER_{'STREAM_' if self._stream else ''}SOCKET"])
        self.start()

    def start(self) -> None:
        nanoseconds = int(self._seconds * 1e9)
        self._send(struct.pack("<BBBB4xQQQ", 1, 1, 0, 0, 5, time.monotonic_ns(), nanoseconds) + b"step")

    def end(self) -> None:
        self._send(struct.pack("<BBxxxxxxQ", 2, 1, 5))

    def _send(self, message: bytes) -> None:
        self._socket.sendall((struct.pack(">II", len(message), 0) if self._stream else b"") + message)


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
    timer = _SentTimer(plan["timer"]) if "timer" in plan and not child else None
    record = {"environment": dict(os.environ), "child": child, "bound": None if child else _binds_port()}
    _write(f"{os.getpid()}.json", json.dumps(record))
    end = time.monotonic() + _LONGEST_LIFE
    order = _FOLDER / f"{os.getpid()}.end"
    turns = _FOLDER / f"{os.getpid()}.turns"
    while not order.exists() and time.monotonic() < min([end, *stops]) and _FOLDER.exists():
        if timer is not None and turns.exists():
            count = int(turns.read_text())
            turns.unlink()
            timer.end()
            for _ in range(count):
                timer.start()
                time.sleep(_POLL / 2)
        time.sleep(_POLL)
    sys.stderr.write(plan.get("prints", ""))
    return int(order.read_text()) if order.exists() else 128 + signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main())
