"""Elastic training on handwritten digits with stock PyTorch over gloo: DistributedDataParallel, or FSDP2 with --fsdp.

    rallypoint run --standalone --nproc-per-node 2 examples/train_torch.py
    torchrun --standalone --nproc-per-node 2 examples/train_torch.py --fsdp

Nothing here knows of Rallypoint: the process group comes from the environment, and after a failure every
worker is simply started again and resumes from the checkpoint, in a world of any size, with the sample that follows.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
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


def next_batch(images: int, seed: int, epoch: int, consumed: int) -> Tensor:
    """The batch of all ranks that follows the samples consumed in an epoch: the same in a world of any size."""
    order = torch.randperm(images, generator=torch.Generator().manual_seed(1000 * seed + epoch))
    return order[consumed : consumed + BATCH]


# --- Checkpoints: a folder for each, and a file with the name of the latest whole one -------------------


def save(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Each rank writes its part; once all have, rank 0 makes it the latest: whole or not at all."""
    name = f"step-{step}"
    dcp.save(state, checkpoint_id=folder / name)  # has synchronised its files when it returns on rank 0
    if dist.get_rank() == 0:
        sync(folder / name)
        unfinished = folder / "latest.tmp"
        unfinished.write_text(name)
        sync(unfinished)
        os.replace(unfinished, folder / "latest")
        sync(folder)  # the rename itself is durable once its folder is
        remove_others(folder, name)


def latest(folder: Path) -> str:
    """Name of the checkpoint to resume from, chosen by rank 0 for all; empty at the beginning."""
    message = [""]
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "latest").exists():
            message[0] = (folder / "latest").read_text()
        remove_others(folder, message[0])  # one that a lost worker left unfinished
    dist.broadcast_object_list(message, src=0)
    return message[0]


def remove_others(folder: Path, name: str) -> None:
    """Delete all checkpoints but one."""
    for path in folder.glob("step-*"):
        if path.name != name:
            shutil.rmtree(path)


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def record(path: Path | None, **fields: Any) -> None:
    """Append a line to the record of samples, if one is kept."""
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(fields) + "\n")


# --- Training -------------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> tuple[float, float]:
    """Trains from the last checkpoint to the last epoch; returns the held-out accuracy and the loss of all images."""
    rank, world = dist.get_rank(), dist.get_world_size()
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    images, labels, held_images, held_labels = load_digits()

    torch.manual_seed(options.seed)
    network: nn.Module = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model = fully_shard(network) if options.fsdp else DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    position = {"step": 0, "epoch": 1, "consumed": 0}

    def state() -> dict[str, Any]:
        of_network, of_optimizer = get_state_dict(model, optimizer)
        return {"network": of_network, "optimizer": of_optimizer, "position": position}

    if name := latest(options.checkpoint):
        loaded = state()
        dcp.load(loaded, checkpoint_id=options.checkpoint / name)  # each rank reads its part
        set_state_dict(
            model, optimizer, model_state_dict=loaded["network"], optim_state_dict=loaded["optimizer"]
        )
        position = loaded["position"]
    if rank == 0:
        record(options.record, resumed_after=position["step"])
    dist.barrier()

    def evaluate() -> tuple[float, float]:
        """All ranks call it: a sharded model is gathered for each use."""
        with torch.no_grad():
            right = model(held_images).argmax(dim=1) == held_labels
            loss = cross_entropy(model(images).double(), labels)
        return float(right.float().mean()), loss.item()

    while position["epoch"] <= options.epochs:
        batch = next_batch(len(images), options.seed, position["epoch"], position["consumed"])
        mine = batch[rank::world]
        # Ranks average their gradients: this makes the sum over all ranks the mean over the batch, however it is split.
        loss = cross_entropy(model(images[mine]), labels[mine], reduction="sum") * (world / len(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        epoch = position["epoch"]
        position = {
            "step": position["step"] + 1,
            "epoch": epoch,
            "consumed": position["consumed"] + len(batch),
        }
        record(options.record, step=position["step"], epoch=epoch, rank=rank, samples=mine.tolist())
        if whole := position["consumed"] == len(images):
            position |= {"epoch": epoch + 1, "consumed": 0}
        if whole or position["step"] % options.save_every == 0:
            save(options.checkpoint, position["step"], state())
        if whole:
            accuracy, loss_of_all = evaluate()
            if rank == 0:
                progress = f"epoch {epoch}/{options.epochs} · loss {loss_of_all:.2f}"
                held = f"held-out accuracy {accuracy:.2f}"
                print(f"restart {restarts} · {progress} · {held} · world {world}", flush=True)
    dist.barrier()  # no rank leaves before rank 0 has saved
    return evaluate()


def main() -> None:
    """Join the process group of the environment and train; rank 0 prints accuracy and loss."""
    parser = argparse.ArgumentParser(
        description="Elastic training on handwritten digits with DistributedDataParallel or FSDP2.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    checkpoint = Path(os.environ.get("CHECKPOINT", "var/digits"))
    parser.add_argument(
        "--fsdp", action="store_true", help="shard the model and its optimizer over the workers"
    )
    parser.add_argument("--epochs", type=int, default=30, help="passes over the images")
    parser.add_argument("--seed", type=int, default=0, help="decides the first weights and every order")
    parser.add_argument(
        "--checkpoint", type=Path, default=checkpoint, help="folder to save to and resume from"
    )
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument(
        "--record", type=Path, help="file to which each worker appends the samples of each step"
    )
    options = parser.parse_args()
    if options.save_every < 1:
        parser.error(f"--save-every is {options.save_every}; expected at least 1")

    dist.init_process_group("gloo")
    accuracy, loss = train(options)
    if dist.get_rank() == 0:
        print(f"held-out accuracy {accuracy:.2f} · loss {loss:.9f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
