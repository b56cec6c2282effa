"""The rendezvous service is paused as a whole, and goes on: no node of its herd is lost because of it."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rallypoint.rendezvous.core.apply import LEAST_TERM_AFTER_RESTART
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from serving.conftest import certificates as certificates  # noqa: PLC0414 (a fixture)
from torture.crowd import Crowd, crowd, hosts_of_their_own
from torture.length import ordinarily
from torture.mortal_server import MortalServer, serving
from torture.tormented_node import RUN

# Nodes, and True if they use TLS.
HERDS = ordinarily([(50, True)], in_full=[(1500, False), (500, True)])
# Seconds. After 15 s without a response, every client has closed its connection; after 5 s, those that awaited one.
PAUSES = ordinarily((16.0,), in_full=(5.0, 20.0, 60.0))
# Seconds for a herd of this size to come, or come back, on a machine that is busy with other work.
PATIENCE = ordinarily(60.0, in_full=300.0)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.timeout(sum(PAUSES) + 2 * (len(PAUSES) + 1) * PATIENCE),
]


@pytest.mark.parametrize(("count", "secured"), HERDS)
async def test_a_pause_of_the_service_loses_no_node(
    count: int, secured: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """With default settings all nodes come back, resume their leases, and are in the same round as before."""
    server = MortalServer(tmp_path, request.getfixturevalue("certificates") if secured else None)
    settings = pb.RunSettings(min_nodes=count, max_nodes=count)
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(serving(server))
        stack.enter_context(hosts_of_their_own())
        draw = random.Random(count)
        nodes = await stack.enter_async_context(
            crowd(server.endpoint, settings, count, draw, server.security)
        )
        await nodes.agree(PATIENCE)
        rendezvous = pb_grpc.RendezvousServiceStub(channel)
        before = (await rendezvous.GetRun(pb.GetRunRequest(run_id=RUN))).run
        # A machine so busy that nodes lose their leases for lack of heartbeats without a pause can't show anything.
        assert not any(node.losses for node in nodes.nodes), "nobody is lost before the first pause"
        for seconds in PAUSES:
            resumed = sum(node.resumptions for node in nodes.nodes)
            server.pause()
            await asyncio.sleep(seconds)
            server.go_on()
            took = await _all_back(nodes, rendezvous)
            resumed = sum(node.resumptions for node in nodes.nodes) - resumed
            print(  # noqa: T201
                f"{count} nodes{' with TLS' if secured else ''}, {seconds:g} s of pause: {resumed} streams "
                f"resumed, all back {took:.1f} s after it went on; 0 nodes lost"
            )
        after = (await rendezvous.GetRun(pb.GetRunRequest(run_id=RUN))).run
        assert (after.revision, after.round) == (before.revision, before.round), "nothing happened to the run"
    assert server.complaints() == []


async def _all_back(nodes: Crowd, rendezvous: pb_grpc.RendezvousServiceAsyncStub) -> float:
    """Wait until every node has a stream again, and at least for the term that leases get after a pause.

    Returns the seconds until all had one.

    Raises:
        AssertionError: A node was lost.
    """
    began, count = time.monotonic(), len(nodes.nodes)
    took, connected = 0.0, 0
    while connected < count or time.monotonic() < began + LEAST_TERM_AFTER_RESTART:
        lost = [node.name for node in nodes.nodes if node.losses]
        assert not lost, (
            f"{len(lost)} of {count} nodes were lost, {time.monotonic() - began:.1f} s after it went on"
        )
        assert time.monotonic() < began + PATIENCE, f"{connected} of {count} nodes are back"
        back, connected = connected, await _connected(rendezvous)
        if back < count <= connected:
            took = time.monotonic() - began
        await asyncio.sleep(0.5)
    return took


async def _connected(rendezvous: pb_grpc.RendezvousServiceAsyncStub) -> int:
    """Return the number of nodes with a stream to the service."""
    connected, token = 0, ""
    while True:
        request = pb.ListNodesRequest(run_id=RUN, filter=pb.NodeFilter(connected=True), page_token=token)
        page = await rendezvous.ListNodes(request, wait_for_ready=True)
        connected += len(page.nodes)
        token = page.next_page_token
        if not token:
            return connected
