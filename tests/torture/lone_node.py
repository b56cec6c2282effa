"""A program that holds one node of a run until it is killed: lone_node.py ENDPOINT NODE_ID, settings on stdin."""

from __future__ import annotations

import asyncio
import random
import sys

from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from torture.tormented_node import TormentedNode


async def hold(endpoint: str, node_id: str, settings: pb.RunSettings) -> None:
    """Join, and confirm every round, for ever; print `placed` at the first place in a FINAL round."""
    changed = asyncio.Event()
    node = TormentedNode(node_id, endpoint, settings, random.Random(), changed.set)
    node.join()
    while node.place is None:
        changed.clear()
        await changed.wait()
    print("placed", flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(hold(sys.argv[1], sys.argv[2], pb.RunSettings.FromString(sys.stdin.buffer.read())))
