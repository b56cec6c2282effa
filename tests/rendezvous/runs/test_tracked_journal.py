"""An owner's answers from memory are never older than another replica's reads of the journal."""

from __future__ import annotations

import asyncio

from rallypoint.rendezvous.runs.recovery import TrackedJournal
from rallypoint.rendezvous.shard.shard import Shard
from rendezvous.journal.entries import change
from rendezvous.shard_fixtures import RUN, ShardJournal, begun, elsewhere, opened, refusal_of


async def test_a_read_waits_for_the_commits_that_are_under_way() -> None:
    """They may be durable by now, and visible to readers of the journal; after the wait, memory has them."""
    async with opened() as scene:
        shard = scene.shard
        scene.journal.hold_answers()
        writing = await begun(
            scene.set("new", b"value"), scene.set_state(b"new", scene.token), scene.restart()
        )
        revision = scene.revision

        async def read() -> tuple[bool, bytes | None, bool]:
            await shard.settled()
            state = shard.states.get(RUN)
            newer = shard.engine.history(RUN).latest > revision
            return shard.store.check(RUN, 0, ["new"]), state.state if state else None, newer

        (reading,) = await begun(read())
        assert not reading.done()
        scene.journal.answer()
        assert await reading == (True, b"new", True)
        await asyncio.gather(*writing)


async def test_a_read_waits_for_no_commit_that_began_after_it() -> None:
    """So a busy shard can be read."""
    journal = ShardJournal()
    tracked = TrackedJournal(journal)
    journal.hold()
    first = (await begun(tracked.append([change("a", b"1")])))[0]
    (reading,) = await begun(tracked.settled())
    journal.release()
    await first
    journal.hold()
    (second,) = await begun(tracked.append([change("b", b"1")]))
    await reading
    assert not second.done()
    journal.release()
    await second


async def test_a_read_is_refused_if_the_commit_that_it_waits_for_finds_another_owner() -> None:
    """The data in memory may be outdated then."""
    async with opened() as scene:
        shard: Shard = scene.shard
        scene.journal.hold()
        (writing,) = await begun(scene.set_state(b"new", scene.token))

        async def read() -> object:
            await shard.settled()
            return shard.states.get(RUN)

        (reading,) = await begun(read())
        scene.journal.lose()
        await refusal_of(reading)
        await refusal_of(writing)
        await shard.drop(elsewhere)
