"""The assembled timer service over a real socket: its learned data outlives it, and is counted once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.durations import to_duration
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.rpc.errors import decode
from rallypoint.serving.server import Server
from rallypoint.timer.server.service import timer_service, translate
from rallypoint.timer.v1 import timer_service_pb2 as pb
from rallypoint.timer.v1 import timer_service_pb2_grpc as pb_grpc
from support.waiting import PATIENCE
from timer.streams import act, subscribe

pytestmark = pytest.mark.integration


@asynccontextmanager
async def serving(folder: Path, learned: Path | None) -> AsyncIterator[pb_grpc.TimerServiceAsyncStub]:
    """Start a service that keeps learned data in that file; yield a stub."""
    async with timer_service(learned=learned) as service:
        server = Server(
            ServerOptions(host=f"unix:{folder / 'timer'}"), services=[service], translate=translate
        )
        await server.start()
        async with open_channel(server.address) as channel:
            yield pb_grpc.TimerServiceStub(channel)
        await server.drain(5.0)


async def tell(stub: pb_grpc.TimerServiceAsyncStub, *actions: pb.SuperviseAction, node_id: str = "a") -> None:
    """Send the actions on a new stream; return when the service has accepted them."""
    call = stub.Supervise(timeout=PATIENCE)
    await call.write(pb.SuperviseRequest(actions=[subscribe(node_id), *actions]))
    await call.done_writing()
    async for _ in call:
        pass


async def counts(stub: pb_grpc.TimerServiceAsyncStub) -> list[tuple[str, int]]:
    answer = await stub.ListScopes(pb.ListScopesRequest(), timeout=PATIENCE)
    return [(scope.scope, scope.count) for scope in answer.scopes]


def observed(count: int) -> pb.SuperviseAction:
    return act(observe=pb.Observe(scope="step", count=count, longest=to_duration(1)))


def brought(count: int) -> pb.SuperviseAction:
    return act(learned=pb.Learned(scope="step", count=count, longest=to_duration(1)))


async def test_completions_from_the_file_and_the_agents_are_counted_once(tmp_path: Path) -> None:
    """Their counts are not added up: a timer must not expire by completions that never happened."""
    file = tmp_path / "learned.json"
    async with serving(tmp_path, file) as stub:
        await tell(stub, observed(60))
    async with serving(tmp_path, file) as stub:
        assert await counts(stub) == [("step", 60)]
        await tell(stub, brought(100))
        await tell(stub, brought(90), node_id="b")
        assert await counts(stub) == [("step", 100)]
        await tell(stub, observed(1))
    async with serving(tmp_path, file) as stub:
        assert await counts(stub) == [("step", 101)]


async def test_a_scope_forgotten_by_an_operator_stays_forgotten(tmp_path: Path) -> None:
    """The next service learns it again from nothing."""
    file = tmp_path / "learned.json"
    async with serving(tmp_path, file) as stub:
        await tell(stub, observed(60))
    async with serving(tmp_path, file) as stub:
        await stub.ForgetScopes(pb.ForgetScopesRequest(run_id="run"), timeout=PATIENCE)
    async with serving(tmp_path, file) as stub:
        assert await counts(stub) == []
        await tell(stub, observed(2))
        assert await counts(stub) == [("step", 2)]


async def test_without_a_file_it_is_kept_in_memory(tmp_path: Path) -> None:
    """It is kept as long as the service lives, with agents or without."""
    async with serving(tmp_path, None) as stub:
        await tell(stub, observed(60))
        assert await counts(stub) == [("step", 60)]
    async with serving(tmp_path, None) as stub:
        assert await counts(stub) == []


async def test_a_silent_stream_does_not_delay_a_draining_server(tmp_path: Path) -> None:
    """Its agent was cut off before it could subscribe: it gets the same error as all others."""
    async with timer_service(learned=None) as service:
        server = Server(
            ServerOptions(host=f"unix:{tmp_path / 'timer'}"), services=[service], translate=translate
        )
        await server.start()
        async with open_channel(server.address) as channel:
            stub = pb_grpc.TimerServiceStub(channel)
            silent = stub.Supervise(timeout=PATIENCE)
            await counts(stub)  # handled after it
            draining = asyncio.create_task(server.drain(60.0))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await silent.read()
            await draining
    assert decode(error.value).reason == "DRAINING"
