"""The process is SIGKILLed under fenced writers, again and again: no success is lost, none is counted twice."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rallypoint.rendezvous.state.client import FencedStateClient
from rendezvous.state import state_server
from rendezvous.state.state_fakes import RUN, channel_to
from rendezvous.victim import victim_of


@pytest.mark.slow
@pytest.mark.integration
async def test_a_killed_service_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Writers increment one state, each by replacing what it knows; every value is won by exactly one of them."""
    writers, each = 6, 50
    async with victim_of(state_server, tmp_path) as victim, channel_to(victim.path) as channel:

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
