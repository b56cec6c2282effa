"""Sessions: kept alive while any majority answers, and known to be lost before another client can have the lease."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest

from etcd.patient import FIRST, put
from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.cluster import EtcdChannel
from rallypoint.etcd.endpoint import parse_address
from rallypoint.etcd.session import Session, SessionLost
from rallypoint.etcd.values import Put, Txn
from rallypoint.rpc.loop import boot_time
from rallypoint.rpc.pace import Pace
from support.etcd_server import EtcdCluster
from support.link import Link
from support.waiting import PATIENCE, until


class Clock:
    """The machine's clock, plus the seconds that a test adds."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return boot_time() + self.ahead


async def leased_key(client: EtcdClient, session: Session, key: bytes) -> None:
    await client.transact(Txn([], [Put(key, b"", session.lease)]))


async def is_there(client: EtcdClient, key: bytes) -> bool:
    return bool((await client.get(key)).pairs)


async def test_a_session_outlives_its_lease_by_keeping_it_alive(client: EtcdClient) -> None:
    """It holds for as long as it is open; then its keys are gone at once."""
    session = await Session.open(client, 8)
    assert session.ttl == 8
    await leased_key(client, session, b"/session/kept")
    began = time.monotonic()
    while time.monotonic() - began < 10:
        session.check()
        assert await is_there(client, b"/session/kept")
        await asyncio.sleep(0.1)
    closing = asyncio.create_task(session.lost())
    await session.close()
    await closing
    assert not await is_there(client, b"/session/kept")
    with pytest.raises(SessionLost, match="closed"):
        session.check()


async def test_a_session_knows_the_time_that_it_got(client: EtcdClient) -> None:
    """It is more than requested if elections take longer than that."""
    session = await Session.open(client, 0.5)
    assert session.ttl >= 1
    (granted,) = [session.ttl]
    assert await client.keep_alive(session.lease) == granted
    await session.close()


async def test_a_session_whose_lease_is_gone_is_lost(client: EtcdClient) -> None:
    """It is lost at etcd's reply, before its time is over."""
    session = await Session.open(client, 12)
    await client.revoke(session.lease)
    began = time.monotonic()
    await asyncio.wait_for(session.lost(), PATIENCE)
    assert time.monotonic() - began < 11
    assert not session.held()
    with pytest.raises(SessionLost, match="etcd reports that it has ended"):
        session.check()
    await session.close()


async def test_a_paused_client_loses_its_session_before_it_acts(client: EtcdClient) -> None:
    """No task has run yet, and the session is already lost, and stays so, though etcd would still prolong the lease."""
    clock = Clock()
    session = await Session.open(client, 600, clock=clock)
    assert session.held()
    losing = asyncio.create_task(session.lost())
    await asyncio.sleep(0)
    clock.ahead += 580
    assert not session.held()
    with pytest.raises(SessionLost, match="could not be kept alive for 600 s"):
        session.check()
    # The caller that finds the loss wakes the waiting tasks: the next timer is due in 200 s.
    await asyncio.wait_for(losing, PATIENCE)
    # Its keep-alives are a third of its time apart, by the machine's clock; they were due long ago.
    assert await client.keep_alive(session.lease) == 600
    assert not session.held()
    await session.close()


class Gate:
    """A clock controlled by the test: each sleep lasts until it is let through."""

    def __init__(self) -> None:
        self.sleeping = 0
        self._waiting: asyncio.Future[None] | None = None

    async def sleep(self, _seconds: float) -> None:
        self.sleeping += 1
        self._waiting = asyncio.get_running_loop().create_future()
        await self._waiting

    def let_through(self) -> None:
        assert self._waiting is not None
        self._waiting.set_result(None)


async def test_time_is_counted_from_the_sending(
    connect: Callable[..., EtcdClient], shared_etcd: EtcdCluster
) -> None:
    """A late reply, to the first request or to a keep-alive, proves nothing about the time since it was sent."""
    async with Link(shared_etcd.endpoints) as relay:
        client = connect(f"etcd://{relay.address}?attempt-timeout=60&request-timeout=60")
        await client.get(b"a")
        clock, gate = Clock(), Gate()
        relay.part()
        opening = asyncio.create_task(Session.open(client, 600, clock=clock, pace=Pace(sleep=Gate().sleep)))
        await asyncio.sleep(0.3)
        clock.ahead = 400
        relay.heal()
        late = await opening
        assert late.held()
        clock.ahead = 580
        assert not late.held()

        session = await Session.open(client, 600, clock=clock, pace=Pace(sleep=gate.sleep))
        await until(lambda: gate.sleeping == 1, "the pause before the first keep-alive")
        clock.ahead = 980
        relay.part()
        gate.let_through()
        await asyncio.sleep(0.3)
        clock.ahead = 1140
        relay.heal()
        await until(lambda: gate.sleeping == 2, "the pause after the keep-alive")
        clock.ahead = 1480
        assert session.held()
        clock.ahead = 1560
        assert not session.held()
        await late.close()
        await session.close()


async def test_a_session_is_lost_before_its_keys_are(
    connect: Callable[..., EtcdClient], shared_etcd: EtcdCluster, client: EtcdClient
) -> None:
    """It is cut off from etcd without an error: whenever its key is gone, it does not believe that it holds the key."""
    async with Link(shared_etcd.endpoints) as relay:
        session = await Session.open(connect(f"etcd://{relay.address}"), 5)
        await leased_key(client, session, b"/session/cut")
        relay.part()
        began = time.monotonic()
        while await is_there(client, b"/session/cut"):
            assert time.monotonic() - began < PATIENCE
        assert not session.held()
        await asyncio.wait_for(session.lost(), PATIENCE)
        await asyncio.wait_for(session.close(), PATIENCE / 2)


@pytest.mark.slow
async def test_a_session_survives_the_loss_of_the_members_it_uses(
    connect: Callable[..., EtcdClient], trio: EtcdCluster
) -> None:
    """One is killed, another stopped, for longer than the lease lives: the remaining member keeps it alive."""
    client = connect(trio.url, pace=FIRST)
    session = await Session.open(client, 9)
    await leased_key(client, session, b"/session/moved")
    for number in range(2):
        member = next(each for each in trio.members if each.endpoint == client.members.current.where)
        if number == 0:
            member.kill()
        else:
            member.send(signal.SIGSTOP)
        other = connect(trio.url)
        began = time.monotonic()
        while time.monotonic() - began < 12:
            session.check()
            await asyncio.sleep(0.1)
        assert await is_there(other, b"/session/moved")
        if number == 0:
            member.start()
        else:
            member.send(signal.SIGCONT)
        member.wait()
    await session.close()


@pytest.mark.slow
async def test_a_session_is_lost_with_the_majority(
    connect: Callable[..., EtcdClient], trio: EtcdCluster
) -> None:
    """It is lost at its deadline, neither never nor at once; and the next one begins when etcd is back."""
    client = connect(trio.url)
    session = await Session.open(client, 4)
    for member in trio.members[1:]:
        member.kill()
    assert session.held()
    await asyncio.wait_for(session.lost(), PATIENCE)
    await session.close()
    for member in trio.members[1:]:
        member.start()
    await put(client, b"a")
    again = await Session.open(client, 4)
    assert again.held()
    await again.close()


@pytest.mark.slow
async def test_a_session_survives_many_members_that_hang(
    connect: Callable[..., EtcdClient], shared_etcd: EtcdCluster
) -> None:
    """None of them refuses, but the client does not wait for one after the other."""
    async with AsyncExitStack() as stack:
        relays = [await stack.enter_async_context(Link(shared_etcd.endpoints)) for _ in range(5)]
        client = connect(f"etcd://{','.join(relay.address for relay in relays)}", pace=FIRST)
        session = await Session.open(client, 15)
        for relay in relays[:-1]:
            relay.part()
        began = time.monotonic()
        while time.monotonic() - began < 17:
            session.check()
            await asyncio.sleep(0.1)
        await session.close()


class MovedOnMeanwhile(EtcdClient):
    """Another caller has moved away from the member by the time that a keep-alive is answered."""

    async def term(self, *, at: EtcdChannel | None = None, timeout: float | None = None) -> int:
        self.members.move_on(self.members.current)
        return await super().term(at=at, timeout=timeout)


@pytest.mark.slow
async def test_a_session_asks_no_other_member_than_the_one_that_prolonged_it(
    shared_etcd: EtcdCluster,
) -> None:
    """That one is known to answer; the one that all other callers use from now on may hang."""
    async with Link(shared_etcd.endpoints) as relay:
        url = f"etcd://{shared_etcd.endpoints},{relay.address}?attempt-timeout=60&request-timeout=60"
        async with MovedOnMeanwhile(parse_address(url, {}), pace=FIRST) as client:
            relay.part()
            session = await Session.open(client, 6)
            began = time.monotonic()
            while time.monotonic() - began < 8:
                session.check()
                await asyncio.sleep(0.1)
            await session.close()


class ElectedMeanwhile(EtcdClient):
    """Finds a new leader after each keep-alive, as if the one that answered had been paused before its successor was
    elected and had not noticed yet. (A real one does so for milliseconds only.)"""

    async def term(self, *, at: EtcdChannel | None = None, timeout: float | None = None) -> int:
        return await super().term(at=at, timeout=timeout) + 1


async def test_a_reply_of_a_former_leader_does_not_count(
    shared_etcd: EtcdCluster, client: EtcdClient
) -> None:
    """The lease exists and it replies so, but its successor may have let the lease expire."""
    async with ElectedMeanwhile(parse_address(shared_etcd.url, {})) as deceived:
        session = await Session.open(deceived, 6)
        await asyncio.wait_for(session.lost(), PATIENCE)
        # It was prolonged all the time, and would have been for ever.
        assert await client.keep_alive(session.lease) > 0
        await session.close()


class Faulty(EtcdClient):
    """A client with a bug."""

    async def term(self, *, at: EtcdChannel | None = None, timeout: float | None = None) -> int:
        raise ZeroDivisionError


async def test_a_bug_in_keeping_it_alive_loses_the_session(shared_etcd: EtcdCluster) -> None:
    """It is lost, instead of leaving its users with a session that is neither held nor lost."""
    async with Faulty(parse_address(shared_etcd.url, {})) as faulty:
        session = await Session.open(faulty, 3)
        await asyncio.wait_for(session.lost(), PATIENCE)
        assert not session.held()
        await session.close()


async def test_an_election_is_seen_in_the_term(connect: Callable[..., EtcdClient], trio: EtcdCluster) -> None:
    """Each member reports it."""
    client = connect(trio.url + "?request-timeout=60")
    clients = [client, *(connect(f"etcd://{member.endpoint}?request-timeout=60") for member in trio.members)]
    async with asyncio.timeout(PATIENCE):
        while len(terms := {await each.term() for each in clients}) > 1:
            pass  # a slow machine may have had an election between two answers
    (before,) = terms
    for member in trio.members:
        if member.metric("etcd_server_is_leader") == 1:
            member.restart()
    assert await client.term() > before


async def test_many_sessions_begin_and_end_and_leave_nothing(client: EtcdClient) -> None:
    """No task and no lease remain."""
    tasks = len(asyncio.all_tasks())
    sessions = await asyncio.gather(*(Session.open(client, 30) for _ in range(20)))
    assert len({session.lease for session in sessions}) == 20
    await asyncio.gather(*(session.close() for session in sessions))
    assert [await client.keep_alive(session.lease) for session in sessions] == [0] * 20
    await until(lambda: len(asyncio.all_tasks()) <= tasks, "tasks to end")
