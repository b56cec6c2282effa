"""ListReplicas: who serves what, as one replica knows it."""

from __future__ import annotations

from collections import Counter

from rallypoint.rendezvous.base.errors import EtcdAway
from rallypoint.rendezvous.replicas.cluster import Cluster
from rallypoint.rendezvous.replicas.placement import shard_of
from rallypoint.rendezvous.replicas.replica import Replica
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb


def list_replicas(replica: Replica, run_id: str) -> pb.ListReplicasResponse:
    """What a replica knows of all of them, and of who owns a run; "": of no run.

    Raises:
        EtcdAway: It knows nothing: there is no etcd just now.
    """
    cluster = replica.cluster
    if cluster is None:
        raise EtcdAway
    response = pb.ListReplicasResponse(
        answered_by=replica.name,
        journal="etcd",
        shards=cluster.shards,
        free_shards=len(cluster.free),
        replicas=_replicas(cluster),
    )
    if run_id:
        shard = shard_of(run_id, cluster.shards)
        response.run.shard = shard
        if (owned := cluster.owned.get(shard)) is not None:
            response.run.owner, response.run.address = owned.owner.replica, owned.owner.address
    return response


def _replicas(cluster: Cluster) -> list[pb.Replica]:
    counts = Counter(owned.owner for owned in cluster.owned.values())
    found = []
    for name, registration in cluster.live.items():
        replica = pb.Replica(name=name, address=registration.address, instance=registration.instance)
        replica.since.FromNanoseconds(round(registration.since * 1e9))
        replica.shards = sum(
            count for owner, count in counts.items() if owner.instance == registration.instance
        )
        found.append(replica)
    instances = {registration.instance for registration in cluster.live.values()}
    for owner, count in counts.items():
        if owner.instance not in instances:
            found.append(
                pb.Replica(
                    name=owner.replica,
                    address=owner.address,
                    instance=owner.instance,
                    shards=count,
                    leaving=True,
                )
            )
    return sorted(found, key=lambda replica: (replica.name, replica.instance))
