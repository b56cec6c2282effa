"""A program that launches functions with torch's `elastic_launch`, over a Rallypoint service.

Arguments: the service's address, and `fork`: two workers return their ranks; or `linger`: a worker, a fork of this
process, prints the ids of the processes of the node and of its own, and stays.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def rank() -> int:
    """Return the worker's rank."""
    assert "grpc" not in sys.modules
    return int(os.environ["RANK"])


def linger(agent: int) -> None:
    """Stay, also after the agent's end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    companion = next(
        pid for pid in children if b"rallypoint.torch.companion" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    if os.fork() == 0:  # torch makes the kernel kill its own forks
        os.write(1, f"{companion} {os.getpid()}\n".encode())
        while True:
            signal.pause()
    signal.pause()


def main(endpoint: str, what: str) -> None:
    """Launch, and print the result."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2 if what == "fork" else 1,
        run_id=f"functions-{what}",
        rdzv_endpoint=endpoint,
        rdzv_backend="rallypoint",
        rdzv_configs={"insecure": True},
        start_method="fork",
    )
    if what == "linger":
        elastic_launch(config, linger)(os.getpid())
    returned = elastic_launch(config, rank)()
    assert "grpc" not in sys.modules
    sys.stdout.write(f"returned {sorted(returned.values())}, without gRPC\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
