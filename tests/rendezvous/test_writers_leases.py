"""A write for a node needs the node's lease, by the engine's latest facts when the write is decided."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Coroutine
from functools import partial
from typing import Any

import grpc.aio
import pytest

from rallypoint.rendezvous.api.errors import translate
from rallypoint.rendezvous.api.service import rendezvous_services
from rallypoint.rendezvous.base.entries import Writer
from rallypoint.rendezvous.core.commands import LeaseLost, RunIsClosed, RunNotFound
from rallypoint.rendezvous.journal.journal import MemoryJournal
from rallypoint.rendezvous.state.core import SetState
from rallypoint.rendezvous.state.service import FencedStateService
from rallypoint.rendezvous.store.service import StoreService
from rallypoint.rendezvous.store.writes import Set
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import (
    rendezvous_service_pb2_grpc,
    state_service_pb2_grpc,
    store_service_pb2_grpc,
)
from rallypoint.rendezvous.v1.state_service_pb2 import SetStateRequest
from rallypoint.rendezvous.v1.store_service_pb2 import SetRequest, StoreWriter
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.rpc.errors import decode
from rallypoint.serving.server import Server
from rendezvous.engine_fixtures import RUN, Stage, begun, idle, staged
from rendezvous.store.store_fakes import TestJournal
from support.joining import join_request
from support.waiting import PATIENCE


async def test_the_engine_refuses_by_its_latest_facts() -> None:
    """A lease that is about to end allows no writes, though its end is not durable yet: that is the safe side."""
    async with staged(Stage()) as stage:
        a, b = await stage.running("a", "b")
        check = partial(stage.engine.check_lease, token=b"")
        stage.engine.check_lease(RUN, "b", b.lease.number, b.lease.token)
        stage.journal.hold()
        (leaving,) = await begun(stage.leave(b))
        await stage.journal.held()
        with pytest.raises(LeaseLost):
            check(RUN, "b", b.lease.number)
        stage.engine.check_lease(RUN, "a", a.lease.number, a.lease.token)
        stage.journal.release()
        await leaving
        with pytest.raises(LeaseLost):
            check(RUN, "b", b.lease.number)
        with pytest.raises(LeaseLost):
            check(RUN, "a", 1)
        with pytest.raises(RunNotFound):
            check("other", "a", 1)
        await stage.engine.close_run(RUN, "enough")
        with pytest.raises(RunIsClosed):
            check(RUN, "a", a.lease.number)


@pytest.mark.parametrize("kind", ["store", "states"])
async def test_a_refusal_waits_until_its_cause_is_durable(kind: str) -> None:
    """Until then the cause may be undone: a server that is killed now has lost no node."""
    async with staged(Stage()) as stage:
        _, b = await stage.running("a", "b")
        engine, writer = stage.engine, Writer("b", b.lease.number, b.lease.token)
        stage.journal.hold()
        (leaving,) = await begun(stage.leave(b))
        await stage.journal.held()
        if kind == "store":
            request = Set(round=0, key="k", value=b"", writer=writer)
            write: Coroutine[Any, Any, object] = StoreService(TestJournal(), engine).write(RUN, request)
        else:
            states = FencedStateService(TestJournal(), engine, clock=lambda: 0.0, draw=secrets.token_bytes)
            serving = asyncio.create_task(states.serve())
            write = states.set(SetState(run_id=RUN, state=b"", writer=writer))
        (writing,) = await begun(write)
        await idle()
        assert not writing.done()
        stage.journal.release()
        with pytest.raises(LeaseLost):
            await writing
        await leaving
        if kind == "states":
            serving.cancel()


async def reason_of(call: Awaitable[object]) -> str | None:
    """The reason of a call's refusal; None: it succeeded."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return decode(error).reason
    return None


async def test_store_and_states_ask_the_engine() -> None:
    """A node that an operator evicted can write to neither; each refuses with the reason in its contract."""
    async with rendezvous_services(MemoryJournal()) as services:
        server = Server(ServerOptions(), services=services, translate=translate)
        await server.start()
        async with open_channel(server.address) as channel:
            rendezvous: rendezvous_service_pb2_grpc.RendezvousServiceAsyncStub = (
                rendezvous_service_pb2_grpc.RendezvousServiceStub(channel)
            )
            store: store_service_pb2_grpc.StoreServiceAsyncStub = store_service_pb2_grpc.StoreServiceStub(
                channel
            )
            states: state_service_pb2_grpc.StateServiceAsyncStub = state_service_pb2_grpc.StateServiceStub(
                channel
            )
            stream = rendezvous.Join(timeout=PATIENCE)
            await stream.write(join_request(RUN, "a", pb.RunSettings(min_nodes=2, max_nodes=2)))
            admission = await stream.read()
            assert isinstance(admission, pb.JoinResponse)
            writer = StoreWriter(node_id="a", lease=admission.lease.number, token=admission.lease.token)
            in_store = SetRequest(run_id=RUN, key="k", writer=writer)
            in_state = SetStateRequest(run_id=RUN, writer=writer)
            assert await reason_of(store.Set(in_store, timeout=PATIENCE)) is None
            assert await reason_of(states.SetState(in_state, timeout=PATIENCE)) is None
            stranger = StoreWriter(node_id="a", lease=admission.lease.number)
            forged = SetRequest(run_id=RUN, key="k", writer=stranger)
            assert await reason_of(store.Set(forged, timeout=PATIENCE)) == "LEASE_NOT_PROVEN"
            forged_state = SetStateRequest(run_id=RUN, writer=stranger)
            assert await reason_of(states.SetState(forged_state, timeout=PATIENCE)) == "LEASE_NOT_PROVEN"
            await rendezvous.EvictNode(pb.EvictNodeRequest(run_id=RUN, node_id="a"), timeout=PATIENCE)
            assert await reason_of(store.Set(in_store, timeout=PATIENCE)) == "LEASE_LOST"
            assert await reason_of(states.SetState(in_state, timeout=PATIENCE)) == "NODE_EVICTED"
        await server.stop()
