"""The Trainer of Hugging Face's transformers; with arguments, our callback too: with_transformers.py FOLDER [STEPS]."""

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

folder = Path(sys.argv[1])


class Numbers(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"x": torch.randn(8, generator=torch.Generator().manual_seed(index))}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, x):
        if len(sys.argv) > 2:
            time.sleep(0.05)
            (folder / f"trains.{torch.distributed.get_rank()}").touch()
        return {"loss": (self.layer(x) - x.sum(1, keepdim=True)).pow(2).mean()}


callbacks = []
if len(sys.argv) > 2:
    from rallypoint.torch.transformers import TransformersCallback

    callbacks = [TransformersCallback(every_n_steps=5)]
torch.manual_seed(0)
arguments = TrainingArguments(
    output_dir=str(folder / "out"),
    use_cpu=True,
    max_steps=int(sys.argv[2]) if len(sys.argv) > 2 else 10,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
trainer = Trainer(model=Model(), args=arguments, train_dataset=Numbers(), callbacks=callbacks)
trainer.train()
weight = trainer.model.layer.weight.sum().item()
print(f"rank {arguments.process_index} of {arguments.world_size} ends with {weight:.6f}", flush=True)
# The Trainer leaves the process group to its script. Without this, gloo more often aborts a worker that exits.
torch.distributed.destroy_process_group()
