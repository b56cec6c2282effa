"""Watches: without a gap and without a repetition, over any member that answers, until history is gone."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path

import pytest

from etcd.patient import FIRST, compact, put
from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.errors import Compacted
from rallypoint.etcd.streams import Position
from rallypoint.etcd.v1 import kv_pb2, watch_pb2
from rallypoint.etcd.values import Change, Delete, Put, Txn, prefix_end
from support.etcd_server import PATIENT, EtcdCluster
from support.waiting import PATIENCE, until

PREFIX = b"/watch/"


class Watcher:
    """Watches a prefix on a task of its own and keeps the changes that it receives."""

    def __init__(self, client: EtcdClient, prefix: bytes, revision: int) -> None:
        self.revisions: list[int] = []
        self.keys: list[bytes] = []
        self.task = asyncio.create_task(self._watch(client, prefix, revision))

    async def _watch(self, client: EtcdClient, prefix: bytes, revision: int) -> None:
        async with aclosing(client.watch(prefix, prefix_end(prefix), revision)) as changes:
            async for batch in changes:
                assert batch
                self.revisions += [change.revision for change in batch]
                self.keys += [change.pair.key for change in batch]

    async def has(self, key: bytes) -> None:
        """Wait until it received a change of a key."""
        await until(lambda: key in self.keys or self.task.done(), f"{key!r}")
        assert key in self.keys, self.task

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


async def test_a_watch_begins_at_the_given_revision(client: EtcdClient) -> None:
    """It has the changes since a revision, in whole revisions."""
    first = await client.transact(Txn([], [Put(PREFIX + b"a", b"1"), Put(PREFIX + b"b", b"1")]))
    await client.transact(Txn([], [Put(b"/watching/elsewhere", b"")]))
    second = await client.transact(Txn([], [Delete(PREFIX + b"a"), Put(PREFIX + b"b", b"2")]))
    async with aclosing(client.watch(PREFIX, prefix_end(PREFIX), first.revision)) as changes:
        told: list[Change] = []
        while len(told) < 4:
            told += await anext(changes)
    assert [(each.pair.key[-1:], each.pair.value, each.deleted, each.revision) for each in told] == [
        (b"a", b"1", False, first.revision),
        (b"b", b"1", False, first.revision),
        (b"a", b"", True, second.revision),
        (b"b", b"2", False, second.revision),
    ]


async def test_no_change_is_lost_or_repeated_when_any_member_fails(
    connect: Callable[..., EtcdClient], trio: EtcdCluster
) -> None:
    """Members are killed and stopped in turn under a watch; it goes on from its position."""
    client = connect(trio.url + "?attempt-timeout=1&request-timeout=60", pace=FIRST)
    writer = connect(trio.url + "?attempt-timeout=1&request-timeout=60")
    start = (await client.get(PREFIX)).revision + 1
    watcher = Watcher(client, PREFIX, start)
    for number in range(3):
        await put(writer, PREFIX + b"%d before" % number)
        await watcher.has(PREFIX + b"%d before" % number)
        # The member that serves the watch.
        member = next(each for each in trio.members if each.endpoint == client.members.current.where)
        if number == 1:
            member.send(signal.SIGSTOP)
        else:
            member.kill()
        await put(writer, PREFIX + b"%d meanwhile" % number)
        await watcher.has(PREFIX + b"%d meanwhile" % number)
        if number == 1:
            member.send(signal.SIGCONT)
        else:
            member.start()
        member.wait()
    assert watcher.revisions == sorted(set(watcher.revisions))
    history = Watcher(writer, PREFIX, start)
    await history.has(PREFIX + b"2 meanwhile")
    assert watcher.keys == history.keys
    await watcher.end()
    await history.end()


async def test_a_compaction_under_a_watch_is_reported_if_changes_were_lost(
    connect: Callable[..., EtcdClient], trio: EtcdCluster
) -> None:
    """A watch that is up to date goes on; one that needs deleted history ends, with the first revision that is kept."""
    client = connect(f"{trio.url}?{PATIENT}", pace=FIRST)
    for number in range(10):
        await put(client, PREFIX + b"%d" % number)
    current = (await client.get(PREFIX)).revision
    watcher = Watcher(client, PREFIX, current)
    await watcher.has(PREFIX + b"9")
    await compact(client, current)
    await put(client, PREFIX + b"after")
    await watcher.has(PREFIX + b"after")
    with pytest.raises(Compacted) as compacted:
        await asyncio.wait_for(anext(client.watch(PREFIX, prefix_end(PREFIX), 2)), PATIENCE)
    assert compacted.value.revision == current
    await watcher.end()


# Another process does so, while this one waits for it: otherwise the watch would move to another member first.
CHANGES = """
import asyncio, sys
from etcd.patient import compact, put
from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.endpoint import parse_address

async def main():
    async with EtcdClient(parse_address(sys.argv[1], {})) as client:
        for key in sys.argv[2:]:
            await put(client, key.encode())
        await compact(client, (await client.get(key.encode())).revision)

asyncio.run(main())
"""


async def test_a_compaction_during_an_outage_of_a_watch_is_reported(
    connect: Callable[..., EtcdClient], trio: EtcdCluster
) -> None:
    """Its member is stopped; meanwhile changes are made and compacted away; they can't be delivered."""
    client = connect(trio.url + "?attempt-timeout=1&request-timeout=60", pace=FIRST)
    await put(client, PREFIX + b"a")
    watcher = Watcher(client, PREFIX, 1)
    await watcher.has(PREFIX + b"a")
    for number, stopped in enumerate(trio.members):
        going = ",".join(member.endpoint for member in trio.members if member is not stopped)
        key = PREFIX + b"b%d" % number
        keys = key.decode(), (PREFIX + b"c").decode()
        stopped.send(signal.SIGSTOP)
        try:
            changes = [sys.executable, "-c", CHANGES, f"etcd://{going}?{PATIENT}", *keys]
            subprocess.run(changes, check=True, timeout=PATIENCE, cwd=Path(__file__).parents[1])  # noqa: ASYNC221 (see above)
            # If it watches another member, it sees the change.
            await until(lambda key=key: watcher.task.done() or key in watcher.keys, "the end of the watch")  # type: ignore[misc]
        finally:
            stopped.send(signal.SIGCONT)
        if watcher.task.done():
            break
    assert watcher.task.done(), "it watched one of the three"
    with pytest.raises(Compacted):
        await watcher.task
    assert key not in watcher.keys


async def test_a_large_history_is_sent_in_limited_pieces(client: EtcdClient) -> None:
    """Values of a megabyte, many at once, in whole revisions; a slow reader delays the server and costs no memory."""
    start = (await client.get(PREFIX)).revision + 1
    large = bytes(700_000)
    for number in range(12):
        await client.transact(Txn([], [Put(b"/large/%d/%d" % (number, part), large) for part in range(2)]))
    told: list[list[int]] = []
    async with aclosing(client.watch(b"/large/", prefix_end(b"/large/"), start)) as changes:
        async for batch in changes:
            told.append([change.revision for change in batch])
            if sum(map(len, told)) == 24:
                break
    # etcd would send all of it as one message; fragments have about 2 MiB.
    assert len(told) > 3
    for piece, following in pairwise(told):
        assert piece[-1] < following[0]
    assert [revisions.count(each) for revisions in told for each in set(revisions)] == [2] * 12


def test_a_revision_in_fragments_is_delivered_only_when_complete() -> None:
    """Fragments held when the connection broke are requested again."""

    def response(*revisions: int, fragment: bool) -> watch_pb2.WatchResponse:
        made = watch_pb2.WatchResponse(watch_id=0, fragment=fragment)
        for revision in revisions:
            made.events.add().kv.mod_revision = revision
        return made

    position = Position(1)
    assert [each.revision for each in position.take(response(1, 2, 2, fragment=True))] == [1]
    assert position.next_revision == 2
    assert position.take(response(2, 2, fragment=True)) == []
    assert [each.revision for each in position.take(response(2, 3, fragment=False))] == [2, 2, 2, 2, 2, 3]
    assert position.next_revision == 4
    assert position.take(response(5, fragment=True)) == []
    position.broken()
    assert position.next_revision == 4
    assert [each.revision for each in position.take(response(5, 5, fragment=False))] == [5, 5]


def test_progress_moves_a_quiet_watch_past_compactable_revisions() -> None:
    """The server must send it unprompted. Its reply to a progress request is not reliable before 3.5.8."""
    position = Position(8)
    position.take(watch_pb2.WatchResponse(created=True, header=kv_pb2.ResponseHeader(revision=90)))
    assert position.next_revision == 8
    position.take(watch_pb2.WatchResponse(watch_id=-1, header=kv_pb2.ResponseHeader(revision=90)))
    assert position.next_revision == 8
    position.take(watch_pb2.WatchResponse(watch_id=0, header=kv_pb2.ResponseHeader(revision=20)))
    assert position.next_revision == 21


async def test_a_watch_ends_on_the_server_when_its_consumer_goes(
    client: EtcdClient, shared_etcd: EtcdCluster
) -> None:
    """The consumer may leave the loop, be cancelled, or drop the iterator."""
    (member,) = shared_etcd.members

    def watchers() -> float:
        return member.metric("etcd_debugging_mvcc_watcher_total")

    await until(lambda: watchers() == 0, "watches of other tests to end")
    await put(client, PREFIX + b"here")
    leaving = client.watch(PREFIX, prefix_end(PREFIX), 1)
    letting_go = client.watch(PREFIX, prefix_end(PREFIX), 1)
    await anext(leaving)
    await anext(letting_go)
    cancelled = Watcher(client, PREFIX, 1)
    await cancelled.has(PREFIX + b"here")
    await until(lambda: watchers() == 3, "all watches to begin")
    await leaving.aclose()
    await cancelled.end()
    del letting_go
    await until(lambda: watchers() == 0, "all watches to end")
