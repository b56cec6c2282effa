"""A journal that a test controls, a store service on a real server, and an agent's socket in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rallypoint.agent.sockets.store import StoreSocket
from rallypoint.rendezvous.api.errors import translate
from rallypoint.rendezvous.api.store_servicer import store_registration
from rallypoint.rendezvous.base.cooperative import finish
from rallypoint.rendezvous.base.entries import StoreChange, Writer
from rallypoint.rendezvous.base.limits import StoreLimits
from rallypoint.rendezvous.store.client import StoreClient
from rallypoint.rendezvous.store.service import StoreService
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.rpc.replica_client import Where
from rallypoint.serving.server import Server
from rendezvous.locators import locator_of

if TYPE_CHECKING:
    import grpc.aio

RUN = "digits"
WRITER = Writer("node", 1)
"""For stores that accept every lease, as `Rounds` does by default."""


class TestJournal:
    """Keeps entries as SQLite does, one per key; a test can hold its commits back, or let them fail."""

    __test__ = False

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int, str], bytes] = {}
        self.commits: list[list[StoreChange]] = []
        self.fails_with: Exception | None = None
        self.held_before = 0
        self.held_after = 0
        self._may_commit = asyncio.Event()
        self._may_return = asyncio.Event()
        self._changed = asyncio.Condition()
        self.release()

    def hold(self) -> None:
        """Make nothing durable from now on."""
        self._may_commit.clear()

    def hold_after(self) -> None:
        """Make commits durable from now on, but let `append` wait."""
        self._may_return.clear()

    def release(self) -> None:
        """Let everything go on."""
        self._may_commit.set()
        self._may_return.set()

    async def until_held(self) -> None:
        """Return when an append is held back."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.held_before + self.held_after > 0)

    async def until_commits(self, count: int) -> None:
        """Return when there are `count` commits."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self.commits) >= count)

    async def append(self, entries: Sequence[StoreChange]) -> None:
        self.held_before += 1
        await self._notify()
        await self._may_commit.wait()
        self.held_before -= 1
        if self.fails_with is not None:
            raise self.fails_with
        self.commits.append(list(entries))
        for entry in entries:
            if entry.value is None:
                self.rows.pop((entry.run_id, entry.round, entry.key), None)
            else:
                self.rows[entry.run_id, entry.round, entry.key] = entry.value
        self.held_after += 1
        await self._notify()
        await self._may_return.wait()
        self.held_after -= 1

    def drop_run(self, run_id: str) -> None:
        """Delete a run's entries, as the engine makes the journal do."""
        self.rows = {place: value for place, value in self.rows.items() if place[0] != run_id}

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def entries(self) -> list[StoreChange]:
        """The entries that a restarted service finds."""
        return [StoreChange(*place, value) for place, value in self.rows.items()]


class Rounds:
    """The current rounds of runs, and a check of leases, as an engine has them when all is durable at once."""

    def __init__(
        self, rounds: Mapping[str, int] | None = None, check: Callable[..., None] = lambda *lease: None
    ) -> None:
        self.of = dict({RUN: 1} if rounds is None else rounds)
        self.check = check

    def writable_round(self, run_id: str) -> int | None:
        return self.of.get(run_id)

    latest_round = writable_round

    def check_lease(self, run_id: str, node_id: str, lease: int, token: bytes) -> None:
        self.check(run_id, node_id, lease, token)

    def creator_of(self, run_id: str) -> str:
        return ""

    async def settled(self) -> None:
        pass


def open_store(
    journal: TestJournal, rounds: Rounds | None = None, limits: StoreLimits | None = None
) -> StoreService:
    """A service over the journal's entries, as after a restart."""
    store = StoreService(journal, rounds or Rounds(), limits=limits)
    finish(store.restoring(journal.entries()))
    store.begin()
    return store


@asynccontextmanager
async def serving(store: StoreService, path: str) -> AsyncIterator[Server]:
    """The store on a server at a Unix socket, stopped without a drain at the end."""
    server = Server(
        ServerOptions(host=f"unix:{path}"),
        services=[store_registration(locator_of(store))],
        translate=translate,
    )
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def channel_to(path: str) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to such a server."""
    async with open_channel(f"unix:{path}") as channel:
        yield channel


def client_of(where: Where, run_id: str = RUN, **rest: Any) -> StoreClient:
    """A client that writes for `WRITER`, unless `rest` names another."""
    return StoreClient(where, run_id, **{"writer": lambda: WRITER, **rest})


@asynccontextmanager
async def agent_socket(
    folder: Path, store: StoreService, *, max_connections: int = 1024
) -> AsyncIterator[str]:
    """A store behind an agent's socket, as a worker calls it; yields the path of the socket."""
    service, path = f"{folder}/store.sock", folder / "agent.sock"
    async with serving(store, service), channel_to(service) as channel:
        sock = StoreSocket(path, client_of(channel), max_connections=max_connections)
        await sock.start()
        try:
            yield str(path)
        finally:
            await sock.stop()
