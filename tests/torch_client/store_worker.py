"""A worker that trains over gloo and counts in torch's store: arguments are a folder, and the name of its agent.

It writes to the file NAME: `trained` once all ranks have summed, `counted` for each call to the store, and `lost`
when the store stops replying. It ends with 0 when the file `finish` is there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main(folder: Path, name: str) -> int:
    """Return the exit code."""
    dist.init_process_group("gloo")
    total = torch.tensor([1])
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    with (folder / name).open("a") as notes:
        print(f"trained rank {dist.get_rank()} of {dist.get_world_size()}", file=notes, flush=True)
        while not (folder / "finish").exists():
            try:
                print("counted", store.add(f"calls of {name}", 1), file=notes, flush=True)
            except dist.DistError as error:
                print("lost", error, file=notes, flush=True)
                return 1
            time.sleep(0.1)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
