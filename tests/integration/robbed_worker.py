"""A worker whose MASTER_PORT another program of the host takes before it binds it: robbed_worker.py FOLDER plain|torch.

The test is that program. It does not disturb the second attempt.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path

from rallypoint.worker import record

folder, port = Path(sys.argv[1]), os.environ["MASTER_PORT"]


@record
def main() -> None:
    """Meet the other worker, or fail because the port is taken."""
    if os.environ["RANK"] == "0":
        (folder / "new").write_text(port)
        (folder / "new").rename(folder / f"port.{os.environ['RALLYPOINT_ROUND']}")
    while not (folder / f"go.{os.environ['RALLYPOINT_ROUND']}").exists():
        threading.Event().wait(0.01)
    if sys.argv[2] == "torch":
        import torch.distributed

        torch.distributed.init_process_group("gloo")
        torch.distributed.barrier()
    elif os.environ["RANK"] == "0":
        meeting = socket.socket()
        meeting.bind(("", int(port)))
        meeting.listen()
    sys.stdout.write(f"met after {os.environ['TORCHELASTIC_RESTART_COUNT']} restarts\n")


main()
