"""A node whose name can only be its own is refused while another node of this name is active."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from agent.workers.test_environment import CONFIG
from rallypoint.agent.config.job import JobConfig, Peer
from rallypoint.launcher.launch import refuse_duplicate
from rallypoint.launcher.services import embedded_rendezvous
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import SettingError
from support.joining import join_request
from support.waiting import PATIENCE


def node(endpoint: str, node_id: str = "rank1") -> JobConfig:
    """Return a node of the run."""
    return replace(CONFIG, node_id=node_id, rendezvous=Peer(endpoint), connect_timeout=PATIENCE)


async def test_a_duplicate_node_is_refused() -> None:
    """The first must be active; a node that comes after its end takes its place, and other names are free."""
    async with embedded_rendezvous() as endpoint, open_channel(endpoint) as channel:
        stub = pb_grpc.RendezvousServiceStub(channel)
        await refuse_duplicate(node(endpoint))
        first = stub.Join()
        await first.write(join_request(CONFIG.run_id, "rank1", CONFIG.settings, address="10.0.0.2"))
        await first.read()
        with pytest.raises(
            SettingError, match=r"the node rank1 is in run 'run-7' already, on 10\.0\.0\.2: give every"
        ):
            await refuse_duplicate(node(endpoint))
        await refuse_duplicate(node(endpoint, "rank2"))
        first.cancel()
        async with asyncio.timeout(PATIENCE):
            while (await stub.GetRun(pb.GetRunRequest(run_id=CONFIG.run_id))).run.nodes[0].connected:
                pass
        await refuse_duplicate(node(endpoint))


async def test_an_unreachable_service_is_ignored_by_the_duplicate_check() -> None:
    """The join that follows reports the error."""
    await refuse_duplicate(replace(node("127.0.0.1:1"), connect_timeout=0.2))
