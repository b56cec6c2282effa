"""A worker that sums ranks with the others over gloo, counts them in the run's store, and goes on as waiting_worker."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from rallypoint.worker import Store
from torch_client.waiting_worker import main

if __name__ == "__main__":
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    size = dist.get_world_size()
    assert total.item() == size * (size + 1) // 2
    Store.from_environment().add("met", 1)
    dist.barrier()
    assert Store.from_environment().get("met", 0) == b"%d" % size
    code = main(Path(sys.argv[1]), sys.argv[2])
    dist.destroy_process_group()
    sys.exit(code)
