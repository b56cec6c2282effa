"""The join request that an agent sends first on its stream."""

from __future__ import annotations

from typing import Any

from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

ALONE = pb.RunSettings(min_nodes=1, max_nodes=1)
"""Settings of a run of one node."""


def join_request(
    run_id: str, node_id: str = "n", settings: pb.RunSettings = ALONE, **more: Any
) -> pb.JoinRequest:
    """Return the request of a node with one worker, unless `more` has another number."""
    fields: dict[str, Any] = {"address": node_id, "local_world_size": 1} | more
    return pb.JoinRequest(join=pb.JoinRun(run_id=run_id, node_id=node_id, settings=settings, **fields))
