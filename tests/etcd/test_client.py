"""Reads, transactions and leases on a real member."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from rallypoint.etcd.client import EtcdClient, next_page_size
from rallypoint.etcd.errors import ClientClosed, EtcdRefused, EtcdUnavailable, Reason
from rallypoint.etcd.values import CreateRevision, Delete, Get, ModRevision, Put, Txn, prefix_end
from support.etcd_server import PATIENT, EtcdCluster


async def test_a_transaction_does_one_thing_or_the_other(client: EtcdClient) -> None:
    """The conditions decide which, and the results come in the order of its reads."""
    key = b"/client/txn"
    create = Txn([CreateRevision(key, 0)], [Put(key, b"1"), Get(key)], [Get(b"/nothing"), Get(key)])
    first = await client.transact(create)
    assert first.succeeded
    assert [pair.value for pair in first.found[0]] == [b"1"]
    assert first.found[0][0].create_revision == first.revision
    second = await client.transact(create)
    assert not second.succeeded
    assert second.revision == first.revision
    assert second.found[0] == []
    assert second.found[1] == first.found[0]
    replaced = await client.transact(Txn([ModRevision(key, first.revision)], [Put(key, b"2")]))
    assert replaced.succeeded
    assert not (await client.transact(Txn([ModRevision(key, first.revision)], [Put(key, b"3")]))).succeeded
    (pair,) = (await client.get(key)).pairs
    assert (pair.value, pair.create_revision, pair.mod_revision, pair.version) == (
        b"2",
        first.revision,
        replaced.revision,
        2,
    )
    await client.transact(Txn([CreateRevision(key, first.revision)], [Delete(key)]))
    assert (await client.get(key)).pairs == []


async def test_a_read_of_many_keys_shows_one_revision(client: EtcdClient) -> None:
    """This holds for any number of pages, with values large and small, and with writes in between."""
    prefix = b"/client/pages/"
    for first in range(0, 600, 100):
        values = [
            Put(prefix + b"%04d" % number, b"old" * (number % 7)) for number in range(first, first + 100)
        ]
        await client.transact(Txn([], values))
    await client.transact(Txn([], [Put(prefix + b"9999", b"x" * 1_000_000)]))
    before = await client.get(prefix, prefix_end(prefix))
    assert [pair.key for pair in before.pairs] == [
        prefix + b"%04d" % number for number in [*range(600), 9999]
    ]

    async def write() -> None:
        for number in range(200):
            await client.transact(
                Txn([], [Put(prefix + b"%04d" % number, b"new"), Put(prefix + b"0599", b"new")])
            )

    writing = asyncio.create_task(write())
    seen = set()
    while not writing.done():
        snapshot = await client.get(prefix, prefix_end(prefix))
        new = [pair.key for pair in snapshot.pairs if pair.value == b"new"]
        # The first and the last page agree on the written values.
        assert len(new) == (
            0 if snapshot.revision == before.revision else snapshot.revision - before.revision + 1
        )
        seen.add(len(new))
    await writing
    assert len(seen) > 1
    keys = await client.get(prefix, prefix_end(prefix), keys_only=True)
    assert [pair.key for pair in keys.pairs] == [pair.key for pair in before.pairs]
    assert not any(pair.value for pair in keys.pairs)


def test_pages_are_as_large_as_is_bearable() -> None:
    """Many keys if values are small, one if they are huge, and never a jump."""
    assert next_page_size(64, 64, 64 * 100) == 256
    assert next_page_size(4096, 4096, 4096 * 100) == 4096
    assert next_page_size(64, 64, 64 * 1024 * 1024) == 4
    assert next_page_size(64, 64, 96 * 1024 * 1024 * 100) == 1


async def test_a_lease_ends_with_its_keys(client: EtcdClient) -> None:
    """It ends by revocation; after that there is nothing to keep alive, and a second revocation is no error."""
    lease, ttl = await client.grant(60)
    assert ttl == 60
    assert await client.keep_alive(lease) == 60
    await client.transact(Txn([], [Put(b"/client/leased", b"", lease)]))
    (pair,) = (await client.get(b"/client/leased")).pairs
    assert pair.lease == lease
    await client.revoke(lease)
    assert (await client.get(b"/client/leased")).pairs == []
    assert await client.keep_alive(lease) == 0
    await client.revoke(lease)
    with pytest.raises(EtcdRefused) as refused:
        await client.transact(Txn([], [Put(b"/client/leased", b"", lease)]))
    assert refused.value.reason is Reason.LEASE_NOT_FOUND


async def test_calls_open_when_the_client_is_closed_get_an_error(
    connect: Callable[..., EtcdClient], trio: EtcdCluster
) -> None:
    """They get an error, not the cancellation that gRPC raises; and so do later calls."""
    client = connect(f"{trio.url}?{PATIENT}")
    await client.get(b"a")
    for member in trio.members[1:]:
        member.kill()
    transacting = asyncio.create_task(client.transact(Txn([], [Put(b"a", b"")])))
    reading = asyncio.create_task(client.get(b"a"))
    watching = asyncio.ensure_future(anext(client.watch(b"a", b"", 1)))
    await asyncio.sleep(0.2)
    await client.close()
    outcomes = await asyncio.gather(transacting, reading, watching, return_exceptions=True)
    assert [isinstance(outcome, EtcdUnavailable | ClientClosed) for outcome in outcomes] == [True] * 3
    with pytest.raises(ClientClosed):
        await client.get(b"a")
    with pytest.raises(ClientClosed):
        await client.transact(Txn([], [Put(b"a", b"")]))
    with pytest.raises(ClientClosed):
        await client.keep_alive(1)
