"""FSDP2 (fully_shard) on gloo."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
data = torch.randn(64, 8)[dist.get_rank() :: dist.get_world_size()]
for _ in range(5):
    optimizer.zero_grad()
    loss = model(data).pow(2).mean()
    loss.backward()
    optimizer.step()
loss = loss.detach()
dist.all_reduce(loss)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} ends with {loss.item():.6f}", flush=True)
dist.destroy_process_group()
