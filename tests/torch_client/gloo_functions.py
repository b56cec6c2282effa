"""Functions of workers that return without closing gloo, as most programs do."""

from __future__ import annotations

import torch
import torch.distributed as dist


def meet() -> int:
    """Meet the others, and return at once: rank 0, which has the store, may be far ahead of them."""
    dist.init_process_group("gloo")
    return int(dist.get_rank())


def leave_work() -> int:
    """Return while gloo's threads hold tensors: they release them while the interpreter ends."""
    dist.init_process_group("gloo")
    dist.barrier()
    for _ in range(30):
        dist.all_reduce(torch.ones(1000), async_op=True)
    return int(dist.get_rank())
