"""PyTorch Lightning; with an argument, our callback too: with_lightning.py [FOLDER STEPS]."""

import os
import sys
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        if len(sys.argv) > 1:
            time.sleep(0.05)
            (Path(sys.argv[1]) / f"trains.{self.global_rank}").touch()
        (batch,) = batch
        return (self.layer(batch) - batch.sum(1, keepdim=True)).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


pl.seed_everything(0)
callbacks = []
if len(sys.argv) > 1:
    from rallypoint.torch.lightning import LightningCallback

    callbacks = [LightningCallback(Path(sys.argv[1]) / "saved.ckpt", every_n_steps=5)]
trainer = pl.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    strategy="ddp",
    max_steps=int(sys.argv[2]) if len(sys.argv) > 1 else 20,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=callbacks,
)
model = Model()
trainer.fit(model, DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8))
loss = trainer.strategy.reduce(model.layer.weight.detach().sum())
print(
    f"rank {trainer.global_rank} of {trainer.world_size} ends with {loss.item():.6f} at {trainer.global_step}",
    flush=True,
)
