"""What lies in etcd of runs when all is over, read past every replica."""

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
    """Write down the journal's records of runs; returns how many there are.

    Raises:
        EtcdError: etcd does not tell.
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
