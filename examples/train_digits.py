"""Elastic data-parallel training on handwritten digits, with nothing but NumPy and Rallypoint.

    python examples/train_digits.py                                                 # one worker, no agent
    rallypoint run --standalone --nproc-per-node 2 examples/train_digits.py         # two, supervised

Every worker learns from its part of each batch; every few steps the workers average their weights
through Rallypoint's store. Rank 0 writes a checkpoint after every epoch. Workers may be killed and
hosts may come and go at any moment: the workers of the next round resume from the checkpoint, and
since each batch is divided among all workers of the round, no setting depends on their number.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from digits import Array, Integers, accuracy, fresh_state, load_digits, loss_and_gradient
from rallypoint.timer import configure, expires, progress
from rallypoint.worker import Store, record

BATCH = 48  # over all workers together; 1, 2, 3, 4, 6, 8, 12 and 16 workers get equal parts
LEARNING_RATE, MOMENTUM = 0.1, 0.9
# Seconds a worker waits for the others. Far above --step-timeout: of a hung worker and the neighbours that
# wait for it, the watchdog must find the hung one.
PATIENCE = 60.0


# --- The workers of this round, and their exchange ------------------------------------------------------


@dataclass
class World:
    """This worker's ranks in the round, and its exchange with the other workers.

    Every worker must make the same calls in the same order, as with any collective.
    """

    rank: int = 0
    size: int = 1
    round: int = 0
    restarts: int = 0
    store: Store | None = None
    turn: int = 0
    outdated: list[str] = field(default_factory=list)

    @classmethod
    def from_environment(cls) -> World:
        """Return the world from the agent's environment variables, or a world of one without them."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            size=size,
            round=int(os.environ.get("RALLYPOINT_ROUND", "0")),
            restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            store=Store.from_environment() if size > 1 else None,
        )

    def broadcast(self, message: bytes) -> bytes:
        """Return rank 0's message, on every rank."""
        if self.store is None:
            return message
        self.turn += 1
        key = f"{self.turn}/from-0"
        if self.rank > 0:
            return self.store.get(key, PATIENCE)
        self.store.set(key, message)
        self.outdated.append(key)
        return message

    def average(self, state: Array) -> Array:
        """Return the mean of all workers' states: the same bits on every rank, so that no two drift apart."""
        if self.store is None:
            return state
        self.turn += 1
        keys = [f"{self.turn}/to-0/{rank}" for rank in range(1, self.size)]
        if self.rank > 0:
            self.store.set(keys[self.rank - 1], state.tobytes())
            return decode(self.broadcast(b""), like=state)
        total = state.copy()
        for key in keys:
            total += decode(self.store.get(key, PATIENCE), like=state)
        mean = total / self.size
        # A worker that has sent a value in this turn has read all values of the turns before.
        unneeded, self.outdated = keys + self.outdated, []
        self.broadcast(mean.tobytes())
        for key in unneeded:
            self.store.delete(key)
        return mean


def decode(message: bytes, like: Array) -> Array:
    """Return an array from its bytes, with the shape and type of another."""
    return np.frombuffer(message, like.dtype).reshape(like.shape).copy()


# --- Checkpoints ----------------------------------------------------------------------------------------


def pack(epoch: int, state: Array) -> bytes:
    """Return a checkpoint: the epochs done, and the state after them."""
    file = io.BytesIO()
    np.savez(file, epoch=epoch, state=state)
    return file.getvalue()


def unpack(checkpoint: bytes) -> tuple[int, Array]:
    """Return the epochs done and the state; raise ValueError if it is no checkpoint of this model."""
    expected = fresh_state(seed=0)
    try:
        with np.load(io.BytesIO(checkpoint), allow_pickle=False) as content:
            epoch, state = int(content["epoch"]), content["state"]
    except Exception:  # NumPy raises a different one for every kind of damage
        raise ValueError("it is damaged or something else altogether") from None
    if (state.shape, state.dtype) != (expected.shape, expected.dtype):
        raise ValueError(f"it holds {state.shape} numbers and not {expected.shape}")
    return epoch, state


def save(path: Path, checkpoint: bytes, round_number: int) -> None:
    """Replace the checkpoint atomically, even if this process or its host dies meanwhile."""
    # A round has one rank 0, so no other worker writes this file: not even a rank 0 of an earlier round that
    # takes its time to die.
    unfinished = path.with_name(f"{path.name}.{round_number}.tmp")
    with open(unfinished, "wb") as file:
        file.write(checkpoint)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    folder = os.open(path.parent, os.O_RDONLY)  # the rename itself is durable once its folder is
    os.fsync(folder)
    os.close(folder)


def load_or_start(path: Path, seed: int) -> bytes:
    """Return the last checkpoint, or one of an untrained model."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint = path.read_bytes()
        unpack(checkpoint)
    except FileNotFoundError:
        return pack(0, fresh_state(seed))
    except (ValueError, OSError) as error:
        sys.exit(f"cannot resume from {path}: {error}; remove it or name another file with --checkpoint")
    return checkpoint


# --- Training -------------------------------------------------------------------------------------------


def batches(images: int, seed: int, epoch: int, rank: int, size: int) -> list[Integers]:
    """Return this rank's part of every batch of an epoch, as indices.

    The order is the epoch's own and the same on all ranks; the ranks' parts of a batch are disjoint and
    together make up the batch, in a world of any size.
    """
    order = np.random.default_rng([seed, epoch]).permutation(images)
    return [order[start : start + BATCH][rank::size] for start in range(0, images, BATCH)]


def train(world: World, options: argparse.Namespace) -> float:
    """Train from the last checkpoint to the last epoch; return the held-out accuracy."""
    images, labels, held_images, held_labels = load_digits()
    prefix, suffix = f"round {world.round} · restart {world.restarts}", f"world {world.size}"

    # All use rank 0's checkpoint: they start from the same step, on a shared disk or without one.
    checkpoint = load_or_start(options.checkpoint, options.seed) if world.rank == 0 else b""
    done, state = unpack(world.broadcast(checkpoint))
    if world.rank == 0 and done > 0:
        say(f"{prefix} · resumed after epoch {done} of {options.epochs} · {suffix}")

    for epoch in range(done + 1, options.epochs + 1):
        began = time.monotonic()
        losses = []
        steps = batches(len(images), options.seed, epoch, world.rank, world.size)
        for step, batch in enumerate(steps, start=1):
            with expires(after=options.step_timeout, scope="step"):
                if options.hang_file:
                    hang_if_told(options.hang_file, world.rank)
                weights, velocity = state
                loss, gradient = loss_and_gradient(weights, images[batch], labels[batch])
                velocity *= MOMENTUM
                velocity -= LEARNING_RATE * gradient
                weights += velocity
            losses.append(loss)
            progress((epoch - 1) * len(steps) + step)
            if step % options.average_every == 0 or step == len(steps):
                with expires(after=2 * PATIENCE, scope="average"):
                    state = world.average(state)
            pause = began + options.epoch_seconds * step / len(steps) - time.monotonic()
            time.sleep(max(0.0, pause))
        if world.rank == 0:
            save(options.checkpoint, pack(epoch, state), world.round)
            held = f"held-out accuracy {accuracy(state[0], held_images, held_labels):.2f}"
            say(f"{prefix} · epoch {epoch}/{options.epochs} · loss {np.mean(losses):.2f} · {held} · {suffix}")

    # No rank leaves before rank 0 has saved: if it dies now, the others can continue.
    world.broadcast(b"saved")
    return accuracy(state[0], held_images, held_labels)


def hang_if_told(hang_file: Path, rank: int) -> None:
    """Inject a fault: hang forever, once, if the file names this rank."""
    try:
        told = str(rank) in hang_file.read_text().split()
    except FileNotFoundError:
        return
    if told:
        hang_file.unlink()
        while True:
            signal.pause()


def say(line: str) -> None:
    """Print at once: a killed worker loses the rest of its buffer."""
    print(line, flush=True)


# --- The command line -----------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line; exit with code 2 and an error message if it is invalid."""
    parser = argparse.ArgumentParser(
        description="Elastic data-parallel training on handwritten digits.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    checkpoint = Path(os.environ.get("CHECKPOINT", "var/digits.npz"))
    parser.add_argument("--epochs", type=int, default=30, help="passes over the images")
    parser.add_argument("--seed", type=int, default=0, help="decides the first weights and every order")
    parser.add_argument("--checkpoint", type=Path, default=checkpoint, help="file to save to and resume from")
    parser.add_argument("--average-every", type=int, default=10, help="steps between two averagings")
    parser.add_argument("--step-timeout", type=float, default=5.0, help="seconds after which a step hangs")
    parser.add_argument("--epoch-seconds", type=float, default=0.0, help="slow each epoch down to this long")
    parser.add_argument("--hang-file", type=Path, help="the rank named in this file hangs on purpose, once")
    options = parser.parse_args(arguments)
    lowest = {"epochs": 1, "seed": 0, "average_every": 1, "step_timeout": 0.1, "epoch_seconds": 0}
    for name, least in lowest.items():
        if not getattr(options, name) >= least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(options, name)}")
    return options


@record
def main(arguments: list[str] | None = None) -> None:
    """Train this worker's share; rank 0 prints the accuracy."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: every step is safe to die in, no traceback needed
    configure(required=False)  # without an agent, timers and progress have no watchdog
    options = parse(arguments)
    world = World.from_environment()
    if world.size > BATCH:
        sys.exit(f"WORLD_SIZE is {world.size}: a batch of {BATCH} images has no part for so many workers.")
    result = train(world, options)
    if world.rank == 0:
        say(f"held-out accuracy {result:.2f}")


if __name__ == "__main__":
    main()
