"""Shared by the tests of clients: writes that are repeated until they succeed, and bounded waits."""

from __future__ import annotations

import asyncio
import time

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.errors import EtcdUnavailable
from rallypoint.etcd.v1 import kv_pb2
from rallypoint.etcd.values import Put, Txn
from rallypoint.rpc.pace import Pace
from support.waiting import PATIENCE

FIRST = Pace(draw=lambda: 0.0)
"""Begins with the first member of the URL."""


async def put(client: EtcdClient, key: bytes, value: bytes = b"") -> None:
    """Write a key for certain: a request that is safe to repeat is sent until a reply arrives."""
    began = time.monotonic()
    while True:
        try:
            await client.transact(Txn([], [Put(key, value)]))
            return
        except EtcdUnavailable:
            if time.monotonic() - began > PATIENCE:
                raise
            await asyncio.sleep(0.05)


async def compact(client: EtcdClient, revision: int) -> None:
    """Delete the history before a revision."""
    request = kv_pb2.CompactionRequest(revision=revision)
    await client.members.request("/etcdserverpb.KV/Compact", request, kv_pb2.CompactionResponse)
