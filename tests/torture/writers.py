"""Writers that do not notice the server's deaths, and checks of all responses that they got."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

from rallypoint.rendezvous.state.client import FencedStateClient
from rallypoint.rendezvous.store.client import StoreClient, Writer
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.errors import ServiceError
from torture.tormented_node import RUN, Place, TormentedNode

STATE = "run-2"
"""The run of the fenced state; it needs no membership."""

QUIET = "run-3"
"""The run of the store that all but the workers write to; it has one node, which stays."""

# Seconds between two writes of one writer: some are on their way at each kill, and the machine is not overloaded.
_PAUSE = 0.01
_PATIENCE = 120.0
_KINDS = ("add", "set", "compare_set", "set_state")


class Writers:
    """Writers of all kinds, each with records of its own.

    Attributes:
        acknowledged: The number of acknowledged writes of each kind.
        refused: The number of writes of each kind refused by a fence.
    """

    def __init__(
        self, endpoint: str, channel: grpc.aio.Channel, nodes: list[TormentedNode], of_each: int
    ) -> None:
        """Write nothing yet.

        Args:
            endpoint: The server's address, for the node of `QUIET`.
            channel: A channel to the server, for all of them.
            nodes: Nodes whose workers write under their leases, as long as they run.
            of_each: The number of writers of each other kind.
        """
        self.acknowledged: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._channel = channel
        self._nodes = nodes
        self._of_each = of_each
        self._stopping = asyncio.Event()
        self._answered = asyncio.Event()
        settings = pb.RunSettings(min_nodes=1, max_nodes=1)
        self._holder = TormentedNode(
            "holder", endpoint, settings, random.Random(), self._answered.set, run_id=QUIET
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._sums: list[int] = []
        self._swapped: list[int] = []
        self._won: list[int] = []
        self._last_set: dict[str, bytes] = {}
        self._newest_round = 0
        self._newest_lease: dict[str, int] = {}

    def start(self) -> None:
        """Start all writers."""
        self._holder.join()
        for number in range(self._of_each):
            self._begin(self._add())
            self._begin(self._swap())
            self._begin(self._win())
            self._begin(self._set(f"own-{number}"))
        for node in self._nodes:
            self._begin(self._work(node))

    async def go_on(self, round_: int, timeout: float) -> None:
        """Wait until workers have written in a round, and later writes of all others have been answered."""
        async with asyncio.timeout(timeout):
            await self._until(lambda: self._newest_round >= round_)
            before = Counter(self.acknowledged)
            await self._until(
                lambda: not any(self.acknowledged[kind] < before[kind] + 2 * self._of_each for kind in _KINDS)
            )

    async def stop(self) -> None:
        """Wait until the last write of each has been answered.

        Raises:
            AssertionError: A response is impossible.
            ServiceError: A write was refused.
        """
        self._stopping.set()
        async with asyncio.timeout(_PATIENCE):
            await asyncio.gather(*self._tasks)

    async def abandon(self) -> None:
        """End them at any point."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._holder.die()

    async def check(self) -> None:
        """Check that every acknowledged write is in the store once; call it after `stop`.

        Raises:
            AssertionError: One is not.
        """
        store = self._store()
        assert sorted(self._sums) == list(range(1, len(self._sums) + 1)), "every addition counts once"
        assert int(await store.get("sum")) == len(self._sums)
        assert sorted(self._swapped) == list(range(1, len(self._swapped) + 1)), "one swap of each value"
        assert int(await store.get("swapped")) == len(self._swapped)
        for key, value in self._last_set.items():
            assert await store.get(key) == value, "what was set last is there"
        assert sorted(self._won) == list(range(1, len(self._won) + 1)), "every state is won by one writer"
        state = await self._states().get()
        assert state is not None
        assert int(state.state) == len(self._won)
        if self.acknowledged["work"]:
            done = int(await self._store(RUN).get("work"))
            # A retried write that the fence refused took effect before, or never.
            most = self.acknowledged["work"] + self.refused["work"]
            assert self.acknowledged["work"] <= done <= most, "a worker's addition counts once"

    def _begin(self, writing: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(writing))

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._answered.clear()
            await self._answered.wait()

    def _note(self, kind: str) -> None:
        self.acknowledged[kind] += 1
        self._answered.set()

    def _store(self, run_id: str = QUIET) -> StoreClient:
        return StoreClient(self._channel, run_id, writer=lambda: self._holder.writer)

    def _states(self) -> FencedStateClient:
        return FencedStateClient(self._channel, STATE)

    async def _writable(self) -> StoreClient:
        await self._until(lambda: self._holder.lease > 0)
        return self._store()

    async def _goes_on(self) -> bool:
        await asyncio.sleep(_PAUSE)
        return not self._stopping.is_set()

    async def _add(self) -> None:
        store = await self._writable()
        while await self._goes_on():
            self._sums.append(await store.add("sum", 1))
            self._note("add")

    async def _set(self, key: str) -> None:
        store = await self._writable()
        while await self._goes_on():
            value = b"%d" % self.acknowledged["set"]
            await store.set(key, value)
            self._last_set[key] = value
            self._note("set")

    async def _swap(self) -> None:
        """Replace a number by the next one, unless another writer was faster."""
        store = await self._writable()
        known = 0
        while await self._goes_on():
            expected = b"%d" % known if known else b""
            answer = await store.compare_set("swapped", expected, b"%d" % (known + 1))
            if answer.swapped:
                self._swapped.append(known + 1)
            assert answer.value is not None
            assert int(answer.value) >= known, "no swap that was seen is lost"
            known = int(answer.value)
            self._note("compare_set")

    async def _win(self) -> None:
        """Do the same with a fenced state."""
        states = self._states()
        current = await states.get()
        while await self._goes_on():
            value = 0 if current is None else int(current.state)
            outcome = await states.set(b"%d" % (value + 1), None if current is None else current.token)
            if outcome.has_set:
                self._won.append(value + 1)
            assert outcome.current is not None
            assert int(outcome.current.state) >= value, "no state that was seen is lost"
            current = outcome.current
            self._note("set_state")

    async def _work(self, node: TormentedNode) -> None:
        """Let a worker write in each round, until it is refused: it does not know when its round is over."""
        place = Place(0, 0, b"")
        while await self._goes_on():
            if node.place is not None and node.place != place:
                place = node.place
                self._begin(self._work_at(node.name, place))

    async def _work_at(self, node_id: str, place: Place) -> None:
        store = StoreClient(self._channel, RUN, writer=lambda: Writer(node_id, place.lease, place.token))
        while await self._goes_on():
            # A write that begins after one of a later round, or lease, was accepted must be refused.
            newest_round, newest_lease = self._newest_round, self._newest_lease.get(node_id, 0)
            try:
                await store.add("work", 1, writer_round=place.round)
            except ServiceError as error:
                if error.code is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise
                self.refused["work"] += 1
                return
            assert place.round >= newest_round, "no write of a round that is over"
            assert place.lease >= newest_lease, "no write under a lease that is over"
            self._newest_round = max(self._newest_round, place.round)
            self._newest_lease[node_id] = place.lease
            self._note("work")
