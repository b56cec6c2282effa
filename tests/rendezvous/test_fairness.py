"""A flood of requests to one run delays requests to other runs by a commit or two at most."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rallypoint.rendezvous.base.limits import LimitReached, RendezvousLimits, StoreLimits
from rallypoint.rendezvous.base.refusals import RunStoreFull, TooManyWaiters
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.store.writes import Set
from rendezvous.engine_fixtures import RUN, Stage, begun, staged
from rendezvous.store.store_fakes import WRITER, Rounds, TestJournal, open_store

FLOODED = "flooded"


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    """A serving engine, with limits that a test can reach."""
    limits = RendezvousLimits(runs=3, nodes_per_run=300, subscribers_per_run=50)
    async with staged(Stage(limits=limits, min_nodes=2, max_nodes=1_000)) as served:
        yield served


async def flooded(stage: Stage) -> list[asyncio.Task[Any]]:
    """A thousand joins to one run, and a thousand commands for it; all of them wait."""
    stage.journal.hold()
    (first,) = await begun(stage.join("first", FLOODED))
    await stage.journal.held()
    joins = [stage.join(f"n{number}", FLOODED) for number in range(1_000)]
    others = [stage.engine.execute(FLOODED, commands.Evict(f"n{number}", "why")) for number in range(500)]
    others += [stage.engine.execute(FLOODED, commands.Restart("again")) for _ in range(500)]
    return [first, *await begun(*joins), *await begun(*others)]


async def test_a_join_beside_a_flood_waits_for_one_commit_more(stage: Stage) -> None:
    """That is the commit under way; the join is in the next one."""

    async def commits_when_joined() -> int:
        await stage.join("a")
        return stage.journal.commits

    flood = await flooded(stage)
    (joining,) = await begun(commits_when_joined())
    before = stage.journal.commits
    stage.journal.release()
    assert await joining - before <= 2
    await asyncio.gather(*flood, return_exceptions=True)


async def test_a_flood_stays_within_the_limits_of_its_run(stage: Stage) -> None:
    """The other run can use its own limits fully."""
    flood = await flooded(stage)
    stage.journal.release()
    results = await asyncio.gather(*flood, return_exceptions=True)
    refused = {error.reason for error in results if isinstance(error, LimitReached)}
    assert refused == {"TOO_MANY_NODES"}
    assert (await stage.engine.get_run(FLOODED)).node_count <= 300
    for number in range(300):
        await stage.join(f"n{number}")
    assert (await stage.engine.get_run(RUN)).node_count == 300


async def test_watchers_of_one_run_are_no_business_of_another(stage: Stage) -> None:
    """Neither their number nor their updates affect it."""
    await stage.join("a", FLOODED)
    watchers = [await stage.engine.watch(FLOODED, 0) for _ in range(50)]
    with pytest.raises(LimitReached, match="at its limit of watchers"):
        await stage.engine.watch(FLOODED, 0)
    await stage.join("a")
    watcher = await stage.engine.watch(RUN, 0)
    before = stage.journal.commits
    await stage.join("b")
    assert stage.journal.commits - before == 1
    published = await watcher.take()
    assert published is not None
    assert published.run.node_count == 2
    assert len(watchers) == 50


async def test_a_write_beside_a_flood_of_writes_takes_its_turn() -> None:
    """A flooded store commits batch by batch; a write to another run does not wait behind its queue."""
    journal = TestJournal()
    store = open_store(journal, Rounds({FLOODED: 1, RUN: 1}), StoreLimits(batch_entries=100))
    journal.hold()
    (first,) = await begun(store.write(FLOODED, Set(writer=WRITER, round=1, key="first", value=b"")))
    await journal.until_held()
    flood = await begun(
        *(
            store.write(FLOODED, Set(writer=WRITER, round=1, key=f"k{number}", value=b"x" * 100))
            for number in range(5_000)
        )
    )
    (writing,) = await begun(store.write(RUN, Set(writer=WRITER, round=1, key="k", value=b"v")))
    journal.release()
    await writing
    # At most the commit of the flood that was under way, and one more, come before it.
    assert [commit[0].run_id for commit in journal.commits].index(RUN) <= 2
    assert sum(task.done() for task in flood) <= 300
    await asyncio.gather(first, *flood)


async def test_a_store_that_is_full_is_full_for_its_run_only() -> None:
    """Bytes, keys and waiters are counted by run."""
    journal = TestJournal()
    limits = StoreLimits(run_bytes=10_000, waiters=10)
    store = open_store(journal, Rounds({FLOODED: 1, RUN: 1}), limits)
    flood = (
        store.write(FLOODED, Set(writer=WRITER, round=1, key=f"k{number}", value=b"x" * 1_000))
        for number in range(100)
    )
    results = await asyncio.gather(*flood, return_exceptions=True)
    assert {type(result) for result in results if result is not None} == {RunStoreFull}
    waiting = await begun(*(store.get(FLOODED, 1, "never", 3600.0) for _ in range(10)))
    with pytest.raises(TooManyWaiters):
        await store.get(FLOODED, 1, "never", 3600.0)
    (waiter,) = await begun(store.get(RUN, 1, "k", 3600.0))
    await store.write(RUN, Set(writer=WRITER, round=1, key="k", value=b"v"))
    assert await waiter == b"v"
    for task in waiting:
        task.cancel()
