"""Replicas with one line of the product changed, under a few directed faults, and the findings of the checkers.

Each scene runs with its plant, which the checkers must find, and without it under the same faults, with no findings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from pathlib import Path

import pytest

from ha.check import check
from ha.cluster import ETCD, PATIENCE
from ha.findings import Wrong
from ha.history import Operation, Outcome
from ha.last_words import read_facts
from ha.members import at_work
from ha.planted import PLANTS, changed_module
from ha.scene import RUN, Scene, scene
from ha.waiting import until
from ha.writers import StateClient, read_run

pytestmark = pytest.mark.timeout(6 * PATIENCE)

# Time to wait for an event that does not come without a plant, seconds.
_IN_VAIN = 3.0

Play = Callable[[Scene], Awaitable[None]]


async def late_write(at: Scene) -> None:
    """A write of an owner arrives after another has taken over, and has read the present data."""
    writer = at.client()
    owner = await _written(at, writer)
    at.network(owner, "hold")
    late = asyncio.create_task(at.client().set(writer.token, at=owner))
    await at.holds(owner)
    at.cluster.process(owner).pause()
    new_owner = await at.cluster.owner(RUN, but=[owner])
    await _answered(at.client(), new_owner)
    at.network(owner, "pass")
    at.cluster.process(owner).resume()
    await at.delivered(owner)
    await late
    # The third replica reads the present state from etcd; the new owner returns the state it read when it took over.
    await _answered(at.client(), at.third(owner, new_owner))
    await _answered(at.client(), new_owner)


async def late_copy(at: Scene) -> None:
    """A copy of a write arrives after its repetition and a further write took effect."""
    writer = at.client()
    owner = await _written(at, writer)
    at.network(owner, "hold")
    second = asyncio.create_task(writer.set(writer.token))
    await at.holds(owner)
    at.network(owner, "keep")
    assert (await second).outcome is Outcome.OK
    assert (await writer.set(writer.token)).outcome is Outcome.OK
    at.network(owner, "pass")
    await at.delivered(owner)
    await at.cluster.process(owner).kill()
    await _answered(at.client(), await at.cluster.owner(RUN, but=[owner]))


async def owner_killed_while_it_commits(at: Scene) -> None:
    """An owner is killed before its last writes have arrived; it must not have reported them."""
    members = at.members()
    stopping = asyncio.Event()
    try:
        async with at_work(members.tasks(stopping, happening=False)):
            broken = await members.agree(PATIENCE)
            writer = at.client()
            owner = await _written(at, writer)
            at.network(owner, "hold")
            told = at.told()
            setting = asyncio.create_task(writer.set(writer.token, at=owner))
            breaking = next(node for node in members.crowd.nodes if node.place is not None)
            breaking.break_worker()
            await at.holds(owner)
            await asyncio.wait({setting}, timeout=_IN_VAIN)
            with suppress(AssertionError):  # no report may be sent
                await until("somebody to be told", lambda: _more(at, told), _IN_VAIN)
            await at.cluster.process(owner).kill()
            await setting
            new_owner = await at.cluster.owner(RUN, but=[owner])
            await _answered(at.client(), new_owner)
            # The new owner receives the failure too. After that there are no more reports, and the facts can be read.
            await members.agree(PATIENCE, after=broken)
            stopping.set()
            await members.read_log(at.doors.by_name[new_owner], PATIENCE)
            await read_facts(at.cluster, at.history, [RUN])
    finally:
        await members.crowd.die()


async def owner_cut_off(at: Scene) -> None:
    """An owner that can't reach etcd is read after another has changed the state."""
    writer, reader = at.client(), at.client()
    owner = await _written(at, writer)
    await at.cluster.part(owner, *ETCD)
    await _written(at, writer, but=[owner])
    for _ in range(5):
        await reader.get(at=owner)
        await read_run(at.caller(), RUN, at=owner)
    await at.cluster.heal()


SCENES: dict[str, tuple[Play, set[Wrong]]] = {
    "no-fence": (late_write, {Wrong.STALE}),
    "no-head": (late_copy, {Wrong.LOST}),
    "tell-before-commit": (owner_killed_while_it_commits, {Wrong.LOST}),
    "run-told-before-commit": (owner_killed_while_it_commits, {Wrong.NOT_DURABLE}),
    "session-ignored": (owner_cut_off, {Wrong.STALE, Wrong.LOST}),
}
PLAYS = {getattr(play, "__name__", ""): play for play, _ in SCENES.values()}


def test_every_plant_has_its_scene() -> None:
    """Every plant has a scene, and the product still has each plant's line."""
    assert SCENES.keys() == PLANTS.keys()
    for plant in PLANTS:
        changed_module(plant)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("plant", SCENES)
async def test_a_planted_bug_is_found(tmp_path: Path, plant: str) -> None:
    """The checkers find the violation that the changed line causes, with its right kind."""
    play, wrong = SCENES[plant]
    async with scene(tmp_path, plant) as at:
        await play(at)
        found = await asyncio.to_thread(check, at.history)
    assert wrong & {finding.wrong for finding in found}, f"found {[str(each) for each in found]}"


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("play", PLAYS.values(), ids=PLAYS)
async def test_the_product_passes_the_same(tmp_path: Path, play: Play) -> None:
    """Under the same faults, the checkers find nothing without a plant."""
    async with scene(tmp_path) as at:
        await play(at)
        found = await asyncio.to_thread(check, at.history)
        assert len(list(at.history.of(Operation))) > 3
    assert not found, "\n".join(map(str, found))


async def _written(at: Scene, writer: StateClient, *, but: Collection[str] = ()) -> str:
    """Write a state at the owner, and return its name. Retries, as it may own the run but not serve it yet."""
    owner = ""

    async def write() -> str:
        nonlocal owner
        owner = await at.cluster.owner(RUN, but=but)
        operation = await writer.set(writer.token, at=owner)
        return "" if operation.outcome is Outcome.OK else f"{operation.answered}"

    await until("the owner to take a write", write)
    return owner


async def _answered(client: StateClient, at: str) -> None:
    """Read the state at a replica until it answers."""

    async def look() -> str:
        operation = await client.get(at=at)
        return "" if operation.outcome is Outcome.OK else f"{operation.answered}"

    await until(f"{at} to answer", look)


async def _more(at: Scene, told: int) -> str:
    return "" if at.told() > told else "nobody was"
