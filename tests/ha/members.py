"""Nodes and watchers of one run that record the reports they receive, and random events of the nodes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from ha.caller import Caller
from ha.doors import Door, Doors
from ha.history import Admission, History, Logged, Outcome, Told
from ha.writers import StoreClient
from rallypoint.rendezvous.base.entries import Writer
from rallypoint.rendezvous.client import Admitted, Event, MembershipUpdate
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import to_duration
from rallypoint.rpc.errors import decode
from torture.crowd import Crowd
from torture.tormented_node import Place, TormentedNode

SETTINGS = pb.RunSettings(
    min_nodes=3,
    max_nodes=6,
    max_restarts=1_000_000,
    last_call_timeout=to_duration(0.5),
    confirm_timeout=to_duration(10.0),
    restart_backoff=to_duration(0.0),
)
NODES = 7
"""One more than a round has room for: a spare."""

# Average time between two random events of the nodes of one run, seconds.
_CALM = 4.0
# Writes of a worker after its round or lease is over, which it does not know.
_ZOMBIE_WRITES = 3


class RecordedNode(TormentedNode):
    """A node that records the reports its agents receive; each agent is a separate subscriber."""

    history: History
    agents = 0

    def join(self) -> None:
        self.agents += 1
        super().join()

    def _on_event(self, event: Event) -> None:
        super()._on_event(event)
        now, subscriber = self.history.clock(), f"{self.run_id}/{self.name}#{self.agents}"
        match event:
            case Admitted(held, resumed):
                self.history.add(Admission(now, subscriber, self.run_id, self.name, held.number, resumed))
            case MembershipUpdate(update):
                told = Told(now, subscriber, self.run_id, self.name, self.lease, as_json(update))
                self.history.add(told)


class Members:
    """The nodes of one run.

    Attributes:
        crowd: The nodes.
        lives: Number of agents so far, besides the first ones.
    """

    def __init__(
        self, run_id: str, endpoints: str, doors: Doors, history: History, draw: random.Random
    ) -> None:
        self.run_id = run_id
        self.crowd = Crowd(endpoints, SETTINGS, 0, draw)
        self.lives = 0
        self._doors = doors
        self._history = history
        self._draw = draw
        for number in range(NODES):
            node = RecordedNode(
                f"node-{number}", endpoints, SETTINGS, draw, self.crowd.changed.set, run_id=run_id
            )
            node.history = history
            self.crowd.nodes.append(node)

    def tasks(self, stopping: asyncio.Event, *, happening: bool = True) -> list[asyncio.Task[None]]:
        """Join, and work until `stopping` is set, with random events if `happening`; then every node has an agent."""
        self.crowd.join()
        tasks = [asyncio.create_task(self._happen(stopping))] if happening else []
        tasks += [asyncio.create_task(self._work(node, stopping)) for node in self.crowd.nodes[:2]]
        watchers: list[Callable[[Door], Any]] = [self._watch_run, self._watch_events]
        tasks += [asyncio.create_task(self._watch(each, stopping)) for each in watchers]
        return tasks

    async def agree(self, timeout: float, *, after: int = 0) -> int:
        """Wait until the largest possible number of nodes is in one FINAL round; return its number.

        Args:
            timeout: Seconds.
            after: The round must be later than this one.

        Raises:
            AssertionError: They are not in time.
        """

        def rounds() -> list[int]:
            return [node.place.round for node in self.crowd.nodes if node.place is not None]

        def full() -> bool:
            found = rounds()
            return len(found) == SETTINGS.max_nodes and len(set(found)) == 1 and found[0] > after

        await self.crowd.until(f"one FINAL round of {self.run_id}", full, timeout)
        return rounds()[0]

    async def _happen(self, stopping: asyncio.Event) -> None:
        """Let nodes leave, die and come back, and let workers fail."""
        while not await _set_within(stopping, self._draw.uniform(0.0, 2.0) * _CALM):
            self.crowd.check_alive()
            node = self._draw.choice(self.crowd.nodes)
            what = self._draw.choice(("leaves", "dies", "fails"))
            if what == "fails":
                node.break_worker()
                continue
            # A node that leaves may reach no replica; then it dies without leaving.
            if what == "leaves":
                with suppress(TimeoutError):
                    async with asyncio.timeout(5.0):
                        await node.leave()
            if node.is_in:
                await node.die()
            await _set_within(stopping, self._draw.uniform(0.0, 3.0))
            node.join()
            self.lives += 1

    async def _work(self, node: TormentedNode, stopping: asyncio.Event) -> None:
        """Run a node's workers: each writes under its lease and round, and a little longer, as it gets no notice."""
        place: Place | None = None
        zombies: set[asyncio.Task[None]] = set()
        try:
            while not await _set_within(stopping, 0.05):
                if node.place is not None and node.place != place:
                    place = node.place
                    zombies.add(asyncio.create_task(self._work_at(node, place, stopping)))
            if zombies:
                await asyncio.wait(zombies)
        finally:
            for zombie in zombies:
                zombie.cancel()

    async def _work_at(self, node: TormentedNode, place: Place, stopping: asyncio.Event) -> None:
        name = f"{self.run_id}-{node.name}-{place.lease}-{place.round}"
        caller = Caller(name, self._doors, self._history, random.Random(self._draw.random()))
        writer = Writer(node.name, place.lease, place.token)
        store = StoreClient(caller, self.run_id, lambda: writer, place.round)
        left = _ZOMBIE_WRITES
        while left and not await _set_within(stopping, caller.draw.uniform(0.1, 0.5)):
            if node.place != place:
                left -= 1
            operation = await store.add(f"work-{place.round}", 1 + caller.draw.randrange(10**9))
            if operation.outcome is Outcome.REFUSED:
                return

    async def _watch(self, watching: Callable[[Door], Any], stopping: asyncio.Event) -> None:
        """Keep a stream open, at the owner if it is known; open the next one when it breaks."""
        door = self._random_door()
        ended = asyncio.create_task(stopping.wait())
        try:
            while not stopping.is_set():
                stream = asyncio.create_task(watching(door))
                await asyncio.wait({stream, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not stream.done():
                    stream.cancel()
                    await asyncio.wait({stream})
                    return
                error = stream.exception()
                if not isinstance(error, grpc.aio.AioRpcError):
                    if error is not None:
                        raise error
                    return  # the run is closed
                door = self._doors.at(decode(error).metadata.get("owner_address", "")) or self._random_door()
                await _set_within(stopping, self._draw.random() * 0.5)
        finally:
            ended.cancel()

    def _random_door(self) -> Door:
        return self._doors.by_name[self._draw.choice(self._doors.names)]

    async def _watch_run(self, door: Door) -> None:
        # Without a revision to resume from, a stream begins with the present state: each is a separate subscriber.
        subscriber = f"{self.run_id}/watcher@{door.name}#{self._history.clock():.6f}"
        async for answer in door.rendezvous.WatchRun(pb.WatchRunRequest(run_id=self.run_id)):
            told = Told(self._history.clock(), subscriber, self.run_id, "", 0, as_json(answer.run))
            self._history.add(told)

    _seen = 0

    async def _watch_events(self, door: Door) -> None:
        request = pb.WatchEventsRequest(run_id=self.run_id, after_revision=self._seen)
        async for answer in door.rendezvous.WatchEvents(request):
            for event in answer.events:
                self._history.add(
                    Logged(self._history.clock(), f"{self.run_id}/events", self.run_id, as_json(event))
                )
            self._seen = max(self._seen, answer.revision)

    async def read_log(self, door: Door, timeout: float) -> int:
        """Record the log of events of a replica; return the number of events.

        Raises:
            grpc.aio.AioRpcError: The replica does not reply, or refuses.
        """
        token, count = "", 0
        while True:
            request = pb.ListEventsRequest(run_id=self.run_id, page_size=5_000, page_token=token)
            page = await door.rendezvous.ListEvents(request, timeout=timeout)
            for event in page.events:
                count += 1
                self._history.add(Logged(self._history.clock(), "", self.run_id, as_json(event)))
            if not (token := page.next_page_token):
                return count


@asynccontextmanager
async def at_work(*working: list[asyncio.Task[None]]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run tasks beside a block, and cancel them after it; their errors do not fail the block."""
    tasks = [task for some in working for task in some]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def as_json(message: Any) -> dict[str, Any]:
    """Return a message in the form of a history: proto3's JSON, with the names of the contract."""
    return MessageToDict(message, preserving_proto_field_name=True)


async def _set_within(event: asyncio.Event, timeout: float) -> bool:
    """Return True if an event is set within `timeout` seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await event.wait()
    return event.is_set()
