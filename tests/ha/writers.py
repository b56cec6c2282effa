"""Clients that write and read fenced states and stores, concurrently and until they are stopped."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ha.caller import Caller
from ha.doors import Door, Doors
from ha.history import History, Operation, Outcome
from rallypoint.rendezvous.base.entries import Writer
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import state_service_pb2 as state_pb
from rallypoint.rendezvous.v1 import store_service_pb2 as store_pb
from torture.tormented_node import TormentedNode

# Operations on one key before the next key replaces it: each operation of unknown outcome makes the check of a key
# harder, so no key is used for long.
_KEY_LIFE = 120
_UNKNOWN = 8  # number of those operations for which one of unknown outcome counts
# The writer while no node holds a lease; it is refused.
_NO_HOLDER = Writer("nobody", 1)


class Keys:
    """The keys of a run. Each is in use for `_KEY_LIFE` operations, and stays in `all`."""

    def __init__(self, run_id: str, kind: str) -> None:
        self.run_id = run_id
        self.all = [f"{kind}-0"]
        self._kind = kind
        self._used = 0

    def current(self) -> str:
        """Return the key for one more operation."""
        self._used += 1
        if self._used > _KEY_LIFE:
            self._used = 1
            self.all.append(f"{self._kind}-{len(self.all)}")
        return self.all[-1]

    def written(self, operation: Operation) -> Operation:
        """Shorten the life of the key in use if the outcome of a write is unknown."""
        self._used += _UNKNOWN if operation.outcome is Outcome.UNKNOWN else 0
        return operation


class StateClient:
    """A client of one fenced state."""

    def __init__(self, caller: Caller, run_id: str) -> None:
        """Write under the caller's name."""
        self._caller = caller
        self._run_id = run_id
        self._sequence = 0
        self._last: tuple[state_pb.SetStateRequest, Mapping[str, Any]] | None = None
        self.token: str | None = None

    async def set(self, token: str | None, *, at: str = "") -> Operation:
        """Set a unique state on a token; None: only if there is no state."""
        self._sequence += 1
        state = f"{self._caller.name}/{self._sequence}"
        request = state_pb.SetStateRequest(run_id=self._run_id, state=state.encode())
        if token is not None:
            request.token = bytes.fromhex(token)
        request.operation.CopyFrom(_operation(self._caller.name, self._sequence))
        self._last = request, {"state": state, "token": token}
        return await self._send(at)

    async def repeat(self) -> Operation | None:
        """Send the last write again, as a repetition and not a new write; return None if there was none."""
        return await self._send("") if self._last is not None else None

    async def get(self, *, at: str = "") -> Operation:
        """Read the state."""
        request = state_pb.GetStateRequest(run_id=self._run_id)

        def call(door: Door, timeout: float) -> Any:
            return door.state.GetState(request, timeout=timeout)

        return self._noted(
            await self._caller.ask("state.get", self._run_id, {}, call, _current, at=at, patience=8.0)
        )

    async def _send(self, at: str) -> Operation:
        assert self._last is not None
        request, asked = self._last

        def call(door: Door, timeout: float) -> Any:
            return door.state.SetState(request, timeout=timeout)

        def read(response: state_pb.SetStateResponse) -> Mapping[str, Any]:
            return _current(response) | {"has_set": response.has_set}

        return self._noted(await self._caller.ask("state.set", self._run_id, asked, call, read, at=at))

    def _noted(self, operation: Operation) -> Operation:
        if operation.outcome is Outcome.OK:
            self.token = operation.answered["token"]
        return operation


class StoreClient:
    """A client that writes to one run's store."""

    def __init__(self, caller: Caller, run_id: str, writer: Callable[[], Writer], round_: int = 0) -> None:
        """Write under the caller's name, for the node that `writer` returns at each write, in a worker's `round_`."""
        self._caller = caller
        self._run_id = run_id
        self._writer = writer
        self._round = round_
        self._sequence = 0

    async def add(self, key: str, amount: int) -> Operation:
        """Add to a counter."""
        request = store_pb.AddRequest(key=key, amount=amount)
        return await self._write(
            "store.add", "Add", request, {"amount": amount}, lambda answer: {"value": str(answer.value)}
        )

    async def set(self, key: str, value: str) -> Operation:
        request = store_pb.SetRequest(key=key, value=value.encode())
        return await self._write("store.set", "Set", request, {"value": value}, lambda answer: {})

    async def compare_set(self, key: str, expected: str, desired: str) -> Operation:
        """Replace a value; "" stands for none."""
        request = store_pb.CompareSetRequest(key=key, expected=expected.encode(), desired=desired.encode())
        asked = {"expected": expected, "desired": desired}
        return await self._write("store.compare_set", "CompareSet", request, asked, _compared)

    async def _write(
        self,
        what: str,
        method: str,
        request: Any,
        asked: dict[str, Any],
        read: Callable[[Any], Mapping[str, Any]],
    ) -> Operation:
        self._sequence += 1
        request.run_id = self._run_id
        request.operation.CopyFrom(_operation(self._caller.name, self._sequence))
        request.writer_round = self._round
        writer = self._writer()
        request.writer.CopyFrom(
            store_pb.StoreWriter(node_id=writer.node_id, lease=writer.lease, token=writer.token)
        )
        asked["writer"] = {
            "run_id": self._run_id,
            "node_id": writer.node_id,
            "lease": writer.lease,
            "round": self._round,
        }

        def call(door: Door, timeout: float) -> Any:
            return getattr(door.store, method)(request, timeout=timeout)

        return await self._caller.ask(what, f"{self._run_id}/{request.key}", asked, call, read)


async def read_key(caller: Caller, run_id: str, key: str, *, at: str = "") -> Operation:
    """Read a value of a store, without waiting for it."""
    request = store_pb.MultiGetRequest(run_id=run_id, keys=[key])
    check = store_pb.CheckRequest(run_id=run_id, keys=[key])

    async def call(door: Door, timeout: float) -> str | None:
        # Only the owner can wait for a key. Once a key exists it stays.
        if not (await door.store.Check(check, timeout=timeout)).present:
            return None
        return (await door.store.MultiGet(request, timeout=timeout)).values[0].decode()

    return await caller.ask(
        "store.get", f"{run_id}/{key}", {}, call, lambda value: {"value": value}, at=at, patience=8.0
    )


async def read_run(caller: Caller, run_id: str, *, at: str = "") -> Operation:
    """Read a run, from any replica."""
    request = pb.GetRunRequest(run_id=run_id)

    def call(door: Door, timeout: float) -> Any:
        return door.rendezvous.GetRun(request, timeout=timeout)

    def read(response: pb.GetRunResponse) -> Mapping[str, Any]:
        run = response.run
        return {"revision": run.revision, "phase": pb.Phase.Name(run.phase), "round": run.round}

    return await caller.ask("run.get", run_id, {}, call, read, at=at, patience=8.0)


class Writers:
    """The clients of one run: some that set its state, some its counters and registers, some that only read.

    Each write to the store is for a random node, under the lease that it holds at that moment.
    """

    def __init__(
        self,
        nodes: Sequence[TormentedNode],
        doors: Doors,
        history: History,
        draw: random.Random,
        pause: float,
    ) -> None:
        """Write nothing yet; each client waits for `pause` seconds, on average, between two operations."""
        self.run_id = nodes[0].run_id
        self._nodes = nodes
        self.counters = Keys(self.run_id, "counter")
        self.registers = Keys(self.run_id, "register")
        self._doors = doors
        self._history = history
        self._draw = draw
        self._pause = pause

    def tasks(self, of_each: int, stopping: asyncio.Event) -> list[asyncio.Task[None]]:
        """Start `of_each` clients of each kind; each ends after its operation when `stopping` is set."""
        kinds = (self._set_states, self._count, self._swap, self._look)
        return [
            asyncio.create_task(kind(self._caller(f"{kind.__name__.strip('_')}-{number}"), stopping))
            for kind in kinds
            for number in range(of_each)
        ]

    def _caller(self, name: str) -> Caller:
        # Random: the operations of a later client must not be taken for repetitions of an earlier client's.
        name = f"{self.run_id}-{name}-{self._draw.randrange(16**8):08x}"
        return Caller(name, self._doors, self._history, random.Random(self._draw.random()))

    async def _goes_on(self, caller: Caller, stopping: asyncio.Event) -> bool:
        await asyncio.sleep(caller.draw.uniform(0.0, 2.0) * self._pause)
        return not stopping.is_set()

    def _store(self, caller: Caller) -> StoreClient:
        def writer() -> Writer:
            holders = [node for node in self._nodes if node.lease]
            return caller.draw.choice(holders).writer if holders else _NO_HOLDER

        return StoreClient(caller, self.run_id, writer)

    async def _set_states(self, caller: Caller, stopping: asyncio.Event) -> None:
        client = StateClient(caller, self.run_id)
        older: str | None = None
        while await self._goes_on(caller, stopping):
            before, chance = client.token, caller.draw.random()
            if chance < 0.7:
                await client.set(client.token)
            elif chance < 0.8:
                await client.set(older)
            elif chance < 0.9:
                await client.repeat()
            else:
                await client.get()
            older = before if before != client.token else older

    async def _count(self, caller: Caller, stopping: asyncio.Event) -> None:
        client = self._store(caller)
        while await self._goes_on(caller, stopping):
            key = self.counters.current()
            if caller.draw.random() < 0.7:
                # Random numbers from a large range: a sum shows which additions it contains.
                self.counters.written(await client.add(key, 1 + caller.draw.randrange(10**9)))
            else:
                await read_key(caller, self.run_id, key, at=caller.anywhere())

    async def _swap(self, caller: Caller, stopping: asyncio.Event) -> None:
        client = self._store(caller)
        known: dict[str, str] = {}
        number = 0
        while await self._goes_on(caller, stopping):
            key = self.registers.current()
            number += 1
            value, chance = f"{caller.name}/{number}", caller.draw.random()
            if chance < 0.5:
                operation = self.registers.written(await client.compare_set(key, known.get(key, ""), value))
                if operation.outcome is Outcome.OK:
                    known[key] = operation.answered["value"] or ""
            elif chance < 0.7:
                if self.registers.written(await client.set(key, value)).outcome is Outcome.OK:
                    known[key] = value
            else:
                await read_key(caller, self.run_id, key, at=caller.anywhere())

    async def _look(self, caller: Caller, stopping: asyncio.Event) -> None:
        client = StateClient(caller, self.run_id)
        while await self._goes_on(caller, stopping):
            await client.get(at=caller.anywhere())
            await read_run(caller, self.run_id, at=caller.anywhere())

    async def read_back(self, timeout: float) -> None:
        """Read everything that was ever written, from every replica.

        Raises:
            AssertionError: Not all of it could be read in time.
        """
        caller = self._caller("read-back")
        states = StateClient(caller, self.run_id)
        deadline = self._history.clock() + timeout
        for replica in self._doors.names:
            await self._read(partial(states.get, at=replica), deadline)
            await self._read(partial(read_run, caller, self.run_id, at=replica), deadline)
            for key in (*self.counters.all, *self.registers.all):
                await self._read(partial(read_key, caller, self.run_id, key, at=replica), deadline)

    async def _read(self, read: Callable[[], Awaitable[Operation]], deadline: float) -> None:
        while (operation := await read()).outcome is not Outcome.OK:
            assert self._history.clock() < deadline, f"still not answered: {operation}"
            await asyncio.sleep(0.1)


def _operation(client: str, sequence: int) -> store_pb.StoreOperation:
    return store_pb.StoreOperation(client_id=client, slot=0, sequence=sequence)


def _current(response: state_pb.GetStateResponse | state_pb.SetStateResponse) -> dict[str, Any]:
    if not response.HasField("current"):
        return {"state": None, "token": None}
    return {"state": response.current.state.decode(), "token": response.current.token.hex()}


def _compared(response: store_pb.CompareSetResponse) -> dict[str, Any]:
    value = response.value.decode() if response.exists else None
    return {"swapped": response.swapped, "value": value}
