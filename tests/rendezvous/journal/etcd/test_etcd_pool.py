"""Commits of several journals go to etcd as one transaction, and each journal gets the result of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.session import Session
from rallypoint.etcd.values import CreateRevision, Get, KeyValue, ModRevision, Put, Txn, TxnResult
from rallypoint.rendezvous.journal.etcd.pool import CommitPool, merged, split
from rallypoint.rendezvous.journal.journal import JournalError, OwnershipLost
from rallypoint.rpc.pace import Pace
from rendezvous.journal.entries import change, record
from rendezvous.journal.etcd_shelf import TTL, EtcdShelf, Fate, etcd_shelf
from support.etcd_server import NEEDS_ETCD, etcd_cluster
from support.waiting import PATIENCE, until

pytestmark = NEEDS_ETCD


class Bench:
    """Opened journals in locations of their own that share a pool; earlier transactions are not counted.

    Attributes:
        first: One more, whose commit others are made to wait for.
        gates: Each journal's own: its retries after a failure wait for it.
    """

    def __init__(self, shelf: EtcdShelf, count: int) -> None:
        self.client = shelf.client
        self.pool = CommitPool(shelf.client)
        self.shelves = [shelf.beside() for _ in range(count)]
        self.gates = [asyncio.Event() for _ in range(count)]
        self.journals = [
            each.journal(pool=self.pool, pace=Pace(draw=lambda: 0.0, sleep=lambda _, gate=gate: gate.wait()))  # type: ignore[misc]
            for each, gate in zip(self.shelves, self.gates, strict=True)
        ]
        self.first = shelf.journal(pool=self.pool)
        for gate in self.gates:
            gate.set()

    async def open(self) -> Bench:
        """Claim all."""
        await asyncio.gather(*(each.open() for each in (self.first, *self.journals)))
        self.client.from_now(lambda n: Fate.ANSWERED)
        return self

    async def together(
        self, *appends: Awaitable[None], then_hold: asyncio.Event | None = None
    ) -> list[asyncio.Future[None]]:
        """Begin appends while one commit is in flight; when this returns, that is done, and they are next.

        Their response is held until `then_hold` is set.
        """
        hold = self.client.hold = asyncio.Event()
        first = asyncio.create_task(self.first.append([]))
        await self.client.done.wait()
        begun: list[asyncio.Future[None]] = [asyncio.ensure_future(each) for each in appends]
        await _until(lambda: len(self.pool._waiting) == len(appends))
        self.client.hold = then_hold
        self.client.done.clear()
        hold.set()
        await first
        return begun

    async def records(self, index: int) -> Sequence[object]:
        """Return the records of a journal, as others see them."""
        return (await self.shelves[index].read()).recovered.records


async def _until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that may hold for one step of the event loop only."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_appends_of_several_journals_during_a_commit_make_up_the_next(shelf: EtcdShelf) -> None:
    """One transaction for all of it, with the comparisons of each."""
    bench = await Bench(shelf, 5).open()
    await asyncio.gather(*await bench.together(*(each.append([record(1)]) for each in bench.journals)))
    assert [len(txn.when) for txn in bench.client.sent] == [2, 10]
    for index in range(5):
        assert await bench.records(index) == [record(1)]


async def test_pending_commits_are_split_by_the_limits_of_etcd(shelf: EtcdShelf) -> None:
    """No more than 128 operations, and no more than a MiB of them unless one alone has more."""
    bench = await Bench(shelf, 7).open()
    many = [change(f"k{n}", b"x") for n in range(41)]
    large = [change("large", b"x" * 400_000)]
    appends = [*(each.append(many) for each in bench.journals[:4])]
    appends += [each.append(large) for each in bench.journals[4:]]
    await asyncio.gather(*await bench.together(*appends))
    # Three with 42 operations fit; the fourth with two large ones; the third large one.
    assert [len(txn.when) // 2 for txn in bench.client.sent] == [1, 3, 3, 1]


async def test_a_journal_that_was_fenced_off_fails_alone(shelf: EtcdShelf) -> None:
    """The others of its transaction are done, in the next one."""
    bench = await Bench(shelf, 3).open()
    new = await bench.shelves[1].take_over("new")
    await new.append([record(1)])
    bench.client.from_now(lambda n: Fate.ANSWERED)
    begun = await bench.together(*(each.append([change("k", b"old")]) for each in bench.journals))
    outcomes = await asyncio.gather(*begun, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), OwnershipLost, type(None)]
    assert "another replica owns" in str(outcomes[1])
    assert [len(txn.when) // 2 for txn in bench.client.sent] == [1, 3, 2]
    assert (await bench.shelves[1].read()).recovered.store_entries == []
    for index in (0, 2):
        assert (await bench.shelves[index].read()).recovered.store_entries == [change("k", b"old")]
        await bench.journals[index].append([record(1)])


async def test_a_journal_whose_session_is_lost_fails_alone(shelf: EtcdShelf) -> None:
    """Although it had a part in a transaction that was done: its append fails, the others succeed."""
    session = await Session.open(shelf.client, TTL)
    bench = Bench(shelf, 2)
    lost = bench.journals[0] = bench.shelves[0].journal(session=session, pool=bench.pool)
    await bench.open()
    hold = asyncio.Event()
    appends = [each.append([record(1)]) for each in bench.journals]
    begun = await bench.together(*appends, then_hold=hold)
    await bench.client.done.wait()
    await session.close()
    with pytest.raises(OwnershipLost, match="lost the journal"):
        await begun[0]
    assert not begun[1].done()
    bench.client.hold = None
    hold.set()
    await begun[1]
    await lost.close()


@pytest.mark.parametrize("lost", [Fate.ANSWER_LOST, Fate.REQUEST_LOST])
async def test_a_commit_of_several_whose_answer_is_lost_is_done_once_for_each(
    shelf: EtcdShelf, lost: Fate
) -> None:
    """They send it again with other journals than before, and none of the copies does anything afterwards."""
    bench = await Bench(shelf, 3).open()
    for gate in bench.gates:
        gate.clear()
    bench.client.from_now(lambda n: lost if n == 1 else Fate.ANSWERED)
    a, b, c = bench.journals
    begun = await bench.together(a.append([record(1)]), b.append([record(1)]))
    await _until(lambda: len(bench.client.sent) == 2)
    # Again: a with c, then b alone.
    bench.gates[0].set()
    begun += await bench.together(c.append([record(1)]))
    await asyncio.gather(begun[0], begun[2])
    assert not begun[1].done()
    bench.gates[1].set()
    await asyncio.gather(*begun)
    copies = list(bench.client.sent)
    before = [await each.snapshot() for each in bench.shelves]
    for copy in copies:
        assert not (await EtcdClient.transact(bench.client, copy)).succeeded
    assert [await each.snapshot() for each in bench.shelves] == before
    await asyncio.gather(*(each.append([record(2)]) for each in bench.journals))
    for index in range(3):
        assert await bench.records(index) == [record(1), record(2)]


async def test_a_copy_of_several_that_lands_late_does_nothing_once_one_of_them_has_moved_on(
    shelf: EtcdShelf,
) -> None:
    """Also nothing for the other, which has not; its own copy does it."""
    bench = await Bench(shelf, 2).open()
    bench.gates[1].clear()
    bench.client.from_now(lambda n: Fate.REQUEST_LOST if n == 1 else Fate.ANSWERED)
    begun = await bench.together(*(each.append([record(1)]) for each in bench.journals))
    await begun[0]
    copy = bench.client.sent[1]
    assert len(copy.when) == 4
    assert not (await EtcdClient.transact(bench.client, copy)).succeeded
    assert await bench.records(0) == [record(1)]
    assert await bench.records(1) == []
    bench.gates[1].set()
    await begun[1]
    assert await bench.records(1) == [record(1)]


async def test_a_copy_of_several_that_lands_late_but_first_is_the_one_that_counts(shelf: EtcdShelf) -> None:
    """Each finds its own part done when it sends it again, alone or not."""
    bench = await Bench(shelf, 2).open()
    for gate in bench.gates:
        gate.clear()
    bench.client.from_now(lambda n: Fate.REQUEST_LOST if n == 1 else Fate.ANSWERED)
    begun = await bench.together(*(each.append([record(1)]) for each in bench.journals))
    await _until(lambda: len(bench.client.sent) == 2)
    assert (await EtcdClient.transact(bench.client, bench.client.sent[1])).succeeded
    before = [await each.snapshot() for each in bench.shelves]
    for gate, append in zip(bench.gates, begun, strict=True):
        gate.set()
        await append
    assert [await each.snapshot() for each in bench.shelves] == before
    await asyncio.gather(*(each.append([record(2)]) for each in bench.journals))


async def test_an_owner_that_goes_while_its_commit_waits_leaves_the_others_alone(shelf: EtcdShelf) -> None:
    """A commit without a waiting caller is not sent."""
    bench = await Bench(shelf, 2).open()
    bench.client.hold = hold = asyncio.Event()
    first = asyncio.create_task(bench.first.append([]))
    await bench.client.done.wait()
    begun = [asyncio.create_task(each.append([record(1)])) for each in bench.journals]
    await until(lambda: len(bench.pool._waiting) == 2)
    bench.client.hold = None
    await bench.journals[0]._give_up()
    with pytest.raises(JournalError, match="is closed"):
        await begun[0]
    hold.set()
    await asyncio.gather(first, begun[1])
    # Besides the first, the release of one and the commit of the other.
    assert [len(txn.when) for txn in bench.client.sent] == [2, 1, 2]
    assert await bench.records(0) == []
    assert await bench.records(1) == [record(1)]


@pytest.mark.parametrize(
    "options", [["--max-txn-ops", "10"], ["--max-request-bytes", "20000"]], ids=["operations", "bytes"]
)
async def test_a_refused_commit_of_several_is_sent_one_by_one(tmp_path: Path, options: list[str]) -> None:
    """Only the journal whose own commit is too large gets the error; and from then on fewer go together."""
    with etcd_cluster(tmp_path, extra=options) as cluster:
        async with etcd_shelf(cluster.url) as shelf:
            bench = await Bench(shelf, 5).open()
            fine = [change("k", b"x" * 5_000)]
            excessive = [change(f"k{n}", b"x" * 5_000) for n in range(30)]
            begun = await bench.together(
                *(each.append(fine) for each in bench.journals[:4]), bench.journals[4].append(excessive)
            )
            outcomes = await asyncio.gather(*begun, return_exceptions=True)
            assert outcomes[:4] == [None] * 4
            assert isinstance(outcomes[4], JournalError)
            assert not isinstance(outcomes[4], OwnershipLost)
            await asyncio.gather(*await bench.together(*(each.append(fine) for each in bench.journals[:4])))
            sizes = [len(txn.when) // 2 for txn in bench.client.sent]
            assert sizes == [1, 5, 1, 1, 1, 1, 1, 1, 2, 2]


async def test_a_commit_alone_is_sent_as_it_is(shelf: EtcdShelf) -> None:
    """At once, although nothing else comes: without a timer, however short."""
    bench = await Bench(shelf, 1).open()
    append = asyncio.create_task(bench.journals[0].append([record(1)]))
    for _ in range(20):  # steps of an event loop that has nothing else to do
        await asyncio.sleep(0)
    assert len(bench.client.sent) == 1
    await append


def _pair(key: bytes, create: int, mod: int) -> KeyValue:
    return KeyValue(key, b"", create, mod, 1, 0)


def _fenced(name: bytes) -> Txn:
    owner, head = name + b"/owner", name + b"/head"
    return Txn([CreateRevision(owner, 3), ModRevision(head, 7)], [Put(head, name)], [Get(owner), Get(head)])


@pytest.mark.parametrize(
    ("owner", "head", "held"),
    [
        ((3, 3), (2, 7), True),
        ((3, 9), (2, 7), True),
        ((4, 4), (2, 7), False),
        ((3, 3), (2, 8), False),
        ((3, 3), None, False),
        (None, (2, 7), False),
    ],
)
def test_a_commit_that_others_blocked_differs_from_one_that_failed(
    owner: tuple[int, int] | None, head: tuple[int, int] | None, held: bool
) -> None:
    """By its own keys, with any state of the others."""
    txns = [_fenced(b"a"), _fenced(b"b"), _fenced(b"c")]
    found: list[list[KeyValue]] = [[_pair(b"a/owner", 3, 3)], [_pair(b"a/head", 2, 7)]]
    found += [[] if owner is None else [_pair(b"b/owner", *owner)]]
    found += [[] if head is None else [_pair(b"b/head", *head)]]
    found += [[], []]
    a, b, c = split(txns, TxnResult(succeeded=False, revision=20, found=found))
    assert a is None
    assert (b is None) == held
    assert b is None or b.found == found[2:4]
    assert c is not None
    assert not c.succeeded


def test_a_head_that_is_not_there_yet_is_as_it_should_be_for_the_first_commit() -> None:
    """0 stands for an absent key."""
    txn = Txn([ModRevision(b"head", 0)], [Put(b"head", b"")], [Get(b"head")])
    result = TxnResult(succeeded=False, revision=20, found=[[], [_pair(b"a/owner", 4, 4)], []])
    assert split([txn, _fenced(b"a")], result)[0] is None


def test_a_transaction_of_several_has_all_that_is_in_each() -> None:
    """Above all each comparison."""
    txns = [_fenced(b"a"), _fenced(b"b")]
    whole = merged(txns)
    assert [*whole.when] == [*txns[0].when, *txns[1].when]
    assert [*whole.then] == [*txns[0].then, *txns[1].then]
    assert [*whole.otherwise] == [*txns[0].otherwise, *txns[1].otherwise]
    assert merged(txns[:1]) is txns[0]
