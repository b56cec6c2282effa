"""Users of store and fenced state: the workers of every round, clients of the run, and contenders for its state.

Each is a process of its own with the product's client. Its values contain its name and a count, so that `StoreTruth`
can find the moment at which a value was current.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rallypoint.rendezvous.state.client import FencedStateClient
from rallypoint.rendezvous.store.client import StoreClient, Writer
from rallypoint.rpc.errors import ServiceError
from rallypoint.rpc.pace import Pace
from simulation.clockwork import Process
from simulation.referee import Group
from simulation.store_truth import CHAIN, COUNTER, END, LOG, PAIR, REGISTER

# Longest pause after a refusal, in seconds.
_PAUSE = 3.0
# Seconds that a reader waits for a missing key.
_SHORT = 0.5
_FINAL = frozenset({"ROUND_OVER", "LEASE_LOST", "RUN_CLOSED"})
# The writer while no node holds a lease; it is refused.
_UNKNOWN_WRITER = Writer("nobody", 1)


class StoreUser:
    """A process that writes and reads at random, at the service `where`.

    It writes for `group` if that is given; otherwise each write is for a random node of the run, whose lease may be
    over.
    """

    def __init__(
        self,
        process: Process,
        where: Any,
        chance: random.Random,
        run_id: str,
        *,
        every: float,
        leases: Callable[[], Sequence[Writer]],
        group: Group | None = None,
    ) -> None:
        self.process = process
        self._chance = chance
        self._every = every
        self._name = process.name
        self._round = 0 if group is None else group.round
        self._leases = leases
        self._group = group
        pace = Pace(process.time, asyncio.sleep, chance.random)
        self._store = StoreClient(where, run_id, client_id=self._name, writer=self._writer, pace=pace)
        self._states = FencedStateClient(where, run_id, client_id=f"{self._name}.state", pace=pace)
        self._count = 0
        self._expected = b""
        process.create_task(self._use())

    def _writer(self) -> Writer:
        if (group := self._group) is not None:
            return Writer(group.node_id, group.lease, group.token)
        return self._chance.choice(self._leases() or [_UNKNOWN_WRITER])

    async def _use(self) -> None:
        chance = self._chance
        doings: list[Callable[[int], Awaitable[object]]] = [
            self._add, self._append, self._append, self._set, self._get, self._get_pair, self._swap, self._set_pair
        ]  # fmt: skip
        if not self._round:
            doings += [self._contend, self._contend, self._contend]
        while True:
            await asyncio.sleep(chance.expovariate(1 / self._every))
            self._count += 1
            space = self._round if chance.random() < 0.7 else 0
            try:
                await chance.choice(doings)(space)
            except ServiceError as error:
                if self._round and error.reason in _FINAL:
                    return
                await asyncio.sleep(_PAUSE * chance.random())

    def _fresh(self) -> bytes:
        return f"{self._name}.{self._count}".encode()

    async def _add(self, space: int) -> None:
        await self._store.add(COUNTER, 1, round=space, writer_round=self._round)

    async def _append(self, space: int) -> None:
        await self._store.append(LOG, self._fresh() + END, round=space, writer_round=self._round)

    async def _set(self, space: int) -> None:
        key = f"{REGISTER}/{self._name}"
        if self._chance.random() < 0.2:
            await self._store.delete(key, round=space, writer_round=self._round)
        else:
            await self._store.set(key, self._fresh(), round=space, writer_round=self._round)

    async def _get(self, space: int) -> None:
        key = self._chance.choice([COUNTER, LOG, CHAIN, f"{REGISTER}/{self._name}"])
        await self._store.get(key, round=space, timeout=_SHORT)

    async def _set_pair(self, space: int) -> None:
        value = self._fresh()
        pair = {f"{PAIR}/{self._name}/a": value, f"{PAIR}/{self._name}/b": value}
        await self._store.multi_set(pair, round=space, writer_round=self._round)

    async def _get_pair(self, space: int) -> None:
        keys = [f"{PAIR}/{self._name}/a", f"{PAIR}/{self._name}/b"]
        await self._store.multi_get(keys, round=space, timeout=_SHORT)

    async def _swap(self, _: int) -> None:
        """Compare and set, expecting the value found by the last call."""
        found = await self._store.compare_set(CHAIN, self._expected, self._fresh(), writer_round=self._round)
        self._expected = found.value or b""

    async def _contend(self, _: int) -> None:
        """Replace the fenced state, with the token that was just read."""
        current = await self._states.get()
        if self._chance.random() < 0.7:
            await self._states.set(self._fresh(), None if current is None else current.token)
