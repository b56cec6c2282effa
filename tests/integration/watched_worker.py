"""A worker that reports its progress: watched_worker.py FOLDER. Rank 0 runs to step 30, the others to 20 only.

Then each waits in a block of ten minutes until FOLDER/finish exists.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from rallypoint.timer import expires, progress

for step in range(31 if os.environ["RANK"] == "0" else 21):
    with expires(after="auto", scope="step"):
        progress(step)
with expires(after=600, scope="wait"):
    while not (Path(sys.argv[1]) / "finish").exists():
        time.sleep(0.02)
