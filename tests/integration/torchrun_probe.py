#!/usr/bin/env python3
"""A worker that records its environment, prints a line to each stream, and ends as PROBE_END selects.

PROBE_READ is the rank that reads a line.
PROBE_END is RANK:HOW[:NUMBER], as in `1:exit:5`, `0:signal:9`, `0:raise`, `1:record` (fails, with the error file that
torch's `record` writes), `1:first` (fails, but not when restarted).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

environment = dict(os.environ)
rank, attempt = environment["RANK"], environment["TORCHELASTIC_RESTART_COUNT"]
seen = {
    "arguments": sys.argv[1:],
    "environment": environment,
    "python": sys.executable,
    "name": __name__,
    "working_directory": os.getcwd(),
    "own_folder_on_path": str(Path(__file__).resolve().parent) in sys.path,
    "terminals": [os.isatty(stream) and os.get_terminal_size(stream).columns for stream in range(3)],
    "line": sys.stdin.readline() if environment.get("PROBE_READ") == rank else "",
}
# Each in one write: workers share the console.
os.write(1, f"out {rank} apple\n".encode())
os.write(2, f"err {rank} orange\n".encode())
Path(environment["PROBE_FOLDER"], f"{rank}.{attempt}").write_text(json.dumps(seen))

who, _, how = environment.get("PROBE_END", "").partition(":")
if who == rank:
    # A failure ends the other workers, with some launchers at once: wait until all have written their files.
    ranks = range(int(environment["WORLD_SIZE"]))
    while not all(Path(environment["PROBE_FOLDER"], f"{other}.{attempt}").exists() for other in ranks):
        time.sleep(0.01)
    how, _, number = how.partition(":")
    if how == "exit":
        sys.exit(int(number))
    if how == "signal":
        os.kill(os.getpid(), int(number))
        signal.pause()
    if how == "raise":
        raise RuntimeError("as told")
    if how == "record":
        extra = {"py_callstack": "Traceback …\nOSError: no disk", "timestamp": "1700000000"}
        content = {"message": {"message": "OSError: no disk", "extraInfo": extra}}
        Path(environment["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(content))
        sys.exit(1)
    if how == "first" and attempt == "0":
        sys.exit(1)
