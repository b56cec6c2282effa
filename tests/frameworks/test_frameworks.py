"""Programs of the usual frameworks run unchanged, and our callbacks for them work: with the real packages."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cli.cli_process import rallypoint
from integration.scene import scene
from integration.test_draining import drain
from support.waiting import PATIENCE, until

pytestmark = [pytest.mark.torch, pytest.mark.integration, pytest.mark.timeout(600)]

PROGRAMS = Path(__file__).with_name("programs")
PACKAGES = {
    "ddp.py": "torch",
    "fsdp2.py": "torch",
    "with_accelerate.py": "accelerate",
    "with_lightning.py": "lightning",
    "with_transformers.py": "transformers",
}


def test_all_programs_are_run() -> None:
    """A new program without a line above would not be run."""
    assert {path.name for path in PROGRAMS.glob("*.py")} == set(PACKAGES)


@pytest.mark.parametrize("program", PACKAGES)
def test_a_program_runs_as_under_torchrun(tmp_path: Path, program: str) -> None:
    """Each knows its rank and the world, and all end with one loss, so they have trained together."""
    pytest.importorskip(PACKAGES[program])
    arguments = [tmp_path] if program == "with_transformers.py" else []
    flags = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--log-dir", tmp_path / "logs")
    result = rallypoint("run", *flags, PROGRAMS / program, *arguments, timeout=500)
    assert result.returncode == 0, result.stderr
    # Torch sometimes aborts a worker that exits; no other failure is a reason to start the workers again.
    assert result.stderr.count("error worker failed") <= result.stderr.count("terminate called without"), (
        result.stderr
    )
    ends = set(re.findall(r"rank (\d) of (\d) ends with (\S+)", result.stdout))
    assert sorted(end[:2] for end in ends) == [("0", "2"), ("1", "2")], result.stdout
    assert len({loss for _, _, loss in ends}) == 1


@pytest.mark.parametrize(
    ("program", "checkpoint"),
    [("with_lightning.py", "saved.ckpt"), ("with_transformers.py", "out/checkpoint-*/model.safetensors")],
)
async def test_a_callback_reports_steps_and_saves_before_a_host_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, checkpoint: str
) -> None:
    """All ranks save one step together, also those without a notice; the host leaves hours before its deadline."""
    pytest.importorskip(PACKAGES[program])

    def checkpoints() -> list[Path]:
        return list(tmp_path.glob(checkpoint))

    async with scene(
        tmp_path, monkeypatch, nodes="1:2", workers=1, conf={"last_call_timeout": "60"}
    ) as stage:
        stage.job = replace(stage.job, command=(str(PROGRAMS / program), str(tmp_path), "1000000"))
        await stage.start_agents("a", "b")
        await until(
            lambda: len(list(tmp_path.glob("trains.*"))) == 2, "both ranks to train", timeout=PATIENCE
        )
        assert not checkpoints()
        await drain(stage, "a", "--grace", "7200", "--reason", "maintenance")
        assert await stage.cluster.programs["a"].ended(PATIENCE) == 143, stage.report("a")
        run = await stage.becomes("the end of the round", lambda run: run.last_round_end.round > 0)
        assert "its workers saved their state" in run.last_round_end.detail
        assert len(checkpoints()) == 1
