"""A worker that uses torch's timers: torch_timer_worker.py stock|ours|queue. In its first round rank 1 hangs in one.

As `stock` it does not import Rallypoint. With `queue`, a child process hangs, whose requests go to a server of ours.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading

from torch.distributed.elastic import timer

if sys.argv[1] == "stock":
    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
elif sys.argv[1] == "ours":
    from rallypoint.torch.timer import RallypointTimerClient

    timer.configure(RallypointTimerClient())
else:
    from rallypoint.torch.timer import RallypointTimerServer

    queue = multiprocessing.get_context("fork").Queue()
    server = RallypointTimerServer(queue, max_interval=0.05)
    server.start()
    timer.configure(timer.LocalTimerClient(queue))


def hang() -> None:
    with timer.expires(after=1, scope="all reduce"):
        threading.Event().wait()


for batch in range(20):
    with timer.expires(after=60, scope=f"step {batch}"):
        os.getpid()
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if sys.argv[1] == "queue":
        child = multiprocessing.get_context("fork").Process(target=hang)
        child.start()
        child.join()
        # A server without an agent would have killed the child alone.
        sys.exit("the child was killed, and not its worker")
    hang()
rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
sys.stdout.write(f"rank {rank} is done after {restarts} restarts\n")
