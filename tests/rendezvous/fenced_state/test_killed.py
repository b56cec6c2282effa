"""The process is SIGKILLed under fenced writers, again and again: no success is lost, none is counted twice."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from rallypoint.rendezvous.fenced_state.client import FencedStateClient
from rendezvous.fenced_state import state_server
from rendezvous.fenced_state.state_fakes import RUN, channel_to

TESTS = Path(state_server.__file__).parents[2]


async def start(folder: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        state_server.__file__,
        str(folder / "journal.sqlite"),
        f"unix:{folder}/state.sock",
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        stderr=asyncio.subprocess.DEVNULL,
    )


@pytest.mark.integration
async def test_a_killed_service_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Writers increment one state, each by replacing what it knows; every value is won by exactly one of them."""
    writers, each = 6, 50
    kills = (20, 80, 160, 240)
    done = asyncio.Condition()
    total = 0

    async def increment(client: FencedStateClient) -> list[int]:
        nonlocal total
        won: list[int] = []
        current = await client.get()
        while len(won) < each:
            value = 0 if current is None else int(current.state)
            outcome = await client.set(b"%d" % (value + 1), None if current is None else current.token)
            if outcome.has_set:
                won.append(value + 1)
                async with done:
                    total += 1
                    done.notify_all()
            current = outcome.current
        return won

    server = await start(tmp_path)
    try:
        async with channel_to(f"{tmp_path}/state.sock") as channel:
            clients = [FencedStateClient(channel, RUN) for _ in range(writers)]
            incrementing = asyncio.gather(*(increment(client) for client in clients))
            for kill in kills:
                async with done:
                    await done.wait_for(lambda kill=kill: total >= kill)  # type: ignore[misc]
                server.send_signal(signal.SIGKILL)
                await server.wait()
                server = await start(tmp_path)
            won = await incrementing
            assert sorted(value for of_one in won for value in of_one) == list(range(1, writers * each + 1))
            final = await clients[0].get()
            assert final is not None
            assert final.state == b"%d" % (writers * each)
    finally:
        server.kill()
        await server.wait()
