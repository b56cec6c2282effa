"""A swarm records the time of each update of its nodes, and reports every lost stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import rallypoint.serving  # noqa: F401 (before gRPC is imported: it configures gRPC for this process)

# isort: split
import grpc
import pytest

from benchmarks.clients.swarm import FINAL, FROZEN, Swarm, SwarmError, join_requests, ready
from benchmarks.floor_server import Floor

Handler = Callable[[Any, Any], Awaitable[None]]


@asynccontextmanager
async def _serving(handler: Handler) -> AsyncIterator[str]:
    server = grpc.aio.server()
    join: Any = grpc.stream_stream_rpc_method_handler(handler)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("rallypoint.rendezvous.v1.RendezvousService", {"Join": join}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def _swarm(handler: Handler, nodes: int) -> AsyncIterator[Swarm]:
    async with _serving(handler) as endpoint:
        await ready(endpoint)
        async with Swarm(endpoint, join_requests(range(nodes), places=nodes)) as swarm:
            swarm.start()
            yield swarm


async def test_every_node_is_notified_and_confirms() -> None:
    """The last node ends a storm, and the confirmations of the nodes lead to FINAL."""
    async with _swarm(Floor(0).same_messages, 5) as swarm:
        final = await swarm.reached(FINAL, 10)
        assert final.count == swarm.told[FROZEN].count == 5
        assert swarm.told[FROZEN].first <= swarm.told[FROZEN].last <= final.last
        swarm.check_whole()


async def test_each_node_has_a_connection_of_its_own() -> None:
    """Nodes are hosts: streams over a shared connection would cost the server far less."""
    peers = set()

    async def note_peer(_: Any, context: Any) -> None:
        peers.add(context.peer())
        await Floor(0).same_messages(None, context)

    async with _swarm(note_peer, 5) as swarm:
        await swarm.reached(FINAL, 10)
    assert len(peers) == 5


async def test_streams_that_end_are_counted_by_reason_and_not_by_node() -> None:
    """A lost stream is a failure, even if the other nodes have good figures; equal losses are counted together."""
    count = 0

    async def end_some(_: Any, context: Any) -> None:
        nonlocal count
        count += 1
        if count <= 3:
            number = count
            # A status that arrives during the client's first write is lost: gRPC then reports a message of its own.
            await context.read()
            await context.abort(
                grpc.StatusCode.UNAVAILABLE, f"incident a1b2c3d{number}: node-{number} is unlucky"
            )
        await Floor(0).same_messages(None, context)

    async with _swarm(end_some, 5) as swarm:
        with pytest.raises(
            SwarmError, match=r"[0-2] of 5 nodes were told PHASE_FINAL of round 1; streams lost: "
        ):
            await swarm.reached(FINAL, 10)
        assert swarm.lost == {"UNAVAILABLE incident …: … is unlucky": 3}
        with pytest.raises(SwarmError, match="unlucky"):
            swarm.check_whole()


async def test_the_wait_for_an_update_has_a_time_limit() -> None:
    """A server that sends no update causes a failure, not an endless benchmark."""
    async with _swarm(Floor(0).read_on, 2) as swarm:
        with pytest.raises(SwarmError, match=r"0 of 2 nodes were told PHASE_FROZEN of round 1 within 0.1 s"):
            await swarm.reached(FROZEN, 0.1)
