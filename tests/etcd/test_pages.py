"""Ranges are read over links that carry few bytes in the time of an attempt, with values of any size."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from etcd.patient import compact
from rallypoint.etcd.client import EtcdClient, PageSizes
from rallypoint.etcd.cluster import EtcdChannel
from rallypoint.etcd.errors import EtcdUnavailable
from rallypoint.etcd.v1 import kv_pb2
from rallypoint.etcd.values import Put, Txn, prefix_end
from rallypoint.rpc.pace import Pace
from support.etcd_server import EtcdCluster, etcd_cluster
from support.marks import slow

KIB = 1024
MIB = 1024 * KIB

# Seconds, of a clock that only lost attempts advance; real ones never take as long.
ATTEMPT = 60.0
REQUEST = 150.0


class Link:
    """A link to a real etcd that carries so many bytes in the time of an attempt: larger answers are lost.

    Attributes:
        client: The client that reads over it.
        asked: The number of keys requested for each page, in this order.
        lost: The number of keys requested for each lost page.
        now: Seconds spent waiting.
    """

    def __init__(self, make: Callable[..., EtcdClient], cluster: EtcdCluster, carries: int) -> None:
        self.now = 0.0
        self.asked: list[int] = []
        self.lost: list[int] = []
        self._carries = carries
        pace = Pace(clock=lambda: self.now, sleep=self._sleep, draw=lambda: 0.5)
        url = f"{cluster.url}?attempt-timeout={ATTEMPT:g}&request-timeout={REQUEST:g}"
        self.client = make(url, pace=pace)
        self._call: Callable[..., Awaitable[Any]] = self.client.members.call
        self.client.members.call = self._carry  # type: ignore[method-assign,assignment]
        self.when_lost: Callable[[], Awaitable[object]] | None = None

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds

    async def _carry(
        self, at: EtcdChannel, path: str, request: kv_pb2.RangeRequest, answer: Any, **how: Any
    ) -> Any:
        self.asked.append(request.limit)
        response = await self._call(at, path, request, answer, **how)
        if response.ByteSize() > self._carries:
            self.now += how["timeout"]
            self.lost.append(request.limit)
            if self.when_lost is not None:
                await self.when_lost()
            raise EtcdUnavailable(f"{at.where}: Deadline Exceeded")
        return response


async def fill(client: EtcdClient, prefix: bytes, *groups: tuple[int, int]) -> None:
    """Write groups of so many keys with values of so many bytes."""
    number = 0
    for keys, size in groups:
        together = max(1, min(100, MIB // size))
        for first in range(0, keys, together):
            batch = range(number + first, number + min(keys, first + together))
            await client.transact(Txn([], [Put(prefix + b"%06d" % each, bytes(size)) for each in batch]))
        number += keys


@pytest.mark.parametrize("carries", [slow(6 * MIB), 1 * MIB, slow(150 * KIB)])
async def test_large_values_after_many_small_ones_come_over_any_link(
    connect: Callable[..., EtcdClient], client: EtcdClient, shared_etcd: EtcdCluster, carries: int
) -> None:
    """Each lost page is followed by a smaller one, at the same revision and key, until one arrives."""
    prefix = b"/pages/jump/%d/" % carries
    await fill(client, prefix, (400, 100), (128, 100 * KIB), (400, 100))
    expected = await client.get(prefix, prefix_end(prefix))
    link = Link(connect, shared_etcd, carries)

    async def overwrite() -> None:
        await client.transact(Txn([], [Put(prefix + b"%06d" % each, b"new") for each in (0, 500, 900)]))

    link.when_lost = overwrite
    assert await link.client.get(prefix, prefix_end(prefix)) == expected
    assert link.asked[0] <= 8
    # A page as large as this is lost: it is not requested twice.
    assert link.lost[0] == 512
    assert max(link.lost[1:], default=0) < 512


async def test_values_as_large_as_a_journals_come_at_once(
    connect: Callable[..., EtcdClient], client: EtcdClient, shared_etcd: EtcdCluster
) -> None:
    """If no small values came before, no page is lost: the first ones are small enough."""
    prefix = b"/pages/large/"
    await fill(client, prefix, (40, 512 * KIB))
    link = Link(connect, shared_etcd, 6 * MIB)
    assert len((await link.client.get(prefix, prefix_end(prefix))).pairs) == 40
    assert link.lost == []


async def test_it_is_given_up_when_a_single_key_does_not_come(
    connect: Callable[..., EtcdClient], client: EtcdClient, shared_etcd: EtcdCluster
) -> None:
    """It ends one request timeout after the last page that came, as for all other requests to etcd."""
    prefix = b"/pages/stuck/"
    await fill(client, prefix, (100, 100), (4, 100 * KIB))
    link = Link(connect, shared_etcd, 50 * KIB)
    with pytest.raises(EtcdUnavailable):
        await link.client.get(prefix, prefix_end(prefix))
    assert link.lost[-1] == 1
    many = [limit for limit in link.lost if limit > 1]
    # Some small keys in front of the large one may still come after a page that was lost.
    assert REQUEST <= link.now <= REQUEST + ATTEMPT * len(many)
    link = Link(connect, shared_etcd, 0)
    with pytest.raises(EtcdUnavailable):
        await link.client.get(prefix, prefix_end(prefix))
    assert link.now == pytest.approx(REQUEST)


async def test_a_read_restarts_if_its_revision_is_compacted_after_a_lost_page(
    connect: Callable[..., EtcdClient], tmp_path: Path
) -> None:
    """The whole range is read at a newer one."""
    # A cluster of its own: tests of watches read the history of the shared one.
    with etcd_cluster(tmp_path) as cluster:
        client = connect(f"{cluster.url}?attempt-timeout={ATTEMPT:g}&request-timeout={REQUEST:g}")
        await fill(client, b"k", (400, 100), (64, 100 * KIB))
        before = await client.get(b"k", b"l")
        link = Link(connect, cluster, 2 * MIB)

        async def lose_revision() -> None:
            link.when_lost = None
            result = await client.transact(Txn([], [Put(b"k000000", b"new")]))
            await compact(client, result.revision)

        link.when_lost = lose_revision
        found = await link.client.get(b"k", b"l")
        assert link.when_lost is None
        assert found.revision > before.revision
        assert found == await client.get(b"k", b"l")


async def test_small_values_take_few_pages(
    connect: Callable[..., EtcdClient], client: EtcdClient, shared_etcd: EtcdCluster
) -> None:
    """Pages grow fourfold from a small one, even if the link carries little; a single key takes one."""
    prefix = b"/pages/small/"
    await fill(client, prefix, (3000, 100))
    link = Link(connect, shared_etcd, MIB)
    await link.client.get(prefix, prefix_end(prefix))
    assert link.asked == [8, 32, 128, 512, 2048, 4096]
    assert link.lost == []
    link.asked.clear()
    await link.client.get(prefix + b"000000")
    assert link.asked == [1]


def read(sizes: list[int], carries: int) -> list[int]:
    """Read values of these sizes, in KiB, over a link that carries so many per attempt; return sizes of lost pages."""
    pages, begin, lost = PageSizes(), 0, []
    while begin < len(sizes):
        page = sizes[begin : begin + pages.keys]
        if sum(page) > carries:
            assert pages.keys > 1, "a single key must come"
            lost.append(pages.keys)
            pages.lost()
        else:
            begin += len(page)
            pages.came(len(page), sum(page) * KIB)
    return lost


@pytest.mark.parametrize("small", [40, 400, 1000, 3000, 5460, 5461, 5462, 9000, 12_345])
def test_a_jump_from_small_to_large_values_costs_few_attempts(small: int) -> None:
    """The jump may be at any position in the lost page."""
    assert len(read([0] * small + [500] * 200, 50 * KIB)) <= 2
    # Each further one costs less than its own large values, which take longer than an attempt.
    assert len(read(([0] * small + [500] * 200) * 5, 50 * KIB)) <= 10


def test_over_a_slow_link_most_pages_come() -> None:
    """This holds also where only single keys come, of an eighth of the intended page size."""
    assert len(read([500] * 400, 1000)) <= 100
    assert len(read([500] * 400, 3000)) <= 40
    assert len(read([1] * 50_000, 1000)) <= 50
