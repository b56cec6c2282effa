"""The worker of why_not_torchrun.py. It knows of no launcher: the process group comes from the environment.

    torchrun --nnodes 2 --nproc-per-node 2 ... examples/why_worker.py --agent a --train

It prints a line of JSON when it runs, with `--train` another one after a few steps, and one at its end.
"""

from __future__ import annotations

import argparse
import json
import os
import time


def report(event: str, agent: str) -> None:
    """Print one line of JSON with this worker's place in the job."""
    place = {name.lower(): int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")}
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    line = json.dumps({"event": event, "agent": agent, "pid": os.getpid(), "restarts": restarts, **place})
    os.write(
        1, f"{line}\n".encode()
    )  # in one piece: print writes the line's end apart, and workers share a pipe


def train(agent: str, seconds: float) -> None:
    """Train with DistributedDataParallel over gloo for some seconds, ten steps a second."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(10, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(int(seconds * 10)):
        loss = model(torch.randn(20, 10)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 3:
            report("trained", agent)
        time.sleep(0.1)
    dist.destroy_process_group()


def main() -> None:
    """Report, then train or wait."""
    parser = argparse.ArgumentParser(description="A worker that reports where it runs.")
    parser.add_argument("--agent", required=True, help="name of the agent that started it")
    parser.add_argument("--train", action="store_true", help="train instead of waiting")
    parser.add_argument("--seconds", type=float, default=3600, help="time to its end")
    options = parser.parse_args()
    report("running", options.agent)
    if options.train:
        train(options.agent, options.seconds)
    else:
        time.sleep(options.seconds)
    report("finished", options.agent)


if __name__ == "__main__":
    main()
