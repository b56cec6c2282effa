"""A PyTorch job that loses an agent trains the same samples in the same order, each once, to the same loss."""

from __future__ import annotations

import json
import os
import random
import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from integration.scene import Scene, scene
from support.waiting import PATIENCE, until

LOSSES = int(os.environ.get("RALLYPOINT_ELASTIC_LOSSES", "1"))

pytestmark = [pytest.mark.torch, pytest.mark.integration, pytest.mark.timeout(600 + 120 * LOSSES)]

WORKER = Path(__file__).with_name("stopping_worker.py")
EPOCHS, STEPS, IMAGES = 2, 60, 1440
NEVER = STEPS + 1


@dataclass
class Outcome:
    """The end of a job.

    Attributes:
        history: epoch and samples of each step, in order, without steps trained in vain.
        world: workers of the last step.
        loss: over all images.
        recovery: seconds from the SIGKILL to the end of the resumption.
    """

    history: list[tuple[int, list[int]]]
    world: int
    loss: float
    recovery: float


def history_of(record: Path) -> tuple[list[tuple[int, list[int]]], int]:
    """Return the history in a record, and its last world. Steps after the checkpoint of a resumption are dropped."""
    steps: dict[int, tuple[int, dict[int, list[int]]]] = {}
    for text in record.read_text().splitlines():
        line = json.loads(text)
        if (kept := line.get("resumed_after")) is not None:
            steps = {step: done for step, done in steps.items() if step <= kept}
            continue
        epoch, parts = steps.setdefault(line["step"], (line["epoch"], {}))
        assert (epoch, line["rank"] in parts) == (line["epoch"], False), text
        parts[line["rank"]] = line["samples"]
    assert sorted(steps) == list(range(1, len(steps) + 1))
    history = []
    for _, (epoch, parts) in sorted(steps.items()):
        batch = [0] * sum(map(len, parts.values()))
        for rank, part in parts.items():
            batch[rank :: len(parts)] = part
        history.append((epoch, batch))
    return history, len(parts)


async def train(
    stage: Scene,
    name: str,
    *arguments: str,
    lost: str = "",
    local_rank: int = 0,
    step: int = NEVER,
    returns: bool = True,
) -> Outcome:
    """Train on agents a and b; kill one with SIGKILL after a step of a worker; start it again if it `returns`."""
    folder = stage.folder / name
    folder.mkdir()
    marker, record = folder / "stopped", folder / "record"
    stops = [str(marker), lost or "none", str(local_rank), str(step)]
    saves = ["--epochs", str(EPOCHS), "--save-every", "7", "--checkpoint", str(folder / "checkpoint")]
    command = (str(WORKER), *stops, *saves, "--record", str(record), *arguments)
    stage.job = replace(stage.job, run_id=name, command=command)
    read = len(stage.cluster.output.items)
    await stage.start_agents("a", "b")
    recovery = 0.0
    if lost:
        await until(marker.exists, f"step {step}", timeout=2 * PATIENCE)
        began = time.monotonic()
        await stage.cluster.programs[lost].kill()
        if returns:
            await stage.start_agents(lost)
        await until(
            lambda: record.read_text().count("resumed_after") == 2, "the resumption", timeout=2 * PATIENCE
        )
        recovery = time.monotonic() - began
    for agent in {"a", "b"} - ({lost} if not returns else set()):
        program = stage.cluster.programs[agent]
        assert await program.ended(2 * PATIENCE) == 0, program.report
    printed = [
        found[1]
        for line in stage.cluster.output.items[read:]
        if (found := re.search(r"held-out accuracy .* · loss (\S+)$", line.text))
    ]
    # Torch sometimes aborts a worker that exits: then the workers are started again, and print the last line again.
    errors = stage.folder.glob(f"logs/{name}_*/attempt_*/*/stderr.log")
    aborts = sum("terminate called without" in path.read_text() for path in errors)
    assert len(printed) <= 1 + aborts
    (loss,) = set(printed)
    return Outcome(*history_of(record), float(loss), recovery)


def assert_each_once(history: list[tuple[int, list[int]]]) -> None:
    """Check that no sample of an epoch is missing or there twice."""
    for epoch in range(1, EPOCHS + 1):
        samples = [sample for of, batch in history if of == epoch for sample in batch]
        assert sorted(samples) == list(range(IMAGES)), f"epoch {epoch}"


async def test_a_lost_agent_that_returns_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RALLYPOINT_ELASTIC_LOSSES times: an agent is killed at a random step of DDP, and started again."""
    pytest.importorskip("torch")
    chance = random.Random(16)
    async with scene(tmp_path, monkeypatch, nodes="2", max_restarts=3) as stage:
        undisturbed = await train(stage, "undisturbed")
        assert_each_once(undisturbed.history)
        sys.stdout.write(f"\nundisturbed: loss {undisturbed.loss:.9f}\n\n")
        sys.stdout.write(
            "| lost at step | agent | recovery, s | loss | difference |\n|---:|---|---:|---:|---:|\n"
        )
        for number in range(LOSSES):
            step, lost, local_rank = chance.randrange(1, STEPS), chance.choice("ab"), chance.randrange(2)
            outcome = await train(stage, f"lost-{number}", lost=lost, local_rank=local_rank, step=step)
            difference = abs(outcome.loss - undisturbed.loss)
            sys.stdout.write(
                f"| {step} | {lost} | {outcome.recovery:.1f} | {outcome.loss:.9f} | {difference:.1e} |\n"
            )
            sys.stdout.flush()
            assert_each_once(outcome.history)
            assert outcome.history == undisturbed.history
            assert difference < 1e-6


@pytest.mark.parametrize("sharding", [[], ["--fsdp"]])
async def test_a_lost_agent_that_stays_away_leaves_no_sample_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharding: list[str]
) -> None:
    """The remaining workers, in a world of half the size, train the samples that follow."""
    pytest.importorskip("torch")
    conf = {"last_call_timeout": "5"}
    async with scene(tmp_path, monkeypatch, nodes="1:2", max_restarts=3, conf=conf) as stage:
        undisturbed = await train(stage, "undisturbed", *sharding)
        shrunk = await train(stage, "shrunk", *sharding, lost="b", step=20, returns=False)
        assert (undisturbed.world, shrunk.world) == (4, 2)
        assert_each_once(shrunk.history)
        assert shrunk.history == undisturbed.history
        assert abs(shrunk.loss - undisturbed.loss) < 1e-4  # sums are added up in another order
