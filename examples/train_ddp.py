"""Elastic training on handwritten digits with stock PyTorch: DistributedDataParallel over gloo.

    rallypoint run --standalone --nproc-per-node 2 examples/train_ddp.py
    torchrun --standalone --nproc-per-node 2 examples/train_ddp.py

Nothing here knows of Rallypoint: the process group comes from the environment, and after a failure every
worker is simply started again and resumes from the checkpoint.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

DATA = Path(__file__).parent / "data" / "digits.csv.gz"
HELD_OUT = 357  # leaves 1,440 images to learn from: 30 batches of 48
BATCH = 48  # over all workers together, so that nothing is retuned when their number changes
LEARNING_RATE, MOMENTUM = 0.1, 0.9


def load_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (pixels 0 to 1) and labels to learn from, then those held out: the same split every time."""
    with gzip.open(DATA, "rt", newline="") as file:
        rows = torch.tensor([[int(number) for number in row] for row in csv.reader(file)])
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    images, labels = rows[:, :64] / 16, rows[:, 64]
    return images[:-HELD_OUT], labels[:-HELD_OUT], images[-HELD_OUT:], labels[-HELD_OUT:]


def save(path: Path, checkpoint: dict[str, Any]) -> None:
    """Puts the checkpoint in place whole or not at all, whenever this process or its host may die."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(unfinished, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    folder = os.open(path.parent, os.O_RDONLY)  # the rename itself is durable once its folder is
    os.fsync(folder)
    os.close(folder)


def rank0_checkpoint(path: Path) -> dict[str, Any] | None:
    """Rank 0's last checkpoint on every rank: all resume from the same step. None at the beginning."""
    found = path.read_bytes() if dist.get_rank() == 0 and path.exists() else None
    message = [found]
    dist.broadcast_object_list(message, src=0)
    return torch.load(io.BytesIO(message[0]), weights_only=True) if message[0] is not None else None


def train(options: argparse.Namespace) -> float:
    """Trains from the last checkpoint to the last epoch; returns the held-out accuracy."""
    rank, world = dist.get_rank(), dist.get_world_size()
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    images, labels, held_images, held_labels = load_digits()

    torch.manual_seed(options.seed)
    network = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    done = 0
    if checkpoint := rank0_checkpoint(options.checkpoint):
        network.load_state_dict(checkpoint["network"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        done = checkpoint["epoch"]

    def held_out_accuracy() -> float:
        with torch.no_grad():
            right = network(held_images).argmax(dim=1) == held_labels
        return float(right.float().mean())

    for epoch in range(done + 1, options.epochs + 1):
        order = torch.randperm(
            len(images), generator=torch.Generator().manual_seed(1000 * options.seed + epoch)
        )
        for batch in order.split(BATCH):
            mine = batch[rank::world]
            loss = cross_entropy(model(images[mine]), labels[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            state = {"epoch": epoch, "network": network.state_dict(), "optimizer": optimizer.state_dict()}
            save(options.checkpoint, state)
            progress = f"epoch {epoch}/{options.epochs} · loss {loss.item():.2f}"
            accuracy = f"held-out accuracy {held_out_accuracy():.2f}"
            print(f"restart {restarts} · {progress} · {accuracy} · world {world}", flush=True)
    dist.barrier()  # no rank leaves before rank 0 has saved
    return held_out_accuracy()


def main() -> None:
    """Join the process group of the environment and train; rank 0 prints the accuracy."""
    parser = argparse.ArgumentParser(
        description="Elastic training on handwritten digits with DistributedDataParallel.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    checkpoint = Path(os.environ.get("CHECKPOINT", "var/digits.pt"))
    parser.add_argument("--epochs", type=int, default=30, help="passes over the images")
    parser.add_argument("--seed", type=int, default=0, help="decides the first weights and every order")
    parser.add_argument("--checkpoint", type=Path, default=checkpoint, help="file to save to and resume from")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    accuracy = train(options)
    if dist.get_rank() == 0:
        print(f"held-out accuracy {accuracy:.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
