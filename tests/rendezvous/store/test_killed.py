"""The store's process is SIGKILLed under load, again and again: nobody notices, and every write counts once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from rallypoint.rendezvous.store.client import StoreClient
from rendezvous.store import store_server
from rendezvous.store.store_fakes import RUN, channel_to

TESTS = Path(store_server.__file__).parents[2]


async def start(folder: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        store_server.__file__,
        str(folder / "journal.sqlite"),
        f"unix:{folder}/store.sock",
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        stderr=asyncio.subprocess.DEVNULL,
    )


@pytest.mark.integration
async def test_a_killed_service_loses_and_repeats_nothing(tmp_path: Path) -> None:
    adders, each = 6, 250
    kills = (50, 300, 600, 1_000)
    done = asyncio.Condition()
    total = 0

    async def add(client: StoreClient) -> list[tuple[int, int]]:
        nonlocal total
        sums = []
        for _ in range(each):
            sums.append((await client.add("n", 1, round=1), await client.append("log", b"x", round=1)))
            async with done:
                total += 1
                done.notify_all()
        return sums

    server = await start(tmp_path)
    try:
        async with channel_to(f"{tmp_path}/store.sock") as channel:
            client = StoreClient(channel, RUN)
            waiter = asyncio.ensure_future(client.get("end"))
            adding = asyncio.gather(*(add(client) for _ in range(adders)))
            for kill in kills:
                async with done:
                    await done.wait_for(lambda kill=kill: total >= kill)  # type: ignore[misc]
                server.send_signal(signal.SIGKILL)
                await server.wait()
                server = await start(tmp_path)
            sums = await adding
            await client.set("end", b"")
            await waiter
            seen, lengths = zip(*(pair for of_one in sums for pair in of_one), strict=True)
            assert sorted(seen) == sorted(lengths) == list(range(1, adders * each + 1))
            both = await client.multi_get(["n", "log"], round=1)
            assert both == [b"%d" % (adders * each), b"x" * adders * each]
    finally:
        server.kill()
        await server.wait()
