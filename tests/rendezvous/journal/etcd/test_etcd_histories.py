"""Random histories of a journal on a real etcd, with lost responses and killed owners, against a plain model."""

from __future__ import annotations

import asyncio
import random

import pytest

from rallypoint.rendezvous.journal.journal import Entry
from rendezvous.journal.etcd_shelf import EtcdShelf, Fate
from rendezvous.journal.model import Model, plain, random_call
from support.etcd_server import NEEDS_ETCD
from support.marks import slow

pytestmark = NEEDS_ETCD

SEEDS = 10
_STEPS = 12


@pytest.mark.parametrize("seed", [0, 1, 2, *(slow(seed) for seed in range(3, SEEDS))])
async def test_a_prefix_of_the_calls_is_kept_and_every_one_that_returned(shelf: EtcdShelf, seed: int) -> None:
    """Each call whole or not at all; a reader that doesn't own it finds the same as the next owner."""
    draw = random.Random(seed)
    model = Model()
    journal = shelf.journal()
    await journal.open()
    for _ in range(_STEPS):
        calls: list[list[Entry]] = []
        states = [model]
        for _ in range(draw.choice((1, 1, 2, 5))):
            calls.append(random_call(draw, states[-1]))
            states.append(states[-1].after(calls[-1]))
        killed_at = draw.randint(0, 8) if draw.random() < 0.4 else None
        losses = [draw.choice((Fate.ANSWERED, Fate.ANSWER_LOST, Fate.REQUEST_LOST)) for _ in range(200)]
        last = draw.choice((Fate.LAST, Fate.NEVER))

        def fate(n: int) -> Fate:
            return last if n == killed_at else losses[n % len(losses)]  # noqa: B023 - of this step

        shelf.client.from_now(fate)
        appends = [asyncio.create_task(journal.append(call)) for call in calls]
        returned = await _outcome(shelf, appends)
        shelf.client.from_now(lambda n: Fate.ANSWERED)
        found = plain((await shelf.read()).recovered)
        if shelf.client.killed.is_set():
            kept = [index for index, state in enumerate(states) if state.recovered() == found]
            assert kept, "neither what was there before nor what any call left"
            assert kept[-1] >= returned, "a call that returned is not kept"
            model = states[kept[-1]]
            shelf.client.killed.clear()
            journal = await shelf.take_over()
        else:
            assert returned == len(calls)
            model = states[-1]
            if draw.random() < 0.3:
                await journal.close()
                journal = shelf.journal()
                await journal.open()
        assert found == model.recovered()
        assert plain((await shelf.read()).recovered) == found
    await journal.close()
    again = shelf.journal()
    assert plain(await again.open()) == model.recovered()
    assert not [key for key in await shelf.keys() if key.startswith("staged/")]
    await again.close()


async def _outcome(shelf: EtcdShelf, appends: list[asyncio.Task[None]]) -> int:
    """Return the number of appends that returned: all, or those before their owner was killed; they come first."""
    everything = asyncio.ensure_future(asyncio.wait(appends))
    killed = asyncio.ensure_future(shelf.client.killed.wait())
    await asyncio.wait([everything, killed], return_when=asyncio.FIRST_COMPLETED)
    everything.cancel()
    killed.cancel()
    await asyncio.sleep(0)  # appends that end in the same turn of the loop count
    outcomes = [append.done() and not append.cancelled() and append.exception() is None for append in appends]
    for append in appends:
        append.cancel()
    await asyncio.wait(appends)
    assert outcomes == sorted(outcomes, reverse=True)
    return sum(outcomes)
