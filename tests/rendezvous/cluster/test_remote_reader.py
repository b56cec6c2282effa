"""Shards that are read from etcd are always up to date, and are not read again without need."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.endpoint import EtcdAddress
from rallypoint.etcd.session import Session
from rallypoint.rendezvous.base.cooperative import CooperativeRunner, Work
from rallypoint.rendezvous.base.entries import StoreChange
from rallypoint.rendezvous.base.errors import EtcdAway, NotOwner
from rallypoint.rendezvous.cluster.keys import Keys
from rallypoint.rendezvous.cluster.lookup import RemoteReader
from rallypoint.rendezvous.journal.etcd.journal import EtcdJournal
from rallypoint.rendezvous.journal.etcd.keys import JournalLocation, Owner
from rallypoint.rendezvous.journal.journal import Recovered
from rendezvous.turn_counter import TickingClock
from support.etcd_server import NEEDS_ETCD

pytestmark = NEEDS_ETCD

_T = TypeVar("_T")


class Readers:
    """A reader of a prefix that records how often it read whole shards."""

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        most_bytes: int = 1 << 20,
        runner: CooperativeRunner | None = None,
    ) -> None:
        self.now = 0.0
        self.reading_takes = 0.0
        self.owner: str | None = None
        self.built: list[int] = []
        self.elsewhere = RemoteReader(
            client,
            Keys(prefix),
            self._build,
            refuse=self._refuse,
            clock=lambda: self.now,
            runner=runner,
            most_bytes=most_bytes,
        )

    def _build(self, shard: int, recovered: Recovered) -> Work[Any]:  # stands for its own reader
        self.built.append(shard)
        self.now += self.reading_takes
        yield
        return recovered

    def _refuse(self, shard: int) -> None:
        if self.owner is not None:
            raise NotOwner("", self.owner)

    async def values(self, shard: int) -> list[bytes | None]:
        """Return the values of a shard."""
        recovered = await self.elsewhere.reader(shard)
        return [each.value for each in recovered.store_entries]  # type: ignore[attr-defined]


@pytest.fixture
def readers(client: EtcdClient, address: EtcdAddress) -> Readers:
    """The reader of a new prefix."""
    return Readers(client, address.prefix)


@pytest.fixture
async def journals(client: EtcdClient, address: EtcdAddress) -> AsyncIterator[list[EtcdJournal]]:
    """The journals of three shards that have an owner."""
    session = await Session.open(client, 60.0)
    keys = Keys(address.prefix)
    opened = []
    for shard in range(3):
        journal = EtcdJournal(
            client, session, JournalLocation(keys.owner(shard), keys.space(shard)), Owner("o", "o:1", "1")
        )
        await journal.open()
        opened.append(journal)
    yield opened
    for journal in opened:
        await journal.close()
    await session.close()


class _Busy(CooperativeRunner):
    """Counts the requests for work."""

    def __init__(self) -> None:
        super().__init__(TickingClock(0.001))
        self.came = 0

    async def carry_out(self, work: Work[_T]) -> _T:
        self.came += 1
        return await super().carry_out(work)


def _entry(value: bytes) -> StoreChange:
    return StoreChange("run", 0, "key", value)


async def test_acknowledged_writes_are_read_and_an_unchanged_shard_is_not_read_again(
    readers: Readers, journals: list[EtcdJournal]
) -> None:
    """One small request finds out if the kept copy is up to date."""
    for number in range(3):
        await journals[0].append([_entry(b"%d" % number)])
        for _ in range(3):
            assert await readers.values(0) == [b"%d" % number]
    assert readers.built == [0, 0, 0]


async def test_a_shard_without_any_write_is_empty(readers: Readers) -> None:
    """And not read again either."""
    assert [await readers.values(7) for _ in range(3)] == [[]] * 3
    assert readers.built == [7]


async def test_all_shards_are_looked_at_at_once_and_only_those_that_changed_are_read(
    readers: Readers, journals: list[EtcdJournal]
) -> None:
    """Listing runs costs one request if nothing has changed."""
    assert sorted(await readers.elsewhere.readers(range(3), 3)) == [0, 1, 2]
    await journals[1].append([_entry(b"new")])
    readers.built.clear()
    found = await readers.elsewhere.readers(range(3), 3)
    assert [each.value for each in found[1].store_entries] == [b"new"]  # type: ignore[attr-defined]
    assert readers.built == [1]


async def test_many_calls_at_once_cost_two_reads_at_most(
    readers: Readers, journals: list[EtcdJournal]
) -> None:
    """The pending one, and one for all callers that came meanwhile."""
    await journals[0].append([_entry(b"x")])
    answers = await asyncio.gather(*(readers.values(0) for _ in range(50)))
    assert answers == [[b"x"]] * 50
    assert len(readers.built) <= 2


async def test_the_kept_contents_are_bounded(
    client: EtcdClient, address: EtcdAddress, journals: list[EtcdJournal]
) -> None:
    """The most recently read shards stay; at least one is kept."""
    readers = Readers(client, address.prefix, most_bytes=1_000)
    for journal in journals:
        await journal.append([_entry(bytes(600))])
    for shard in (0, 1, 1, 2, 2, 1):
        await readers.values(shard)
    assert readers.built == [0, 1, 2, 1]


async def test_a_shard_that_takes_long_and_changes_is_left_to_its_owner(
    readers: Readers, journals: list[EtcdJournal]
) -> None:
    """Reading it for every caller would leave no time for other work; while it is unchanged, it is read here."""
    readers.reading_takes, readers.owner = 1.0, "owner:1"
    await journals[0].append([_entry(b"1")])
    assert await readers.values(0) == [b"1"]
    assert await readers.values(0) == [b"1"]
    await journals[0].append([_entry(b"2")])
    with pytest.raises(NotOwner) as refused:
        await readers.values(0)
    assert refused.value.owner == "owner:1"
    readers.owner = None  # no other replica could answer
    assert await readers.values(0) == [b"2"]
    readers.owner = "owner:1"
    await journals[0].append([_entry(b"3")])
    readers.now += 20.0
    assert await readers.values(0) == [b"3"]


async def test_a_read_that_an_outage_delayed_refuses_no_others_for_long(
    readers: Readers, journals: list[EtcdJournal]
) -> None:
    """It took a minute because etcd was away, not because the shard is large."""
    readers.reading_takes, readers.owner = 60.0, "owner:1"
    await journals[0].append([_entry(b"1")])
    assert await readers.values(0) == [b"1"]
    await journals[0].append([_entry(b"2")])
    readers.now += 10.0
    assert await readers.values(0) == [b"2"]


async def test_a_read_of_all_shards_is_never_redirected(
    readers: Readers, journals: list[EtcdJournal]
) -> None:
    """Otherwise two owners of slow, changing shards would redirect it to each other for ever."""
    readers.reading_takes, readers.owner = 1.0, "owner:1"
    await journals[0].append([_entry(b"1")])
    assert await readers.values(0) == [b"1"]
    await journals[0].append([_entry(b"2")])
    found = await readers.elsewhere.readers(range(3), 3)
    assert [each.value for each in found[0].store_entries] == [b"2"]  # type: ignore[attr-defined]
    await journals[0].append([_entry(b"3")])
    with pytest.raises(NotOwner):  # a read of that shard alone is still redirected
        await readers.values(0)


async def test_waiting_for_other_work_of_the_process_is_no_reason_to_refuse(
    client: EtcdClient, address: EtcdAddress, journals: list[EtcdJournal]
) -> None:
    """A small shard is read quickly, however long it waited behind the work of a take-over."""
    runner = _Busy()
    readers = Readers(client, address.prefix, runner=runner)
    readers.owner = "owner:1"

    def taking_over() -> Work[None]:
        while runner.came < 2:
            yield
        readers.now += 60.0

    await journals[0].append([_entry(b"1")])
    values, _ = await asyncio.gather(readers.values(0), runner.carry_out(taking_over()))
    assert values == [b"1"]
    await journals[0].append([_entry(b"2")])
    assert await readers.values(0) == [b"2"]


async def test_without_etcd_every_read_fails(address: EtcdAddress) -> None:
    """Not even a value that was just read: it may be outdated."""
    async with EtcdClient(replace(address, request_timeout=3.0)) as client:
        readers = Readers(client, address.prefix)
        assert await readers.values(0) == []
        await client.close()
        with pytest.raises(EtcdAway):
            await readers.values(0)
        with pytest.raises(EtcdAway):
            await readers.elsewhere.readers(range(3), 3)
