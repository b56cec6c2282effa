"""examples/train_torch.py, in which one worker stops after a step, once: a test can kill its agent just then.

Arguments: file to create then, node, local rank and step, and those of the example.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_torch

marker = Path(sys.argv[1])
stopped = sys.argv[2:4] == [os.environ["RALLYPOINT_NODE"], os.environ["LOCAL_RANK"]]
last = int(sys.argv[4])
del sys.argv[1:5]
record = train_torch.record


def record_and_stop(path: Path | None, **fields: Any) -> None:
    """Record a step; stop if it is the step of the arguments."""
    record(path, **fields)
    if stopped and fields.get("step") == last and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGSTOP)


train_torch.record = record_and_stop
train_torch.main()
