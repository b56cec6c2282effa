"""A worker with empty training steps over gloo that saves as in docs/draining.md: torch_leaving_worker.py FOLDER.

It ends when FOLDER/finish exists and all ranks have seen that.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rallypoint.worker import checkpoint_saved, should_checkpoint

FOLDER = Path(sys.argv[1])
CHECKPOINT = FOLDER / "checkpoint"
WHO = {"rank": int(os.environ["RANK"]), "round": int(os.environ["RALLYPOINT_ROUND"]), "pid": os.getpid()}


def say(event: str, **fields: Any) -> None:
    """Print a line of JSON in one write."""
    sys.stdout.write(json.dumps({"event": event, **WHO, **fields}) + "\n")
    sys.stdout.flush()


def save(step: int) -> None:
    """Save the step, on rank 0, which has the whole state."""
    if dist.get_rank() == 0:
        CHECKPOINT.with_suffix(".draft").write_text(str(step))
        CHECKPOINT.with_suffix(".draft").rename(CHECKPOINT)


dist.init_process_group("gloo")
step = int(CHECKPOINT.read_text()) if CHECKPOINT.exists() else 0
say("started", step=step, world_size=dist.get_world_size())
flags = torch.zeros(2)
while True:
    step += 1
    time.sleep(0.02)
    flags[0], flags[1] = should_checkpoint(), (FOLDER / "finish").exists()
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    if flags[1].item():
        break
    if flags[0].item():
        save(step)
        say("saved", step=step, told=should_checkpoint())
        dist.barrier()
        # The host leaves when its ranks have reported; after that each rank may be stopped at any time.
        checkpoint_saved()
dist.destroy_process_group()
