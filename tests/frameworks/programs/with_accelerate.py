"""Hugging Face Accelerate, as its own quick start has it."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
set_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(3):
    for (batch,) in loader:
        optimizer.zero_grad()
        loss = (model(batch) - batch.sum(1, keepdim=True)).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
loss = accelerator.reduce(loss.detach())
print(
    f"rank {accelerator.process_index} of {accelerator.num_processes} ends with {loss.item():.6f}", flush=True
)
accelerator.end_training()
