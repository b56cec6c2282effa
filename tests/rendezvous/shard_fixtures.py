"""A shard with a run, a key and a state, over a journal whose commits the test controls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from rallypoint.rendezvous.base.cooperative import LatestValue
from rallypoint.rendezvous.base.entries import Operation, StoreChange, Writer
from rallypoint.rendezvous.base.errors import NotOwner
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.core.state import RunSettings
from rallypoint.rendezvous.journal.journal import Entry, Forgotten, OwnershipLost, Recovered
from rallypoint.rendezvous.runs.run import Member
from rallypoint.rendezvous.shard.shard import Shard, open_shard
from rallypoint.rendezvous.state.core import FencedState, SetState
from rallypoint.rendezvous.store.writes import Set
from rendezvous.engine_fixtures import NO_PAUSES, RUN, HeldJournal, begun, idle, writer_of

__all__ = ["OWNER", "RUN", "Scene", "ShardJournal", "begun", "elsewhere", "idle", "opened", "refusal_of"]

OWNER = "b.cluster:29400"
_TIMEOUT = 60.0


def elsewhere(run_id: str) -> NotOwner:
    """The refusal of a shard whose new owner is known."""
    return NotOwner(run_id, OWNER)


class ShardJournal(HeldJournal):
    """Keeps entries of stores and states too; a test can make it lose its ownership."""

    def __init__(self, durable: Sequence[Entry] = ()) -> None:
        super().__init__(durable)
        self.closed = False
        self.appends = 0
        self._may_return = asyncio.Event()
        self._may_return.set()

    def kept(self) -> Recovered:
        recovered = super().kept()
        values: dict[tuple[str, int, str], bytes] = {}
        for entry in self.durable:
            match entry:
                case StoreChange(run_id, round_, key, value):
                    values.pop((run_id, round_, key), None)
                    if value is not None:
                        values[run_id, round_, key] = value
                case Forgotten():
                    values = {place: value for place, value in values.items() if place[0] != entry.run_id}
        return replace(
            recovered, store_entries=[StoreChange(*place, value) for place, value in values.items()]
        )

    async def append(self, entries: Sequence[Entry]) -> None:
        self.appends += 1
        await super().append(entries)
        await self._may_return.wait()

    def hold_answers(self) -> None:
        """Make commits durable from now on, but let `append` wait."""
        self._may_return.clear()

    def answer(self) -> None:
        """Let the waiting `append` calls return."""
        self._may_return.set()

    async def close(self) -> None:
        self.closed = True

    def lose(self) -> None:
        """Let commits fail because another replica owns the journal."""
        self._error = OwnershipLost("another replica has it")
        self._free.set()


class Scene:
    """A shard whose run has two nodes in a final round, and streams and requests of every kind."""

    def __init__(self, journal: ShardJournal) -> None:
        self.journal = journal
        self.now = 1000.0
        self.failures: list[BaseException] = []
        self.guarded = 0
        self.lost: Exception | None = None
        self.shard: Shard
        self.members: list[Member] = []

    def guard(self) -> None:
        """Count the ownership checks; raise `lost` if it is set."""
        self.guarded += 1
        if self.lost is not None:
            raise self.lost

    async def open(self, **settings: Any) -> None:
        self.shard = await open_shard(
            self.journal,
            clock=lambda: self.now,
            wall_clock=lambda: 1.7e9,
            draw=Random(7).randbytes,
            guard=self.guard,
            lag=NO_PAUSES,
            on_failure=self.failures.append,
            **settings,
        )

    async def join(self, node_id: str, run_id: str = RUN, client: str = "") -> Member:
        settings = RunSettings(min_nodes=2, max_nodes=2, max_restarts=3, restart_backoff=0.0)
        command = commands.Join(node_id, settings, f"{node_id}.cluster", 2, "trainer", client=client)
        return await self.shard.engine.join(run_id, command)

    async def populate(self) -> None:
        """Make a final round, a key and a state; members have taken all their updates."""
        self.members = [await self.join("a"), await self.join("b")]
        for member in self.members:
            await self.confirm(member)
        for member in self.members:
            await member.updates.take()
        await self.set("here", b"value")
        await self.set_state(b"state")

    async def confirm(self, member: Member, round_: int = 1) -> None:
        command = commands.Confirm(member.node_id, member.lease.number, round_, 29500)
        await self.shard.engine.execute(RUN, command)

    async def restart(self) -> None:
        """Make a change that is sent to every member."""
        await self.shard.engine.execute(RUN, commands.Restart("the operator wants it"))

    async def set(self, key: str, value: bytes, operation: Operation | None = None) -> None:
        write = Set(writer=self.writer, round=0, key=key, value=value, operation=operation)
        await self.shard.store.write(RUN, write)

    @property
    def writer(self) -> Writer:
        """The lease of the first node."""
        return writer_of(self.members[0])

    async def set_state(self, state: bytes, token: bytes | None = None, **rest: Any) -> FencedState | None:
        outcome = await self.shard.states.set(SetState(run_id=RUN, state=state, token=token, **rest))
        return outcome.current

    @property
    def token(self) -> bytes:
        """The token of the current state."""
        held = self.shard.states._states.held(RUN)
        assert held is not None
        return held.current.token

    async def streams(self) -> dict[str, LatestValue[Any]]:
        """A stream of each kind, all of them read to the end."""
        streams: dict[str, LatestValue[Any]] = {
            "member": self.members[0].updates,
            "watcher": await self.shard.engine.watch(RUN, self.revision),
            "follower": self.shard.engine.follow(RUN, self.revision),
            "state": self.shard.states.watch(RUN, self.token),
        }
        await streams["follower"].take()
        return streams

    @property
    def revision(self) -> int:
        """The revision of the latest durable event."""
        return self.shard.engine._runs[RUN].history.latest

    def requests(self) -> dict[str, Callable[[], Awaitable[object]]]:
        """Every kind of request to a shard; all of them succeed."""
        engine, store, states = self.shard.engine, self.shard.store, self.shard.states
        member = self.members[0]

        def at_once(ask: Callable[[], object]) -> Callable[[], Awaitable[object]]:
            async def answer() -> object:
                return ask()

            return answer

        return {
            "join": lambda: self.join("c"),
            "resume": lambda: engine.resume(RUN, member.node_id, member.lease.number, 1, member.lease.token),
            "execute": self.restart,
            "close": lambda: engine.close_run(RUN, "over"),
            "get run": lambda: engine.get_run(RUN),
            "list runs": lambda: engine.read_runs(lambda runs: [run.run_id for run in runs]),
            "watch run": lambda: engine.watch(RUN, 0),
            "history": at_once(lambda: engine.history(RUN)),
            "settings": at_once(lambda: engine.settings(RUN)),
            "follow": at_once(lambda: engine.follow(RUN, 0)),
            "set": lambda: self.set("key", b"value"),
            "get": lambda: store.get(RUN, 0, "here", 1.0),
            "multi get": lambda: store.multi_get(RUN, 0, ["here", "here"], 1.0),
            "wait": lambda: store.wait(RUN, 0, ["here"], 1.0),
            "check": at_once(lambda: store.check(RUN, 0, ["here"])),
            "list keys": at_once(lambda: store.list_keys(RUN, 0, "", "", 10)),
            "get state": at_once(lambda: states.get(RUN)),
            "set state": lambda: self.set_state(b"new", self.token),
            "watch state": at_once(lambda: states.watch(RUN, None)),
        }


@asynccontextmanager
async def opened(journal: ShardJournal | None = None, **settings: Any) -> AsyncIterator[Scene]:
    """A scene; none of its tasks may run on at the end."""
    scene = Scene(journal or ShardJournal())
    await scene.open(**settings)
    if journal is None:
        await scene.populate()
    try:
        yield scene
    finally:
        await scene.shard.drop(elsewhere)
        assert all(task.done() for task in scene.shard._ending()), "something of it runs on"


async def refusal_of(awaitable: Awaitable[object]) -> Exception:
    """The error that refuses a request."""
    async with asyncio.timeout(_TIMEOUT):
        with pytest.raises(Exception) as refused:  # noqa: PT011 (the test checks its type)
            await awaitable
    assert not isinstance(refused.value, TimeoutError), "it waits for ever"
    return refused.value
