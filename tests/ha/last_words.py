"""The facts of runs in etcd at the end, read without a replica."""

from __future__ import annotations

from collections.abc import Collection

from ha.cluster import Cluster
from ha.history import Fact, History
from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.endpoint import parse_address
from rallypoint.rendezvous.base.cooperative import finish
from rallypoint.rendezvous.cluster.keys import Keys
from rallypoint.rendezvous.journal.etcd.reading import interpret, read_pairs


async def read_facts(cluster: Cluster, history: History, runs: Collection[str]) -> int:
    """Add the journal's records of runs to a history; return their number.

    Raises:
        EtcdError: etcd can't be read.
    """
    count = 0
    async with EtcdClient(parse_address(f"etcd://{','.join(cluster.etcd.endpoints)}/ha")) as client:
        for run_id in runs:
            space = Keys("/ha").space(await cluster.shard(run_id))
            for record in finish(interpret(space, await read_pairs(client, space))).recovered.records:
                if record.run_id == run_id:
                    history.add(Fact(run_id, record.revision, record.content.hex()))
                    count += 1
    return count
