"""The process is SIGKILLed under writers, again and again: no client sees an error, and every success counts once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rallypoint.rendezvous.state.client import FencedStateClient
from rallypoint.rendezvous.store.client import StoreClient
from rendezvous.killable_server import killable_server_in
from rendezvous.store.store_fakes import RUN, channel_to, client_of

pytestmark = [pytest.mark.slow, pytest.mark.integration]


async def test_a_killed_store_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Every addition and every append counts once."""
    adders, each = 6, 250
    async with killable_server_in(tmp_path) as victim, channel_to(victim.path) as channel:

        async def add(client: StoreClient) -> list[tuple[int, int]]:
            sums = []
            for _ in range(each):
                sums.append((await client.add("n", 1, round=1), await client.append("log", b"x", round=1)))
                await victim.count()
            return sums

        client = client_of(channel)
        waiter = asyncio.ensure_future(client.get("end"))
        adding = asyncio.gather(*(add(client) for _ in range(adders)))
        await victim.die_after(50, 300, 600, 1_000)
        sums = await adding
        await client.set("end", b"")
        await waiter
        seen, lengths = zip(*(pair for of_one in sums for pair in of_one), strict=True)
        assert sorted(seen) == sorted(lengths) == list(range(1, adders * each + 1))
        both = await client.multi_get(["n", "log"], round=1)
        assert both == [b"%d" % (adders * each), b"x" * adders * each]


async def test_killed_fenced_states_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """Writers increment one state, each by compare-and-set; every value is set by exactly one of them."""
    writers, each = 6, 50
    async with killable_server_in(tmp_path) as victim, channel_to(victim.path) as channel:

        async def increment(client: FencedStateClient) -> list[int]:
            won: list[int] = []
            current = await client.get()
            while len(won) < each:
                value = 0 if current is None else int(current.state)
                outcome = await client.set(b"%d" % (value + 1), None if current is None else current.token)
                if outcome.has_set:
                    won.append(value + 1)
                    await victim.count()
                current = outcome.current
            return won

        clients = [FencedStateClient(channel, RUN) for _ in range(writers)]
        incrementing = asyncio.gather(*(increment(client) for client in clients))
        await victim.die_after(20, 80, 160, 240)
        won = await incrementing
        assert sorted(value for of_one in won for value in of_one) == list(range(1, writers * each + 1))
        final = await clients[0].get()
        assert final is not None
        assert final.state == b"%d" % (writers * each)
