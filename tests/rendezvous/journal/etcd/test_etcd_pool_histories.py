"""Random histories of journals that share a pool: lost responses, late copies, fenced owners; compared with models."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.errors import EtcdRefused
from rallypoint.rendezvous.journal.etcd.journal import EtcdJournal
from rallypoint.rendezvous.journal.etcd.pool import CommitPool
from rallypoint.rendezvous.journal.journal import Entry, OwnershipLost
from rendezvous.journal.etcd_shelf import EtcdShelf, Fate, LossyClient
from rendezvous.journal.model import Model, plain, random_call
from support.etcd_server import NEEDS_ETCD
from support.marks import slow

pytestmark = NEEDS_ETCD

SEEDS = 10
_STEPS = 10
_JOURNALS = 5


@pytest.mark.parametrize("seed", [0, *(slow(seed) for seed in range(1, SEEDS))])
async def test_each_journal_keeps_a_prefix_of_its_calls_and_every_one_that_returned(
    shelf: EtcdShelf, seed: int
) -> None:
    """In any mix of transactions: all its calls, if its owner stays; and late copies of settled ones do nothing."""
    draw = random.Random(seed)
    pool = CommitPool(shelf.client)
    shelves = [shelf.beside() for _ in range(_JOURNALS)]
    models = [Model() for _ in shelves]
    journals = [each.journal(pool=pool) for each in shelves]
    await asyncio.gather(*(each.open() for each in journals))
    for _ in range(_STEPS):
        losses = [draw.choice((Fate.ANSWERED, Fate.ANSWER_LOST, Fate.REQUEST_LOST)) for _ in range(200)]
        shelf.client.from_now(lambda n: losses[n % len(losses)])  # noqa: B023 - of this step
        fenced_off = draw.randrange(_JOURNALS) if draw.random() < 0.5 else None
        late = asyncio.create_task(_deliver_late(shelf.client, random.Random(draw.random())))
        outcomes = [
            asyncio.create_task(_append_some(journal, model, random.Random(draw.random())))
            for journal, model in zip(journals, models, strict=True)
        ]
        if fenced_off is not None:
            for _ in range(draw.randrange(60)):
                await asyncio.sleep(0)
            await EtcdClient.transact(shelf.client, shelves[fenced_off].deletion_of_owner)
        await asyncio.wait(outcomes)
        late.cancel()
        await asyncio.wait([late])
        for index, outcome in enumerate(outcomes):
            states, returned = outcome.result()
            found = plain((await shelves[index].read()).recovered)
            kept = [number for number, state in enumerate(states) if state.recovered() == found]
            assert kept, "neither what was there before nor what any call left"
            assert kept[-1] >= returned, "a call that returned is not kept"
            assert index == fenced_off or returned == len(states) - 1, "a call failed for others' sake"
            models[index] = states[kept[-1]]
        if fenced_off is not None:
            journals[fenced_off] = await shelves[fenced_off].take_over(pool=pool)
        # A large commit is acknowledged before it is in its final keys: the next commit is not.
        await asyncio.gather(*(each.append([]) for each in journals))
        await _nothing_lands(shelf.client, shelves)


async def _append_some(journal: EtcdJournal, model: Model, draw: random.Random) -> tuple[list[Model], int]:
    """Make calls at once, or one after another; return the model after each, and the number that returned."""
    states, calls = [model], list[list[Entry]]()
    for _ in range(draw.choice((1, 2, 4))):
        calls.append(random_call(draw, states[-1]))
        states.append(states[-1].after(calls[-1]))
    if draw.random() < 0.5:
        outcomes = await asyncio.gather(*(journal.append(call) for call in calls), return_exceptions=True)
    else:
        outcomes = [(await asyncio.gather(journal.append(call), return_exceptions=True))[0] for call in calls]
    assert all(outcome is None or isinstance(outcome, OwnershipLost) for outcome in outcomes)
    told = [outcome is None for outcome in outcomes]
    assert told == sorted(told, reverse=True)
    return states, sum(told)


async def _deliver_late(client: LossyClient, draw: random.Random) -> None:
    """Deliver copies of sent transactions once more, at any time: some arrive for the first time."""
    while True:
        for _ in range(draw.randrange(20)):
            await asyncio.sleep(0)
        if client.sent:
            with suppress(EtcdRefused):
                await EtcdClient.transact(client, draw.choice(client.sent))
        await asyncio.sleep(0)


async def _nothing_lands(client: LossyClient, shelves: list[EtcdShelf]) -> None:
    before = [await each.snapshot() for each in shelves]
    for copy in client.sent:
        if copy.otherwise:  # a write or a claim; a release is its owner's last
            assert not (await EtcdClient.transact(client, copy)).succeeded
    assert [await each.snapshot() for each in shelves] == before
