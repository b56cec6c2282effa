"""A role that can't go on ends with the reason; a broken part of a role is reported by health."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from rallypoint.cli import serve
from rallypoint.cli.serve import serve_agent_role, serve_rendezvous_role
from rallypoint.rendezvous.base.limits import Limits
from rallypoint.rendezvous.journal.journal import Entry, JournalError, MemoryJournal
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rendezvous.v1 import state_service_pb2 as state_pb
from rallypoint.rendezvous.v1 import state_service_pb2_grpc as state_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ServerOptions, SettingError
from rallypoint.serving.server import Server
from support.joining import join_request
from support.replacing import instead_of
from support.waiting import PATIENCE


class FullDisk(MemoryJournal):
    """A journal that can store nothing."""

    async def append(self, entries: Sequence[Entry]) -> None:
        """Fail."""
        raise JournalError("can't write the journal x.db: the disk is full")


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[Server]:
    """Yield the servers that were started."""
    servers: asyncio.Queue[Server] = asyncio.Queue()

    @instead_of(monkeypatch, Server, "start")
    async def note(start: Any, server: Server) -> None:
        await start(server)
        servers.put_nowait(server)

    return servers


async def test_a_service_whose_journal_breaks_ends_with_the_reason(
    servers: asyncio.Queue[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its earlier replies were durable; new ones would not be, so it must end."""
    monkeypatch.setattr(serve, "open_journal", lambda url: FullDisk())
    serving = asyncio.create_task(serve_rendezvous_role(ServerOptions(), "sqlite:x.db", Limits()))
    server = await servers.get()
    async with open_channel(server.address) as channel:
        call = pb_grpc.RendezvousServiceStub(channel).Join()
        settings = pb.RunSettings(min_nodes=1, max_nodes=1)
        await call.write(join_request("r", settings=settings))
        with pytest.raises(SettingError, match="the disk is full"):
            await asyncio.wait_for(serving, PATIENCE)
        call.cancel()


async def test_a_daemon_whose_runs_are_broken_serves_its_jobs(
    servers: asyncio.Queue[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "MemoryJournal", FullDisk)
    daemon = asyncio.create_task(serve_agent_role(ServerOptions(), None, 1, ""))
    await servers.get()  # the server of timers
    async with open_channel((await servers.get()).address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def not_serving() -> set[str]:
            listed = (await stub.List(health_pb2.HealthListRequest(), timeout=PATIENCE)).statuses
            serving = health_pb2.HealthCheckResponse.SERVING
            return {name.rpartition(".")[2] for name, each in listed.items() if each.status != serving}

        assert await not_serving() == set()
        with pytest.raises(grpc.aio.AioRpcError, match="the disk is full"):
            await state_grpc.StateServiceStub(channel).SetState(
                state_pb.SetStateRequest(run_id="r", state=b"s")
            )
        assert await not_serving() == {"", "RendezvousService", "StateService", "StoreService"}
    signal.raise_signal(signal.SIGTERM)
    await daemon
