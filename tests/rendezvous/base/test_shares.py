"""Limits of a service are limits of the whole: all shards of a process together keep within them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from rallypoint.rendezvous.base.errors import NotOwner
from rallypoint.rendezvous.base.limits import (
    LimitReached,
    Limits,
    Quota,
    RendezvousLimits,
    SharedTotal,
    SharedTotals,
    StateLimits,
    StoreLimits,
)
from rallypoint.rendezvous.base.refusals import (
    StateBusy,
    StatesFull,
    StoresFull,
    TooManyStates,
    TooManyWatchers,
)
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.runs.run import Member
from rallypoint.rendezvous.state.core import STATE_OVERHEAD_BYTES, SetState
from rallypoint.rendezvous.store.core import entry_bytes
from rallypoint.rendezvous.store.writes import Set
from rendezvous.engine_fixtures import writer_of
from rendezvous.shard_fixtures import RUN, Scene, ShardJournal, begun, opened, refusal_of


@asynccontextmanager
async def together(limits: Limits | None = None) -> AsyncIterator[tuple[Scene, Scene, SharedTotals]]:
    """Return two empty shards of one process."""
    totals = SharedTotals()
    async with AsyncExitStack() as stack:
        one, other = [
            await stack.enter_async_context(opened(ShardJournal(), totals=totals, limits=limits))
            for _ in range(2)
        ]
        yield one, other, totals


def used(totals: SharedTotals) -> dict[str, int]:
    """Return the counters, by name."""
    return {
        "runs": totals.runs.used,
        "event_bytes": totals.events.bytes,
        "store_bytes": totals.store_bytes.used,
        "states": totals.states.used,
        "state_bytes": totals.state_bytes.used,
        "state_queued_bytes": totals.state_queued_bytes.used,
        "state_watchers": totals.state_watchers.used,
    }


async def set_state(
    scene: Scene, run_id: str, state: bytes = b"", *, token: bytes | None = None, client: str = ""
) -> bytes:
    outcome = await scene.shard.states.set(SetState(run_id=run_id, state=state, token=token, client=client))
    assert outcome.has_set
    assert outcome.current is not None
    return outcome.current.token


def test_a_share_knows_its_own_part_and_all_others() -> None:
    """And releases its own part only."""
    total = SharedTotal()
    mine, theirs = Quota(total), Quota(total)
    mine.add(3)
    theirs.add(4)
    mine.add(-1)
    assert (mine.own, mine.others, mine.together) == (2, 4, 6)
    mine.release()
    assert (mine.own, theirs.together) == (0, 4)


async def test_runs() -> None:
    """The limit counts the runs of both shards; a forgotten run makes room in both."""
    async with together(Limits(RendezvousLimits(runs=2, run_ttl=60.0))) as (one, other, totals):
        member = await one.join("a", "first")
        await other.join("a", "second")
        await other.join("b", "second")  # not a new run
        for scene in (one, other):
            refusal = await refusal_of(scene.join("a", "third"))
            assert isinstance(refusal, LimitReached)
            assert (refusal.reason, refusal.limit) == ("TOO_MANY_RUNS", 2)
        leave = commands.Leave(member.node_id, member.lease.number, "told to stop")
        await one.shard.engine.execute("first", leave)
        one.now += 61.0
        assert await one.shard.engine.read_runs(list) == []
        await other.join("a", "third")
        assert totals.runs.used == 2


async def test_runs_of_a_client() -> None:
    """A client at its limit leaves room for other clients; a forgotten run of its own makes room again."""
    limits = Limits(RendezvousLimits(runs=9, runs_per_client=2, run_ttl=60.0))
    async with together(limits) as (one, other, totals):
        member = await one.join("a", "first", client="10.0.0.1")
        await other.join("a", "second", client="10.0.0.1")
        await other.join("b", "second", client="10.0.0.2")  # joins a run of the first client
        for scene in (one, other):
            refusal = await refusal_of(scene.join("a", "third", client="10.0.0.1"))
            assert isinstance(refusal, LimitReached)
            assert (refusal.reason, refusal.limit) == ("TOO_MANY_RUNS", 2)
            assert "client '10.0.0.1'" in str(refusal)
        await other.join("a", "third", client="10.0.0.2")
        leave = commands.Leave(member.node_id, member.lease.number, "told to stop")
        await one.shard.engine.execute("first", leave)
        one.now += 61.0
        assert await one.shard.engine.read_runs(list) == []
        await other.join("a", "fourth", client="10.0.0.1")
        used = totals.runs_by_client.used
        assert [used(client) for client in ("10.0.0.1", "10.0.0.2")] == [2, 1]
    assert [used(client) for client in ("10.0.0.1", "10.0.0.2")] == [0, 0]


async def test_states() -> None:
    """By number."""
    async with together(Limits(state=StateLimits(states=2))) as (one, other, _):
        await set_state(one, "first")
        await set_state(other, "second")
        for scene in (one, other):
            refusal = await refusal_of(set_state(scene, "third"))
            assert isinstance(refusal, TooManyStates)


async def test_states_of_a_client() -> None:
    """By number, over all shards, until one of them is dropped."""
    limits = Limits(state=StateLimits(states_per_client=2), state_ttl=60.0)
    async with together(limits) as (one, other, totals):
        await set_state(one, "first", client="10.0.0.1")
        await set_state(other, "second", client="10.0.0.1")
        for scene in (one, other):
            refusal = await refusal_of(set_state(scene, "third", client="10.0.0.1"))
            assert isinstance(refusal, TooManyStates)
            assert "client '10.0.0.1' has created 2 states" in str(refusal)
        await set_state(one, "third", client="10.0.0.2")
        one.shard.states.forget_run("first")
        await set_state(other, "fourth", client="10.0.0.1")
        used = totals.states_by_client.used
        assert [used(client) for client in ("10.0.0.1", "10.0.0.2")] == [2, 1]
        assert totals.state_bytes_by_client.used("10.0.0.1") == 2 * STATE_OVERHEAD_BYTES
    assert [used(client) for client in ("10.0.0.1", "10.0.0.2")] == [0, 0]
    assert totals.state_bytes_by_client.used("10.0.0.1") == 0


async def test_bytes_of_the_states_of_a_client() -> None:
    """The bytes of the states that it has created count, for any client that sets them; a state may always shrink."""
    most = 2 * STATE_OVERHEAD_BYTES + 100
    async with together(Limits(state=StateLimits(client_bytes=most))) as (one, other, _):
        token = await set_state(one, "first", b"x" * 60, client="10.0.0.1")
        await set_state(other, "second", b"x" * 40, client="10.0.0.1")
        await set_state(one, "third", b"x" * 100, client="10.0.0.2")
        refusal = await refusal_of(set_state(one, "first", b"x" * 61, token=token, client="10.0.0.2"))
        assert isinstance(refusal, StatesFull)
        assert (refusal.client, refusal.used_bytes, refusal.limit_bytes) == ("10.0.0.1", most + 1, most)
        token = await set_state(one, "first", b"x" * 50, token=token, client="10.0.0.2")
        await set_state(one, "first", b"x" * 60, token=token)


async def test_bytes_of_states() -> None:
    """States that are being committed count too: both shards can't take the same room."""
    most = 2 * (STATE_OVERHEAD_BYTES + 100)
    async with together(Limits(state=StateLimits(state_bytes=most))) as (one, other, _):
        await set_state(one, "first", b"x" * 100)
        one.journal.hold()
        (setting,) = await begun(set_state(one, "second", b"x" * 100))
        await one.journal.held()
        refusal = await refusal_of(set_state(other, "third"))
        assert isinstance(refusal, StatesFull)
        assert refusal.used_bytes == most + STATE_OVERHEAD_BYTES
        one.journal.release()
        await setting


VALUE = b"x" * 1_000


async def set_key(scene: Scene, member: Member, key: str = "k") -> None:
    write = Set(writer=writer_of(member), round=0, key=key, value=VALUE)
    await scene.shard.store.write(member.run_id, write)


async def test_bytes_of_the_stores_of_a_client() -> None:
    """Other clients still have room; the client has room again once one of its runs is forgotten."""
    most = 2 * entry_bytes("k", VALUE)
    limits = Limits(RendezvousLimits(run_ttl=60.0), store=StoreLimits(client_bytes=most))
    async with together(limits) as (one, other, totals):
        first = await one.join("a", "first", client="x")
        second, third = [await other.join("a", name, client="x") for name in ("second", "third")]
        foreign = await one.join("a", "foreign", client="y")
        await set_key(one, first)
        await set_key(other, second)
        refusal = await refusal_of(set_key(other, third))
        assert isinstance(refusal, StoresFull)
        assert (refusal.used_bytes, refusal.limit_bytes, refusal.client) == (most, most, "x")
        assert "the runs of client 'x'" in str(refusal)
        for key in "kl":
            await set_key(one, foreign, key)
        await one.shard.engine.execute("first", commands.Leave("a", first.lease.number, "done"))
        one.now += 61.0
        assert len(await one.shard.engine.read_runs(list)) == 1
        await set_key(other, third)
        assert totals.store_bytes_by_client.used("x") == most
    assert [totals.store_bytes_by_client.used(client) for client in "xy"] == [0, 0]


async def test_bytes_of_stores() -> None:
    """All runs count, also writes being committed; a forgotten run and an ended round make room again."""
    most = 2 * entry_bytes("k", VALUE)
    limits = Limits(RendezvousLimits(run_ttl=60.0), store=StoreLimits(all_bytes=most))
    async with together(limits) as (one, other, totals):
        member = await one.join("a", "first")
        second, third = [await other.join("a", name) for name in ("second", "third")]
        await set_key(one, member)
        other.journal.hold()
        (setting,) = await begun(set_key(other, second))
        await other.journal.held()
        refusal = await refusal_of(set_key(one, member, "more"))
        assert isinstance(refusal, StoresFull)
        assert refusal.used_bytes == refusal.limit_bytes == most
        other.journal.release()
        await setting
        assert isinstance(await refusal_of(set_key(other, third)), StoresFull)
        await set_key(other, second)  # it does not grow
        await one.shard.engine.execute("first", commands.Leave(member.node_id, member.lease.number, "done"))
        one.now += 61.0
        assert await one.shard.engine.read_runs(list) == []
        await set_key(other, third)
        assert totals.store_bytes.used == most
    assert totals.store_bytes.used == 0


async def test_bytes_of_states_that_wait() -> None:
    """A slow journal of one shard limits the other too, because they share the memory."""
    async with together(Limits(state=StateLimits(queued_bytes=2_000))) as (one, other, totals):
        one.journal.hold()
        await begun(set_state(one, "first"))
        await one.journal.held()
        waiting = await begun(set_state(one, "second", b"x" * 1_000))
        assert isinstance(await refusal_of(set_state(other, "third", b"x" * 1_000)), StateBusy)
        one.journal.release()
        await waiting[0]
        await set_state(other, "third", b"x" * 1_000)
        assert totals.state_queued_bytes.used == 0


async def test_watchers_of_states() -> None:
    """Each watcher frees its slot when it ends, also after its shard has ended."""
    async with together(Limits(state=StateLimits(watchers=2))) as (one, other, totals):
        slots = [(each, each.shard.states.watch(RUN, None)) for each in (one, other)]
        with pytest.raises(TooManyWatchers):
            one.shard.states.watch(RUN, None)
        one.shard.halt(NotOwner)
        for scene, slot in slots:
            scene.shard.states.unwatch(RUN, slot)
        assert totals.state_watchers.used == 0
        other.shard.states.watch(RUN, None)


async def test_bytes_of_events() -> None:
    """Past the limit the longest history is shortened, in either shard."""
    limits = RendezvousLimits(event_bytes=20_000)
    async with together(Limits(limits)) as (one, other, totals):
        await one.join("a", "long")
        while totals.events.bytes < 18_000:
            await one.shard.engine.execute("long", commands.Evict("elsewhere", "to and fro"))
            await one.shard.engine.execute("long", commands.Readmit("elsewhere", "to and fro"))
        before = one.shard.engine.history("long").bytes
        await other.join("a", "short")
        while one.shard.engine.history("long").bytes == before:
            await other.shard.engine.execute("short", commands.Evict("elsewhere", "to and fro"))
            await other.shard.engine.execute("short", commands.Readmit("elsewhere", "to and fro"))
        assert totals.events.bytes <= 20_000
        assert other.shard.engine.history("short").oldest == 1


@pytest.mark.parametrize("end", ["retire", "halt"])
async def test_the_share_of_an_ended_shard_is_free_for_others(end: str) -> None:
    """All of it, also queued writes and those being committed."""
    totals = SharedTotals()
    async with opened(totals=totals) as scene:
        await scene.shard.store.write(RUN, Set(writer=scene.writer, round=0, key="k", value=b"v"))
        counted = ("runs", "event_bytes", "store_bytes", "states", "state_bytes")
        assert all(used(totals)[name] > 0 for name in counted)
        scene.journal.hold()
        await begun(set_state(scene, "first"))
        await scene.journal.held()
        await begun(set_state(scene, "second"))
        assert totals.state_queued_bytes.used > 0
        if end == "halt":
            scene.shard.halt(NotOwner)
        else:
            (retiring,) = await begun(scene.shard.retire(NotOwner))
            scene.journal.release()
            await retiring
        assert set(used(totals).values()) == {0}
        assert scene.shard.engine._runs[RUN].history.latest > 0, "who reads it goes on reading"
    assert set(used(totals).values()) == {0}, "it is given back once"
    async with opened(ShardJournal(scene.journal.durable), totals=totals):
        assert totals.runs.used == 1, "what is taken over counts again"
