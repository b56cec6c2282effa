"""The callbacks in a single process, without an agent: each step has a timer and is reported once."""

from __future__ import annotations

import ast
import subprocess
import sys
from typing import Any

import pytest

from cli.cli_process import clean_environment

pytestmark = pytest.mark.torch

BEGIN = """
import torch
import rallypoint.torch.steps as steps
from rallypoint.timer import configure

class Client:
    held, guarded = [], 0
    def acquire(self, scope, after):
        assert (scope, after, self.held) == ("step", 60.0, [])
        self.held.append(scope)
        self.guarded += 1
    def release(self, scope):
        self.held.remove(scope)

client, reported = Client(), []
steps.progress = reported.append
"""

LIGHTNING = """
import lightning.pytorch as pl
from rallypoint.torch.lightning import LightningCallback

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        assert client.held == ["step"]
        if fails and index == 1:
            raise ValueError("diverged")
        return self.layer(batch).mean()
    def validation_step(self, batch, index):
        assert client.held == []
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

callback = LightningCallback(after=60, every_n_steps=1)
configure(client=client)
data = torch.utils.data.DataLoader(torch.randn(8, 2), batch_size=1)
for fails in (False, True):
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, accumulate_grad_batches=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
    )
    try:
        trainer.fit(Model(), data, data)
    except ValueError:
        assert fails
    print([client.guarded, reported, client.held])
"""

TRANSFORMERS = """
import sys
from transformers import Trainer, TrainingArguments
from rallypoint.torch.transformers import TransformersCallback

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def forward(self, x):
        assert client.held == (["step"] if self.training else [])
        if fails and self.training:
            raise ValueError("diverged")
        return {"loss": self.layer(x).mean()}

callback = TransformersCallback(after=60, every_n_steps=1)
configure(client=client)
data = [{"x": torch.randn(2)} for _ in range(8)]
for fails in (False, True):
    arguments = TrainingArguments(
        output_dir=sys.argv[1], use_cpu=True, num_train_epochs=1, per_device_train_batch_size=1,
        gradient_accumulation_steps=2, report_to=[], save_strategy="no", eval_strategy="epoch", disable_tqdm=True,
    )
    trainer = Trainer(model=Model(), args=arguments, train_dataset=data, eval_dataset=data, callbacks=[callback])
    try:
        trainer.train()
    except ValueError:
        assert fails
        callback.leave()
    print([client.guarded, reported, client.held])
"""


@pytest.mark.parametrize(
    ("package", "program", "guarded"),
    [("lightning", LIGHTNING, (8, 10)), ("transformers", TRANSFORMERS, (4, 5))],
)
def test_steps_are_guarded_and_reported_once(
    tmp_path: Any, package: str, program: str, guarded: tuple[int, int]
) -> None:
    """With accumulated gradients an optimizer step is several batches: Lightning's timer is around each of them. A
    step that raises leaves no timer behind, which would kill the process later."""
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program, str(tmp_path)],
        env=clean_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    whole, failed = [ast.literal_eval(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert whole == [guarded[0], [1, 2, 3, 4], []]
    assert (failed[0], failed[2]) == (guarded[1], [])


def test_a_callback_refuses_arguments_that_make_no_sense() -> None:
    """The refusal comes before a program trains for hours."""
    pytest.importorskip("torch")
    from rallypoint.torch.steps import Steps

    with pytest.raises(ValueError, match="every_n_steps is 0; expected at least 1"):
        Steps("auto", 0)
    with pytest.raises(ValueError, match="after is -1"):
        Steps(-1, 1)
