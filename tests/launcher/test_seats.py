"""A fixed number of a job's agents serve its rendezvous at a time, and a free seat is taken at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.endpoint import parse_address
from rallypoint.etcd.session import Session
from rallypoint.launcher.run_lease import SEATS, seat
from support.etcd_server import PATIENT, EtcdCluster
from support.waiting import PATIENCE


@pytest.fixture
async def client(etcd: EtcdCluster, tmp_path: Path) -> AsyncIterator[EtcdClient]:
    """A client at a prefix for this test alone."""
    async with EtcdClient(parse_address(f"{etcd.url}/{tmp_path.name}?{PATIENT}", {})) as client:
        yield client


class Sitters:
    """Agents that hold or await a seat until they leave."""

    def __init__(self, client: EtcdClient) -> None:
        self._client = client
        self.sitting: dict[str, Session] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.changed = asyncio.Condition()

    def come(self, *names: str) -> None:
        """Add agents that wait for a seat each."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self._sit(name))

    async def _sit(self, name: str) -> None:
        async with seat(self._client, name) as session:
            self.sitting[name] = session
            async with self.changed:
                self.changed.notify_all()
            try:
                await session.lost()
            finally:
                del self.sitting[name]

    async def until(self, count: int) -> None:
        """Wait until so many have a seat."""
        async with asyncio.timeout(PATIENCE), self.changed:
            await self.changed.wait_for(lambda: len(self.sitting) >= count)

    async def leave(self, name: str) -> None:
        """Release the seat, or stop waiting."""
        self.tasks[name].cancel()
        await asyncio.wait({self.tasks.pop(name)})


@pytest.fixture
async def sitters(client: EtcdClient) -> AsyncIterator[Sitters]:
    """No agents yet; all leave at the end."""
    async with AsyncExitStack() as stack:
        sitters = Sitters(client)
        stack.push_async_callback(_all_leave, sitters)
        yield sitters


async def _all_leave(sitters: Sitters) -> None:
    for name in list(sitters.tasks):
        await sitters.leave(name)


async def taken(client: EtcdClient) -> set[str]:
    """Return the agents with a seat in etcd."""
    prefix = client.address.prefix
    found = await client.get(f"{prefix}/seats/".encode(), f"{prefix}/seats0".encode())
    return {pair.value.decode() for pair in found.pairs}


async def test_there_are_never_more_servers_than_seats(client: EtcdClient, sitters: Sitters) -> None:
    """Other agents wait."""
    names = [f"agent{number}" for number in range(3 * SEATS)]
    sitters.come(*names)
    await sitters.until(SEATS)
    assert await taken(client) == sitters.sitting.keys()
    waiting = set(names) - sitters.sitting.keys()
    assert len(waiting) == 2 * SEATS
    assert not any(sitters.tasks[name].done() for name in waiting)


async def test_a_seat_that_falls_free_is_taken(client: EtcdClient, sitters: Sitters) -> None:
    """A waiting agent takes it, as soon as its holder leaves."""
    first = [f"agent{number}" for number in range(SEATS)]
    sitters.come(*first)
    await sitters.until(SEATS)
    sitters.come("late")
    await sitters.leave(first[0])
    async with asyncio.timeout(PATIENCE):
        while "late" not in sitters.sitting:
            async with sitters.changed:
                await sitters.changed.wait()
    assert await taken(client) == {*first[1:], "late"}


async def test_an_agent_that_lost_its_lease_has_lost_its_seat(client: EtcdClient, sitters: Sitters) -> None:
    """The agent is notified, so that it stops serving."""
    sitters.come("agent")
    await sitters.until(1)
    await client.revoke(sitters.sitting["agent"].lease)
    await asyncio.wait_for(asyncio.shield(sitters.tasks["agent"]), PATIENCE)
    assert await taken(client) == set()
