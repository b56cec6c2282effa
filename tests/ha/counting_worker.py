"""A worker that counts until the test releases FOLDER/lock, and then succeeds: counting_worker.py FOLDER.

Each of its processes adds a line to FOLDER/starts; FOLDER/count-RANK has the present count of a rank.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from pathlib import Path

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
with open(folder / "starts", "a") as starts:
    starts.write(f"{rank} {os.environ['TORCHELASTIC_RESTART_COUNT']}\n")
count = 0
with open(folder / "lock") as lock:
    while True:
        count += 1
        (folder / f"count-{rank}").write_text(str(count))
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.05)
