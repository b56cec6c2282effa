"""Client of the store: calls that survive a restart of the service, and writes that take effect once."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import TypeAlias, TypeVar

from rallypoint.rendezvous.base.entries import Writer
from rallypoint.rendezvous.store.requests import (
    WriteRequest,
    check_entries,
    check_key,
    check_keys,
    check_value,
)
from rallypoint.rendezvous.store.writes import Comparison
from rallypoint.rendezvous.v1 import store_service_pb2 as pb
from rallypoint.rendezvous.v1 import store_service_pb2_grpc as rpc
from rallypoint.rpc.calls import RetryingCalls
from rallypoint.rpc.durations import set_seconds
from rallypoint.rpc.pace import Pace
from rallypoint.rpc.replica_client import Where, replica_client

__all__ = ["StoreClient", "Writer"]

# Seconds; long enough to restart a service by hand, and the default of torch's stores.
DEFAULT_TIMEOUT = 300.0
# Seconds between the end of a wait and the end of its call: time for the service to name the missing keys.
ANSWER_MARGIN = 5.0
_Response = TypeVar("_Response")
_Pick: TypeAlias = "Callable[[rpc.StoreServiceAsyncStub], Callable[..., Awaitable[_Response]]]"


class OperationSlots:
    """Numbers a client's writes; see StoreOperation in the contract."""

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id
        self._sequences: list[int] = []
        self._free: list[int] = []
        self._abandoned: deque[int] = deque()

    @contextmanager
    def operation(self) -> Iterator[pb.StoreOperation]:
        """Name one write, while it is in flight, in the lowest free slot.

        Or in the slot of a failed write, which may still be in flight: so that one can't take effect after this one.
        """
        if self._abandoned:
            slot = self._abandoned.popleft()
        elif self._free:
            slot = heappop(self._free)
        else:
            slot = len(self._sequences)
            self._sequences.append(0)
        self._sequences[slot] += 1
        try:
            yield pb.StoreOperation(client_id=self._client_id, slot=slot, sequence=self._sequences[slot])
        except BaseException:
            self._abandoned.append(slot)
            raise
        heappush(self._free, slot)


class StoreClient:
    """The store of one run.

    Every call is repeated while the service can't be reached, until its timeout. A write takes effect at most once
    however often it is repeated, also across restarts of the service. A call that is cancelled or times out leaves the
    outcome of its write unknown. That write takes no effect after the next write of this client that changes something,
    in any space; if several are given up at once, each is covered by one of the next so many writes.

    All methods raise ServiceError with a reason of the contract (store_service.proto), or with STORE_UNAVAILABLE if the
    service could not be reached in time. `round` names the space: 0 for the run's own. `writer_round` is the round
    whose worker the writer is, 0 for none. Times are in seconds.
    """

    def __init__(
        self,
        where: Where,
        run_id: str,
        *,
        writer: Callable[[], Writer],
        client_id: str | None = None,
        pace: Pace | None = None,
    ) -> None:
        """Make a client.

        Args:
            where: A ReplicaClient, or a channel, to the service; the caller closes it.
            writer: Returns the node that writes, and its lease; called once for each write. Reads need none.
            client_id: A name that no other client, also none of an earlier process, has; by default random.
        """
        self._run_id = run_id
        self._slots = OperationSlots(client_id or secrets.token_hex(16))
        self._writer = writer
        self._pace = pace or Pace()
        self._calls: RetryingCalls[rpc.StoreServiceAsyncStub] = RetryingCalls(
            replica_client(where), rpc.StoreServiceStub, "store", self._pace
        )

    async def set(
        self,
        key: str,
        value: bytes,
        *,
        round: int = 0,
        writer_round: int = 0,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        """Store a value; it is durable when this returns."""
        check_key(key)
        check_value("value", [value])
        request = pb.SetRequest(key=key, value=value)
        await self._write(lambda stub: stub.Set, request, round, writer_round, timeout)

    async def get(self, key: str, *, round: int = 0, timeout: float = DEFAULT_TIMEOUT) -> bytes:
        """Return the value of a key, waiting for the key up to `timeout`."""
        check_key(key)
        request = pb.GetRequest(run_id=self._run_id, round=round, key=key)
        response: pb.GetResponse = await self._wait(lambda stub: stub.Get, request, timeout)
        return response.value

    async def add(
        self,
        key: str,
        amount: int,
        *,
        round: int = 0,
        writer_round: int = 0,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> int:
        """Add to an integer, 0 if the key is absent; return the sum."""
        check_key(key)
        request = pb.AddRequest(key=key, amount=amount)
        response: pb.AddResponse = await self._write(
            lambda stub: stub.Add, request, round, writer_round, timeout
        )
        return response.value

    async def append(
        self,
        key: str,
        value: bytes,
        *,
        round: int = 0,
        writer_round: int = 0,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> int:
        """Add bytes to the end of a value, empty if the key is absent; return its length."""
        check_key(key)
        check_value("value", [value])
        request = pb.AppendRequest(key=key, value=value)
        response: pb.AppendResponse = await self._write(
            lambda stub: stub.Append, request, round, writer_round, timeout
        )
        return response.length

    async def compare_set(
        self,
        key: str,
        expected: bytes,
        desired: bytes,
        *,
        round: int = 0,
        writer_round: int = 0,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> Comparison:
        """Set a key if its value is `expected`, or if it is absent and `expected` is empty."""
        check_key(key)
        check_value("desired", [expected, desired], besides="expected")
        request = pb.CompareSetRequest(key=key, expected=expected, desired=desired)
        response: pb.CompareSetResponse = await self._write(
            lambda stub: stub.CompareSet, request, round, writer_round, timeout
        )
        return Comparison(response.swapped, response.value if response.exists else None)

    async def multi_set(
        self,
        entries: Mapping[str, bytes],
        *,
        round: int = 0,
        writer_round: int = 0,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        """Store several values at once, all or none; they are durable when this returns."""
        for index, key in enumerate(entries):
            check_key(key, f"entries[{index}].key")  # before protobuf sees a string that has no UTF-8
        request = pb.MultiSetRequest(
            entries=[pb.StoreEntry(key=key, value=value) for key, value in entries.items()]
        )
        check_entries(request.entries)
        await self._write(lambda stub: stub.MultiSet, request, round, writer_round, timeout)

    async def multi_get(
        self, keys: Sequence[str], *, round: int = 0, timeout: float = DEFAULT_TIMEOUT
    ) -> list[bytes]:
        """Return the values of the keys, in their order, waiting up to `timeout` until all are there at once."""
        check_keys(keys)
        request = pb.MultiGetRequest(run_id=self._run_id, round=round, keys=keys)
        response: pb.MultiGetResponse = await self._wait(lambda stub: stub.MultiGet, request, timeout)
        return list(response.values)

    async def wait(self, keys: Sequence[str], *, round: int = 0, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Return when all keys are there, waiting for them up to `timeout`."""
        request = pb.WaitRequest(run_id=self._run_id, round=round, keys=check_keys(keys))
        await self._wait(lambda stub: stub.Wait, request, timeout)

    async def check(self, keys: Sequence[str], *, round: int = 0, timeout: float = DEFAULT_TIMEOUT) -> bool:
        """Return True if all keys are there."""
        request = pb.CheckRequest(run_id=self._run_id, round=round, keys=check_keys(keys))
        response: pb.CheckResponse = await self._calls.call(lambda stub: stub.Check, request, timeout)
        return response.present

    async def delete(
        self, key: str, *, round: int = 0, writer_round: int = 0, timeout: float = DEFAULT_TIMEOUT
    ) -> bool:
        """Remove a key; return True if it was there."""
        check_key(key)
        request = pb.DeleteRequest(key=key)
        response: pb.DeleteResponse = await self._write(
            lambda stub: stub.Delete, request, round, writer_round, timeout
        )
        return response.deleted

    async def list_keys(
        self, prefix: str = "", page_token: str = "", *, round: int = 0, timeout: float = DEFAULT_TIMEOUT
    ) -> tuple[list[str], str]:
        """Return a page of the keys that begin with `prefix`, and the token of the next page; empty: the last."""
        request = pb.ListKeysRequest(run_id=self._run_id, round=round, prefix=prefix, page_token=page_token)
        response: pb.ListKeysResponse = await self._calls.call(lambda stub: stub.ListKeys, request, timeout)
        return list(response.keys), response.next_page_token

    async def _write(
        self, pick: _Pick[_Response], request: WriteRequest, round: int, writer_round: int, timeout: float
    ) -> _Response:
        request.run_id, request.round, request.writer_round = self._run_id, round, writer_round
        # Once per write: a repetition of a write that a node began under an older lease must be refused.
        writer = self._writer()
        request.writer.node_id, request.writer.lease = writer.node_id, writer.lease
        request.writer.token = writer.token
        with self._slots.operation() as operation:
            request.operation.CopyFrom(operation)
            return await self._calls.call(pick, request, timeout)

    async def _wait(
        self,
        pick: _Pick[_Response],
        request: pb.GetRequest | pb.MultiGetRequest | pb.WaitRequest,
        timeout: float,
    ) -> _Response:
        end = self._pace.clock() + timeout

        def set_remaining_time() -> None:
            set_seconds(request.timeout, max(0.0, end - self._pace.clock()))

        return await self._calls.call(pick, request, timeout + ANSWER_MARGIN, set_remaining_time, waits=True)
