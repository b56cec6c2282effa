"""The layout of a prefix is agreed once, and all replicas keep to it."""

from __future__ import annotations

import asyncio

import pytest

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.endpoint import EtcdAddress
from rallypoint.etcd.values import Put, Txn
from rallypoint.rendezvous.cluster.keys import DEFAULT_SHARDS, Keys, agreed_shards
from rallypoint.rpc.endpoint import SettingError


@pytest.fixture
def keys(address: EtcdAddress) -> Keys:
    """The keys of a new prefix."""
    return Keys(address.prefix)


async def test_the_first_replica_decides_the_number_of_shards(client: EtcdClient, keys: Keys) -> None:
    """Replicas without a number, or with the same number, use the agreed one."""
    assert await agreed_shards(client, keys, 16) == 16
    assert await agreed_shards(client, keys, None) == 16
    assert await agreed_shards(client, keys, 16) == 16


async def test_replicas_that_start_at_once_agree(client: EtcdClient, keys: Keys) -> None:
    """However many start on a new prefix at the same time, they agree on one layout."""
    answers = await asyncio.gather(*(agreed_shards(client, keys, None) for _ in range(20)))
    assert set(answers) == {DEFAULT_SHARDS}


async def test_another_number_of_shards_is_refused(client: EtcdClient, keys: Keys) -> None:
    """Otherwise runs would be looked up in the wrong shard."""
    await agreed_shards(client, keys, 16)
    with pytest.raises(SettingError, match=r"has 16 shards, not 32: use another prefix"):
        await agreed_shards(client, keys, 32)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'{"version": 2, "shards": 64}', "of version 2, but this replica knows 1: start a newer one"),
        (b'{"version": 1, "shards": 0}', "has 0 shards, expected 1 to 4096"),
        (b'{"version": 1}', "not a layout of Rallypoint"),
        (b"hello", "not a layout of Rallypoint"),
        (b"\xff", "not a layout of Rallypoint"),
    ],
)
async def test_an_unknown_layout_is_refused(
    client: EtcdClient, keys: Keys, content: bytes, told: str
) -> None:
    """And never overwritten: it may belong to another program, or to a newer version."""
    await client.transact(Txn([], [Put(keys.layout, content)]))
    with pytest.raises(SettingError, match=told) as refused:
        await agreed_shards(client, keys, None)
    assert "\n" not in str(refused.value)
    assert (await client.get(keys.layout)).pairs[0].value == content
