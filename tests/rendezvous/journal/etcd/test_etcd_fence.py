"""No write of a former owner reaches a journal on etcd, and no transaction that is sent twice is applied twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.session import Session
from rallypoint.etcd.values import Txn
from rallypoint.rendezvous.journal.etcd.keys import OwnedElsewhere
from rallypoint.rendezvous.journal.journal import JournalError, OwnershipLost
from rendezvous.journal.entries import change, record
from rendezvous.journal.etcd_shelf import TTL, EtcdShelf, Fate, has_fence
from support.etcd_server import NEEDS_ETCD

pytestmark = NEEDS_ETCD


async def test_an_owner_whose_key_was_claimed_by_another_writes_nothing(shelf: EtcdShelf) -> None:
    """Although its session lives and it does not know of the claim; and it never tries again."""
    old = shelf.journal("old")
    await old.open()
    await old.append([record(1)])
    new = await shelf.take_over("new")
    await new.append([record(2)])
    before = await shelf.read()
    with pytest.raises(OwnershipLost, match="another replica owns"):
        await old.append([record(2), change("k", b"old")])
    assert await shelf.read() == before
    shelf.client.from_now(lambda n: Fate.ANSWERED)
    with pytest.raises(OwnershipLost):
        await old.append([record(2)])
    await old.close()
    assert shelf.client.sent == []
    owner = await shelf.owner()
    assert owner is not None
    assert owner.replica == "new"


async def test_an_owner_whose_key_is_gone_writes_nothing(shelf: EtcdShelf) -> None:
    """No other replica needs to have claimed it: its lease may have ended a moment ago."""
    journal = shelf.journal()
    await journal.open()
    await EtcdClient.transact(shelf.client, shelf.deletion_of_owner)
    with pytest.raises(OwnershipLost):
        await journal.append([record(1)])
    assert await shelf.keys() == []


async def test_a_key_that_an_earlier_claim_of_the_same_process_left_is_not_taken_for_its_own(
    shelf: EtcdShelf,
) -> None:
    """Copies of that claim's transactions may still be in flight."""
    left = shelf.journal()
    await left.open()
    with pytest.raises(OwnedElsewhere) as refused:
        await shelf.journal().open()
    assert refused.value.owner.replica == "a"
    assert "a:29400" in str(refused.value)
    await left.append([record(1)])


async def test_each_claim_has_a_larger_token(shelf: EtcdShelf) -> None:
    """That of an earlier owner is refused for ever."""
    tokens = []
    for _ in range(3):
        journal = shelf.journal()
        await journal.open()
        tokens.append(journal.fence)
        await journal.close()
        assert await shelf.owner() is None
        assert journal.fence == 0
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("lost", [Fate.ANSWER_LOST, Fate.REQUEST_LOST])
async def test_a_claim_whose_answer_is_lost_is_had_once(shelf: EtcdShelf, lost: Fate) -> None:
    """It recognizes its own key."""
    shelf.client.from_now(lambda n: lost if n < 2 else Fate.ANSWERED)
    journal = shelf.journal()
    await journal.open()
    found = await shelf.client.get(shelf.place.owner_key)
    assert found.pairs[0].create_revision == journal.fence
    await journal.append([record(1)])
    await journal.close()


@pytest.mark.parametrize("lost", [Fate.ANSWER_LOST, Fate.REQUEST_LOST])
async def test_a_commit_whose_answer_is_lost_is_done_once(shelf: EtcdShelf, lost: Fate) -> None:
    """It is sent again until there is a response, and is then known to be done."""
    journal = shelf.journal()
    await journal.open()
    shelf.client.from_now(lambda n: lost if n < 3 else Fate.ANSWERED)
    await journal.append([record(1), change("k", b"1")])
    assert len(shelf.client.sent) == 4
    await journal.append([record(2), change("k", b"2")])
    await journal.close()
    again = shelf.journal()
    recovered = await again.open()
    assert recovered.records == [record(1), record(2)]
    assert recovered.store_entries == [change("k", b"2")]


@pytest.mark.parametrize("lost", [Fate.ANSWER_LOST, Fate.REQUEST_LOST])
@pytest.mark.parametrize("large", [False, True])
async def test_a_copy_of_a_commit_that_arrives_late_does_nothing(
    shelf: EtcdShelf, lost: Fate, large: bool
) -> None:
    """All later changes stay, of the same owner and of the next one."""
    journal = shelf.journal()
    await journal.open()
    shelf.client.from_now(lambda n: lost if n == 0 else Fate.ANSWERED)
    await journal.append([record(1), *(change(f"k{n}", b"old") for n in range(300 if large else 1))])
    await journal.append([change("k0", b"new")])
    copies = shelf.client.sent[:-1]
    assert len(copies) == (6 if large else 2)
    await _nothing_lands(shelf, copies, journal.fence)
    await journal.append([change("k0", None)])
    await _nothing_lands(shelf, copies, journal.fence)
    after = await shelf.take_over()
    await _nothing_lands(shelf, copies, journal.fence)
    await after.append([change("k0", b"newer")])
    await _nothing_lands(shelf, copies, journal.fence)


async def _nothing_lands(shelf: EtcdShelf, copies: Sequence[Txn], fence: int) -> None:
    before = await shelf.snapshot()
    for copy in copies:
        assert has_fence(copy, fence)
        result = await EtcdClient.transact(shelf.client, copy)
        assert not result.succeeded
    assert await shelf.snapshot() == before


async def test_a_copy_that_lands_between_a_takeover_s_claim_and_its_reading_is_refused(
    shelf: EtcdShelf,
) -> None:
    """After its claim only the new owner changes the journal: its copy of the contents stays valid."""
    old = shelf.journal("old")
    await old.open()
    shelf.client.from_now(lambda n: Fate.REQUEST_LOST if n == 0 else Fate.NEVER)
    append = asyncio.create_task(old.append([record(1)]))
    await shelf.client.killed.wait()
    append.cancel()
    (copy, _) = shelf.client.sent
    shelf.client.from_now(lambda n: Fate.ANSWERED)
    new = await shelf.take_over("new")
    assert not (await EtcdClient.transact(shelf.client, copy)).succeeded
    await new.append([record(1)])
    assert (await shelf.read()).recovered.records == [record(1)]


async def test_a_commit_during_which_the_session_is_lost_is_not_acknowledged(shelf: EtcdShelf) -> None:
    """Also if the commit was done: the next owner may already publish later ones."""
    session = await Session.open(shelf.client, TTL)
    journal = shelf.journal(session=session)
    await journal.open()
    gate = asyncio.Event()
    shelf.client.hold = gate
    append = asyncio.create_task(journal.append([record(1)]))
    await shelf.client.done.wait()
    await session.close()
    with pytest.raises(OwnershipLost, match="lost the journal"):
        await append
    gate.set()
    shelf.client.hold = None
    assert (await shelf.read()).recovered.records == [record(1)]
    shelf.client.from_now(lambda n: Fate.ANSWERED)
    with pytest.raises(OwnershipLost):
        await journal.append([record(2)])
    await journal.close()
    assert shelf.client.sent == []


async def test_a_commit_is_not_acknowledged_if_the_lease_is_over_by_the_own_clock(shelf: EtcdShelf) -> None:
    """A pause longer than the lease, between the commit and the response: the clock is read after it."""
    now = [0.0]
    session = await Session.open(shelf.client, TTL, clock=lambda: now[0])
    journal = shelf.journal(session=session)
    await journal.open()
    gate = asyncio.Event()
    shelf.client.hold = gate
    append = asyncio.create_task(journal.append([record(1)]))
    await shelf.client.done.wait()
    now[0] = 2 * TTL
    gate.set()
    with pytest.raises(OwnershipLost, match="lost the journal"):
        await append
    shelf.client.hold = None
    shelf.client.from_now(lambda n: Fate.ANSWERED)
    await journal.close()
    assert shelf.client.sent == []
    await session.close()


async def test_a_space_with_a_foreign_write_is_written_no_more(shelf: EtcdShelf) -> None:
    """The owner's view of it is no longer valid."""
    journal = shelf.journal()
    await journal.open()
    await journal.append([record(1)])
    await shelf.put("head", b"")
    with pytest.raises(JournalError, match="by a process that does not own it"):
        await journal.append([record(2)])
