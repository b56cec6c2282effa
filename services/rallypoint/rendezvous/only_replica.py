"""ListReplicas where there is one: a service whose journal is its own."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TypeAlias

from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

ListReplicas: TypeAlias = Callable[[str], pb.ListReplicasResponse]
"""Answers ListReplicas for a run_id, "" for none."""


class OnlyReplica:
    """The only replica: it owns the one shard that there is."""

    def __init__(self, journal: str = "memory", since: float | None = None, instance: str = "") -> None:
        """Describe it: the kind of its journal, unix seconds, and what was drawn for the process."""
        self._address = ""
        self._journal = journal
        self._since = since
        self._instance = instance

    def listen(self, address: str) -> None:
        """Note where it listens."""
        self._address = address

    def __call__(self, run_id: str) -> pb.ListReplicasResponse:
        """The answer."""
        name = socket.gethostname()
        replica = pb.Replica(name=name, address=self._address, instance=self._instance, shards=1)
        if self._since is not None:
            replica.since.FromNanoseconds(round(self._since * 1e9))
        response = pb.ListReplicasResponse(
            replicas=[replica], answered_by=name, journal=self._journal, shards=1
        )
        if run_id:
            response.run.MergeFrom(pb.RunPlace(owner=name, address=self._address))
            response.run.SetInParent()
        return response
