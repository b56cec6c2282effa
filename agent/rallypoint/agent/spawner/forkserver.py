"""A spawner in a full interpreter that has loaded the workers' function: `start_method="forkserver"`.

Run as a program: `python -m rallypoint.agent.spawner.forkserver <folder of the call> <fd> <fd>`, the descriptors as for
rallypoint.agent.spawner.spawner.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from rallypoint.agent.spawner import spawner
from rallypoint.worker.call import load_call, run_forked


def load(folder: Path) -> spawner.Call:
    """Import the function's modules, once for all workers; return the call of each worker."""
    return partial(run_forked, load_call(folder), folder)


def main(folder: str, agent: str, folders: str) -> None:
    """Become guard and spawner."""
    spawner.main(int(agent), int(folders), partial(load, Path(folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])
