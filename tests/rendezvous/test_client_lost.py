"""A node waits for a lost service without end, or, where it may be gone for good, for `lost_timeout` seconds."""

from __future__ import annotations

import asyncio
import math
from contextlib import AsyncExitStack

import pytest

from rallypoint.launcher.services import rendezvous_server
from rallypoint.rendezvous.client import Admitted, Event, Membership, RendezvousUnreachable
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ServerOptions
from support.joining import join_request
from support.waiting import PATIENCE

JOIN = join_request("r", settings=pb.RunSettings(min_nodes=1, max_nodes=2)).join


class Node:
    """A member, and a service that can be lost and come back at its address."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._stack = stack
        self._service = AsyncExitStack()
        self._port = 0

    async def serve(self) -> None:
        """Start the service, at the address that it had."""
        serving = await self._service.enter_async_context(rendezvous_server(ServerOptions(port=self._port)))
        self._port = int(serving.server.address.rpartition(":")[2])
        self._stack.push_async_callback(self._service.aclose)

    async def lose(self) -> None:
        """Stop the service."""
        await self._service.aclose()

    async def join(self, lost_timeout: float) -> asyncio.Task[None]:
        """Join the run; return once admitted."""
        endpoint = f"127.0.0.1:{self._port}"
        channel = await self._stack.enter_async_context(open_channel(endpoint))
        membership = Membership(channel, endpoint, JOIN, self.events.put_nowait, lost_timeout=lost_timeout)
        task = asyncio.create_task(membership.run())
        self._stack.callback(task.cancel)
        await self.admitted()
        return task

    async def admitted(self) -> None:
        """Wait until the member is admitted."""
        async with asyncio.timeout(PATIENCE):
            while not isinstance(await self.events.get(), Admitted):
                pass


async def test_a_node_gives_up_after_its_lost_timeout() -> None:
    """The error has the address and the cause."""
    async with AsyncExitStack() as stack:
        node = Node(stack)
        await node.serve()
        task = await node.join(lost_timeout=0.3)
        await node.lose()
        told = r"the rendezvous service is gone, none answered at 127.0.0.1:\d+ within 0.3 s: "
        with pytest.raises(RendezvousUnreachable, match=told):
            await asyncio.wait_for(task, PATIENCE)


@pytest.mark.parametrize("lost_timeout", [math.inf, PATIENCE])
async def test_a_service_that_comes_back_in_time_is_joined_again(lost_timeout: float) -> None:
    """The timeout begins again at each loss."""
    async with AsyncExitStack() as stack:
        node = Node(stack)
        await node.serve()
        task = await node.join(lost_timeout)
        for _ in range(2):
            await node.lose()
            await node.serve()
            await node.admitted()
        assert not task.done()


async def test_a_stream_that_lives_longer_than_that_is_no_loss() -> None:
    """The timeout begins when the service is lost."""
    async with AsyncExitStack() as stack:
        node = Node(stack)
        await node.serve()
        task = await node.join(lost_timeout=0.01)
        done, _ = await asyncio.wait({task}, timeout=0.3)
        assert not done
