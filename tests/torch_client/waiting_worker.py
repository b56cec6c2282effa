"""A worker that records that it runs, and then waits: arguments are a folder, and the name of its agent.

It ends with 0 once the file `finish` is there, or `finish.NAME` for the workers of one agent alone; with 7 for a file
`fail.NAME`, which it removes; and when its agent is dead.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

NOTED = (
    "RANK",
    "WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "RALLYPOINT_ROUND",
    "RALLYPOINT_FENCING_TOKEN",
)


def main(folder: Path, name: str) -> int:
    """Return the exit code."""
    agent = os.getppid()
    line = {key: os.environ[key] for key in NOTED} | {"agent": name, "pid": os.getpid()}
    descriptor = os.open(folder / "started", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, json.dumps(line).encode() + b"\n")
    while os.getppid() == agent:
        if (folder / "finish").exists() or (folder / f"finish.{name}").exists():
            return 0
        try:
            (folder / f"fail.{name}").unlink()
        except FileNotFoundError:
            time.sleep(0.02)
        else:
            return 7
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
