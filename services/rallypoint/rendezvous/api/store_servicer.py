"""StoreService on gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypedDict

from rallypoint.rendezvous.base.entries import Operation, Writer
from rallypoint.rendezvous.base.limits import (
    MAX_KEY_BYTES,
    MAX_KEYS,
    MAX_PAGE_SIZE,
    MAX_VALUE_BYTES,
    StoreLimits,
)
from rallypoint.rendezvous.shard.locator import RunLocator
from rallypoint.rendezvous.shard.reader import StoreReader
from rallypoint.rendezvous.store.requests import (
    ReadRequest,
    WriteRequest,
    check_entries,
    check_key,
    check_keys,
    check_space,
    check_value,
    operation_of,
    page,
    wait_seconds,
    writer_of,
)
from rallypoint.rendezvous.store.service import StoreService
from rallypoint.rendezvous.store.writes import Add, Append, CompareSet, DeleteKey, MultiSet, Set
from rallypoint.rendezvous.v1 import store_service_pb2 as pb
from rallypoint.rendezvous.v1 import store_service_pb2_grpc as rpc
from rallypoint.rpc.durations import to_seconds
from rallypoint.server.v1 import server_service_pb2 as server_pb
from rallypoint.serving.flow import Context
from rallypoint.serving.info import limits_of
from rallypoint.serving.policy import NODES
from rallypoint.serving.requests import EveryField, page_token
from rallypoint.serving.server import Registration

SERVICE_NAME = "rallypoint.rendezvous.v1.StoreService"


def store_registration(locator: RunLocator, limits: StoreLimits | None = None) -> Registration:
    """Return the registration of the stores of all runs; draining it drains those of this process.

    The server must use `rallypoint.rendezvous.api.errors.translate`. `limits`: those of the stores.
    """
    servicer = StoreServicer(locator)
    enforced = limits_of(
        server_pb.StoreLimits,
        limits or StoreLimits(),
        key_bytes=MAX_KEY_BYTES,
        value_bytes=MAX_VALUE_BYTES,
        keys_per_request=MAX_KEYS,
        keys_per_page=MAX_PAGE_SIZE,
    )

    async def drain() -> None:
        await asyncio.gather(*(shard.store.drain() for shard in locator.shards()))

    return Registration(
        SERVICE_NAME,
        lambda server: rpc.add_StoreServiceServicer_to_server(servicer, server),
        drain,
        rights={method.name: NODES for method in pb.DESCRIPTOR.services_by_name["StoreService"].methods},
        limits=server_pb.ServerLimits(store=enforced),
    )


class StoreServicer(rpc.StoreServiceServicer):
    """The calls of StoreService; see store_service.proto."""

    def __init__(self, locator: RunLocator) -> None:
        self._locator = locator

    async def Set(self, request: pb.SetRequest, context: Context) -> pb.SetResponse:
        addressed = _addressed(request, partial(check_value, "value", [request.value]))
        write = Set(key=request.key, value=request.value, **addressed)
        await self._store(request).write(request.run_id, write)
        return pb.SetResponse()

    async def Get(self, request: pb.GetRequest, context: Context) -> pb.GetResponse:
        _check_read(request, partial(check_key, request.key))
        timeout = to_seconds(request.timeout)
        store = await self._reader(request)
        value = await store.get(request.run_id, request.round, request.key, timeout)
        return pb.GetResponse(value=value, value_text=_text(value))

    async def Add(self, request: pb.AddRequest, context: Context) -> pb.AddResponse:
        addressed = _addressed(request)
        write = Add(key=request.key, amount=request.amount, **addressed)
        return pb.AddResponse(value=await self._store(request).write(request.run_id, write))

    async def Append(self, request: pb.AppendRequest, context: Context) -> pb.AppendResponse:
        addressed = _addressed(request, partial(check_value, "value", [request.value]))
        write = Append(key=request.key, value=request.value, **addressed)
        return pb.AppendResponse(length=await self._store(request).write(request.run_id, write))

    async def CompareSet(self, request: pb.CompareSetRequest, context: Context) -> pb.CompareSetResponse:
        values = [request.expected, request.desired]
        addressed = _addressed(request, partial(check_value, "desired", values, besides="expected"))
        write = CompareSet(key=request.key, expected=request.expected, desired=request.desired, **addressed)
        comparison = await self._store(request).write(request.run_id, write)
        return pb.CompareSetResponse(
            swapped=comparison.swapped, exists=comparison.value is not None, value=comparison.value or b""
        )

    async def MultiSet(self, request: pb.MultiSetRequest, context: Context) -> pb.MultiSetResponse:
        addressed = _addressed(request, partial(check_entries, request.entries))
        write = MultiSet(entries={entry.key: entry.value for entry in request.entries}, **addressed)
        await self._store(request).write(request.run_id, write)
        return pb.MultiSetResponse()

    async def MultiGet(self, request: pb.MultiGetRequest, context: Context) -> pb.MultiGetResponse:
        _check_read(request, partial(check_keys, request.keys))
        timeout = to_seconds(request.timeout)
        store = await self._reader(request)
        values = await store.multi_get(request.run_id, request.round, request.keys, timeout)
        return pb.MultiGetResponse(values=values)

    async def Wait(self, request: pb.WaitRequest, context: Context) -> pb.WaitResponse:
        _check_read(request, partial(check_keys, request.keys))
        keys, timeout = list(dict.fromkeys(request.keys)), to_seconds(request.timeout)
        store = await self._reader(request)
        await store.wait(request.run_id, request.round, keys, timeout)
        return pb.WaitResponse()

    async def Check(self, request: pb.CheckRequest, context: Context) -> pb.CheckResponse:
        _check_read(request, partial(check_keys, request.keys))
        store = await self._reader(request)
        keys = list(dict.fromkeys(request.keys))
        return pb.CheckResponse(present=store.check(request.run_id, request.round, keys))

    async def Delete(self, request: pb.DeleteRequest, context: Context) -> pb.DeleteResponse:
        addressed = _addressed(request)
        write = DeleteKey(key=request.key, **addressed)
        return pb.DeleteResponse(deleted=await self._store(request).write(request.run_id, write))

    async def ListKeys(self, request: pb.ListKeysRequest, context: Context) -> pb.ListKeysResponse:
        _check_read(request)
        after, count = page(request)
        # One key more than requested shows that there is a next page.
        store = await self._reader(request)
        keys = store.list_keys(request.run_id, request.round, request.prefix, after, count + 1)
        more = len(keys) > count
        token = page_token(request, keys[count - 1]) if more else ""
        return pb.ListKeysResponse(keys=keys[:count], next_page_token=token)

    def _store(self, request: WriteRequest) -> StoreService:
        return self._locator.writer(request.run_id).store

    async def _reader(self, request: ReadRequest) -> StoreReader:
        return (await self._locator.reader(request.run_id)).store


# Longest value in bytes that GetResponse has as text too: addresses, counters, names. Of the 300 µs of a Get this takes
# at most 2.
_TEXT_BYTES = 256


def _text(value: bytes) -> str:
    """Return a short value that is printable text as such; empty if it is none."""
    if len(value) > _TEXT_BYTES:
        return ""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return ""
    return text if text.isprintable() else ""


class _Addressed(TypedDict):
    """The fields that all writes share: the space, the writer and the operation."""

    round: int
    writer_round: int
    writer: Writer
    operation: Operation | None


def _addressed(request: WriteRequest, *checks: Callable[[], object]) -> _Addressed:
    """Check a write; return the fields that all writes share."""
    with EveryField() as check:
        check(check_space, request.run_id, request.round, request.writer_round)
        writer, operation = check(writer_of, request), check(operation_of, request)
        if not isinstance(request, pb.MultiSetRequest):
            check(check_key, request.key)
        for each in checks:
            check(each)
    assert writer is not None
    return {
        "round": request.round,
        "writer_round": request.writer_round,
        "writer": writer,
        "operation": operation,
    }


def _check_read(request: ReadRequest, *checks: Callable[[], object]) -> None:
    """Check a read."""
    with EveryField() as check:
        check(check_space, request.run_id, request.round)
        if not isinstance(request, pb.CheckRequest | pb.ListKeysRequest):
            check(wait_seconds, request.timeout)
        for each in checks:
            check(each)
