"""Plain DDP on gloo."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = torch.randn(64, 8)[dist.get_rank() :: dist.get_world_size()]
for _ in range(20):
    optimizer.zero_grad()
    loss = (model(data) - data.sum(1, keepdim=True)).pow(2).mean()
    loss.backward()
    optimizer.step()
dist.all_reduce(loss)
print(f"rank {dist.get_rank()} of {dist.get_world_size()} ends with {loss.item():.6f}", flush=True)
dist.destroy_process_group()
