"""A worker that exchanges data with its peers all the time and fails when one goes: ring_worker.py FOLDER KIND TIMEOUT.

KIND is `sockets`, a ring of TCP connections, or `gloo`, all-reduces of torch. No peer for TIMEOUT seconds is a failure
too. A line in FOLDER/met records that a rank of a round has reached all others. All succeed together once
FOLDER/finish exists.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

FOLDER, KIND, TIMEOUT = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ROUND = int(os.environ["RALLYPOINT_ROUND"])
PAUSE = 0.02  # seconds between two exchanges


class Ring:
    """Each rank sends to the next and receives from the previous one; after n steps a flag has passed all ranks."""

    def __init__(self) -> None:
        own = socket.create_server((os.environ["HOST_ADDRESS"], 0))
        own.settimeout(TIMEOUT)
        draft = self._address(RANK).with_suffix(".draft")
        draft.write_text(json.dumps(own.getsockname()))
        draft.rename(self._address(RANK))
        following, until = self._address((RANK + 1) % WORLD_SIZE), time.monotonic() + TIMEOUT
        while not following.exists():
            if time.monotonic() > until:
                raise TimeoutError(f"no peer at {following.name}")
            time.sleep(PAUSE)
        self._next = socket.create_connection(tuple(json.loads(following.read_text())), TIMEOUT)
        self._former, _ = own.accept()
        self._former.settimeout(TIMEOUT)

    @staticmethod
    def _address(rank: int) -> Path:
        return FOLDER / f"address-{ROUND}-{rank}"

    def any(self, flag: bool) -> bool:
        """Return True if the flag of any rank is set; the same on all of them."""
        for _ in range(WORLD_SIZE - 1):
            self._next.sendall(bytes([flag]))
            received = self._former.recv(1)
            if not received:
                raise ConnectionResetError("the rank before has gone")
            flag = flag or received != b"\0"
        return flag

    def close(self) -> None:
        """Close: no data is on its way, since all ranks have made the same number of exchanges."""
        self._next.close()
        self._former.close()


class Gloo:
    """All-reduces."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self._dist, self._flags = dist, torch.zeros(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))

    def any(self, flag: bool) -> bool:
        """Return True if the flag of any rank is set; the same on all of them."""
        self._flags[0] = flag
        self._dist.all_reduce(self._flags, op=self._dist.ReduceOp.MAX)
        return bool(self._flags[0].item())

    def close(self) -> None:
        """Close: no data is on its way, since all ranks have made the same number of exchanges."""
        self._dist.destroy_process_group()


def main() -> None:
    """Exchange data with the peers to the end."""
    peers: Ring | Gloo = Ring() if KIND == "sockets" else Gloo()
    peers.any(False)
    line = {
        "round": ROUND,
        "rank": RANK,
        "world_size": WORLD_SIZE,
        "restart_count": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
    }
    with open(FOLDER / "met", "a") as met:
        met.write(json.dumps(line) + "\n")
    while not peers.any((FOLDER / "finish").exists()):
        time.sleep(PAUSE)
    peers.close()


try:
    main()
except Exception:
    traceback.print_exc()
    # At once: on a busy machine, an interpreter with torch in it takes longer to end than the disconnect grace.
    os._exit(1)
