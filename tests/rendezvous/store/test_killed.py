"""The store's process is SIGKILLed under load, again and again: nobody notices, and every write counts once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rallypoint.rendezvous.store.client import StoreClient
from rendezvous.store import store_server
from rendezvous.store.store_fakes import channel_to, client_of
from rendezvous.victim import victim_of


@pytest.mark.slow
@pytest.mark.integration
async def test_a_killed_service_loses_and_repeats_nothing(tmp_path: Path) -> None:
    adders, each = 6, 250
    async with victim_of(store_server, tmp_path) as victim, channel_to(victim.path) as channel:

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
