"""A worker that writes torch's timer file directly: rank 0 sets a timer for rank 1's process, and lets it expire.

foreign_timer_worker.py FOLDER. It ends when its own timer, which starts later and kills no process, has expired too.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
(folder / f"new.{rank}").write_text(str(os.getpid()))
(folder / f"new.{rank}").rename(folder / f"pid.{rank}")


def wait_for(path: Path) -> None:
    """Wait until a file exists."""
    for _ in range(6000):
        if path.exists():
            return
        threading.Event().wait(0.01)
    sys.exit(f"no {path}")


def guard(pid: int, scope: str, after: float, signal: int) -> None:
    """Write a timer in the format of torch's client."""
    line = {
        "version": 1,
        "pid": pid,
        "scope_id": scope,
        "expiration_time": time.time() + after,
        "signal": signal,
    }
    with open(os.environ["TORCHELASTIC_TIMER_FILE"], "wb", buffering=0) as pipe:
        pipe.write(json.dumps(line).encode() + b"\n")


if rank == "0":
    wait_for(folder / "pid.1")
    guard(int((folder / "pid.1").read_text()), "accused", 0.2, 9)
    guard(os.getpid(), "own", 2.0, 0)
    wait_for(Path(os.environ["TORCHELASTIC_ERROR_FILE"]).with_name("hang.txt"))
    (folder / "done").touch()
wait_for(folder / "done")
