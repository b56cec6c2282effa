"""A worker that saves when its host is drained: leaving_worker.py FOLDER. It ends when FOLDER/finish exists."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from rallypoint.worker import checkpoint_saved, notice, should_checkpoint

FOLDER = Path(sys.argv[1])


def say(event: str, **fields: Any) -> None:
    """Print a line of JSON in one write."""
    who = {"rank": int(os.environ["RANK"]), "round": int(os.environ["RALLYPOINT_ROUND"]), "pid": os.getpid()}
    sys.stdout.write(json.dumps({"event": event, **who, **fields}) + "\n")
    sys.stdout.flush()


say("started", local_rank=int(os.environ["LOCAL_RANK"]))
while not (FOLDER / "finish").exists():
    time.sleep(0.02)
    if should_checkpoint():
        told = notice()
        assert told is not None
        say("saved", reason=told.reason, seconds_left=told.seconds_left)
        checkpoint_saved()
