"""A role that can't go on ends, and says why."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rallypoint.cli import serve
from rallypoint.cli.serve import serve_rendezvous_role
from rallypoint.rendezvous.base.limits import Limits
from rallypoint.rendezvous.journal.journal import Entry, JournalError, MemoryJournal
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ServerOptions, SettingError
from rallypoint.serving.server import Server
from support.waiting import PATIENCE


class FullDisk(MemoryJournal):
    """A journal that can keep nothing."""

    async def append(self, entries: Sequence[Entry]) -> None:
        """Fail."""
        raise JournalError("can't write the journal x.db: the disk is full")


async def test_a_service_whose_journal_breaks_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it told before was durable; what it would tell now is not, so it must go."""
    servers: asyncio.Queue[Server] = asyncio.Queue()
    start = Server.start

    async def note(server: Server) -> None:
        await start(server)
        servers.put_nowait(server)

    monkeypatch.setattr(Server, "start", note)
    monkeypatch.setattr(serve, "open_journal", lambda url: FullDisk())
    serving = asyncio.create_task(serve_rendezvous_role(ServerOptions(), "sqlite:x.db", Limits()))
    server = await servers.get()
    async with open_channel(server.address) as channel:
        call = pb_grpc.RendezvousServiceStub(channel).Join()
        settings = pb.RunSettings(min_nodes=1, max_nodes=1)
        join = pb.JoinRun(
            run_id="r", node_id="n", settings=settings, address="a", local_world_size=1, role="d"
        )
        await call.write(pb.JoinRequest(join=join))
        with pytest.raises(SettingError, match="the disk is full"):
            await asyncio.wait_for(serving, PATIENCE)
        call.cancel()
