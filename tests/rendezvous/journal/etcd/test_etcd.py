"""The journal on etcd: group commit, its end, and refusals of etcd."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rallypoint.etcd.session import Session
from rallypoint.rendezvous.journal.etcd.journal import EtcdJournal
from rallypoint.rendezvous.journal.etcd.pool import CommitPool
from rallypoint.rendezvous.journal.journal import Entry, JournalError, OwnershipLost
from rallypoint.rpc.pace import Pace
from rendezvous.journal.entries import change, record
from rendezvous.journal.etcd_shelf import TTL, EtcdShelf, Fate, etcd_shelf
from support.etcd_server import NEEDS_ETCD, EtcdCluster, etcd_cluster
from support.waiting import PATIENCE, until

pytestmark = NEEDS_ETCD


@pytest.fixture
async def journal(shelf: EtcdShelf) -> AsyncIterator[EtcdJournal]:
    """A journal, opened; its earlier transactions are not counted."""
    opened = shelf.journal()
    await opened.open()
    shelf.client.from_now(lambda n: Fate.ANSWERED)
    yield opened
    await opened.close()


async def test_appends_during_a_commit_make_up_the_next(shelf: EtcdShelf, journal: EtcdJournal) -> None:
    """One transaction for all of it, as long as it fits; none is delayed for it."""
    shelf.client.hold = asyncio.Event()
    appends = [asyncio.create_task(journal.append([record(1)]))]
    await shelf.client.done.wait()
    appends += [asyncio.create_task(journal.append([change(f"k{n}", b"x")])) for n in range(98)]
    appends += [asyncio.create_task(journal.append([change(f"l{n}", b"x")])) for n in range(2)]
    await asyncio.sleep(0)
    assert len(shelf.client.sent) == 1
    shelf.client.hold.set()
    await asyncio.gather(*appends)
    # Each also has the head.
    assert [len(txn.then) for txn in shelf.client.sent] == [2, 99, 3]


async def test_nothing_is_sent_while_nothing_is_appended(shelf: EtcdShelf, journal: EtcdJournal) -> None:
    """An idle shard costs etcd nothing."""
    await journal.append([record(1)])
    await asyncio.sleep(0.1)
    assert len(shelf.client.sent) == 1


async def test_an_append_of_nothing_checks_the_ownership(shelf: EtcdShelf, journal: EtcdJournal) -> None:
    """It is a commit like any other."""
    await journal.append([])
    await shelf.take_over()
    with pytest.raises(OwnershipLost):
        await journal.append([])


async def test_an_entry_out_of_sequence_breaks_the_journal(shelf: EtcdShelf, journal: EtcdJournal) -> None:
    """As of every other journal: nothing of it is written, nor of anything after it."""
    with pytest.raises(JournalError, match="comes where record 1 is due") as refused:
        await journal.append([change("k", b"x"), record(2)])
    with pytest.raises(JournalError) as again:
        await journal.append([record(1)])
    assert again.value is refused.value
    assert shelf.client.sent == []


async def test_text_without_an_encoding_breaks_the_journal(shelf: EtcdShelf, journal: EtcdJournal) -> None:
    """And no caller keeps waiting."""
    with pytest.raises(JournalError, match="can't write the journal"):
        await journal.append([change("\ud800", b"x")])
    assert shelf.client.sent == []


async def test_a_closed_journal_takes_no_more(shelf: EtcdShelf, journal: EtcdJournal) -> None:
    """As soon as the closing begins; another process can have it."""
    append = asyncio.create_task(journal.append([record(1)]))
    await asyncio.sleep(0)
    closing = asyncio.create_task(journal.close())
    await asyncio.sleep(0)
    with pytest.raises(JournalError, match="is closed"):
        await journal.append([record(2)])
    await append
    await closing
    with pytest.raises(JournalError, match="is closed"):
        await journal.append([record(2)])
    assert await shelf.owner() is None
    assert len(shelf.client.sent) == 2
    await journal.close()
    assert len(shelf.client.sent) == 2


async def test_the_end_of_the_session_is_that_of_the_journal(shelf: EtcdShelf) -> None:
    """Nothing is tried any more, also if no append follows for long."""
    session = await Session.open(shelf.client, TTL)
    journal = shelf.journal(session=session)
    await journal.open()
    await session.close()
    shelf.client.from_now(lambda n: Fate.ANSWERED)
    with pytest.raises(OwnershipLost, match=r"lost the journal in etcd under .*: the lease"):
        await journal.append([record(1)])
    await journal.close()
    assert shelf.client.sent == []
    with pytest.raises(OwnershipLost):
        await shelf.journal(session=session).open()
    assert shelf.client.sent == []


async def test_a_lease_that_etcd_does_not_know_claims_nothing(shelf: EtcdShelf) -> None:
    """Although the session does not know of its end yet."""
    session = await Session.open(shelf.client, TTL)
    await shelf.client.revoke(session.lease)
    with pytest.raises(OwnershipLost, match="requested lease not found"):
        await shelf.journal(session=session).open()
    await session.close()


async def test_callers_that_go_away_leave_the_commit_to_the_others(
    shelf: EtcdShelf, journal: EtcdJournal
) -> None:
    """Also if all of them go."""
    shelf.client.hold = asyncio.Event()
    appends = [asyncio.create_task(journal.append([record(n)])) for n in range(1, 4)]
    await shelf.client.done.wait()
    for append in appends:
        append.cancel()
    await asyncio.wait(appends)
    shelf.client.hold.set()
    await journal.append([record(4)])
    assert (await shelf.read()).recovered.records == [record(n) for n in range(1, 5)]


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[EtcdCluster]:
    """An etcd for the test alone; `indirect` parameters: its options."""
    with etcd_cluster(tmp_path, extra=getattr(request, "param", ())) as started:
        yield started


@pytest.mark.slow
async def test_closing_ends_though_etcd_is_away(cluster: EtcdCluster) -> None:
    """In a bounded time; and a waiting append gets the error that its outcome is unknown."""
    async with etcd_shelf(cluster.url) as shelf:
        journal = shelf.journal()
        await journal.open()
        cluster.members[0].send(signal.SIGSTOP)
        append = asyncio.create_task(journal.append([record(1)]))
        await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE):
            await journal.close()
        with pytest.raises(JournalError, match="is closed"):
            await append
        cluster.members[0].send(signal.SIGCONT)


async def test_an_etcd_that_comes_back_takes_the_unanswered_commits(cluster: EtcdCluster) -> None:
    """The same commit is sent until there is a response: a killed etcd loses nothing and does nothing twice."""
    async with etcd_shelf(cluster.url) as shelf:
        journal = shelf.journal()
        await journal.open()
        appends = [asyncio.create_task(journal.append([record(n)])) for n in range(1, 3)]
        await asyncio.sleep(0)
        cluster.members[0].kill()
        appends += [asyncio.create_task(journal.append([record(n)])) for n in range(3, 40)]
        await asyncio.sleep(0)
        cluster.members[0].start()
        await asyncio.gather(*appends)
        assert (await shelf.read()).recovered.records == [record(n) for n in range(1, 40)]
        await journal.close()


async def test_a_majority_that_goes_and_comes_back_loses_nothing(tmp_path: Path) -> None:
    """No append returns meanwhile; then all do, and none is done twice."""
    with etcd_cluster(tmp_path, 3) as cluster:
        async with etcd_shelf(cluster.url) as shelf:
            journal = shelf.journal()
            await journal.open()
            await journal.append([record(1)])
            for member in cluster.members[1:]:
                member.kill()
            appends = [asyncio.create_task(journal.append([record(n)])) for n in range(2, 5)]
            done, _ = await asyncio.wait(appends, timeout=3)
            assert not done
            for member in cluster.members[1:]:
                member.start()
            await asyncio.gather(*appends)
            assert (await shelf.read()).recovered.records == [record(n) for n in range(1, 5)]
            await journal.close()


@pytest.mark.parametrize(
    ("cluster", "entries", "why"),
    [
        (
            ["--max-request-bytes", "20000"],
            [change("k", b"x" * 30_000)],
            "raise etcd's --max-request-bytes to",
        ),
        (["--max-txn-ops", "20"], [change(f"k{n}", b"") for n in range(30)], "raise etcd's --max-txn-ops to"),
    ],
    indirect=["cluster"],
    ids=["request too large", "too many operations"],
)
async def test_a_refusal_of_etcd_is_one_line_with_the_remedy(
    cluster: EtcdCluster, entries: list[Entry], why: str
) -> None:
    """The journal takes no more, and another process can own it, with the same limits."""
    async with etcd_shelf(cluster.url) as shelf:
        journal = shelf.journal()
        await journal.open()
        with pytest.raises(JournalError) as refused:
            await journal.append(entries)
        assert not isinstance(refused.value, OwnershipLost)
        assert str(refused.value).startswith(
            f"can't write the journal in etcd under {shelf.place}: 127.0.0.1"
        )
        assert why in str(refused.value)
        assert "\n" not in str(refused.value)
        with pytest.raises(JournalError):
            await journal.append([record(1)])
        await journal.close()
        assert await shelf.owner() is None


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [["--quota-backend-bytes", "4000000"]], indirect=True)
async def test_a_full_etcd_is_waited_for(cluster: EtcdCluster) -> None:
    """The journal stays ours meanwhile. Once closed, waiting appends have no known outcome, and another can own it."""
    async with etcd_shelf(cluster.url) as shelf:
        pool = CommitPool(shelf.client)
        journal = shelf.journal(pool=pool, pace=Pace())
        await journal.open()

        async def fill() -> None:
            for number in itertools.count():
                await journal.append([change(f"k{number}", b"x" * 900_000)])

        filling = asyncio.create_task(fill())
        await until(lambda: bool(pool.full), "the pool to be full")
        assert "or raise its --quota-backend-bytes" in pool.full
        assert not filling.done()
        assert await shelf.owner() is not None
        await journal.close()
        with pytest.raises(JournalError):
            await filling
        assert await shelf.owner() is None


async def test_a_user_without_the_right_to_write_gets_the_remedy(cluster: EtcdCluster) -> None:
    """At the claim, before anything is written."""
    password = secrets.token_hex(8)
    for command in (
        ("user", "add", f"root:{password}"),
        ("user", "add", f"reader:{password}"),
        ("role", "add", "reading"),
        ("role", "grant-permission", "reading", "read", "/", "--prefix"),
        ("user", "grant-role", "root", "root"),
        ("user", "grant-role", "reader", "reading"),
        ("auth", "enable"),
    ):
        await _etcdctl(cluster, *command)
    async with etcd_shelf(f"etcd://reader:{password}@{cluster.endpoints}") as shelf:
        with pytest.raises(JournalError, match=r"can't claim .* permission denied; grant the user readwrite"):
            await shelf.journal().open()


async def _etcdctl(cluster: EtcdCluster, *command: str) -> None:
    process = await asyncio.create_subprocess_exec(
        "etcdctl",
        "--endpoints",
        cluster.endpoints,
        *command,
        env={"ETCDCTL_API": "3", "PATH": "/usr/bin:/bin"},
        stdout=asyncio.subprocess.DEVNULL,
    )
    assert await process.wait() == 0
