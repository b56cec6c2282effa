"""A worker that uses torch's own timers: torch_timer_worker.py stock|ours. In its first round rank 1 hangs in one.

As `stock` it knows nothing of Rallypoint.
"""

from __future__ import annotations

import os
import sys
import threading

from torch.distributed.elastic import timer

if sys.argv[1] == "stock":
    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
else:
    from rallypoint.torch.timer import RallypointTimerClient

    timer.configure(RallypointTimerClient())

for batch in range(20):
    with timer.expires(after=60, scope=f"step {batch}"):
        os.getpid()
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    with timer.expires(after=1, scope="all reduce"):
        threading.Event().wait()
rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
sys.stdout.write(f"rank {rank} is done after {restarts} restarts\n")
