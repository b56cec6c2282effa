"""A job on the same server that is not part of the attack: it must not notice the attack."""

from __future__ import annotations

import asyncio
from functools import partial

from google.protobuf.duration_pb2 import Duration

from rallypoint.rendezvous.client import Event, Membership, MembershipReset, MembershipUpdate
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import Plaintext
from support.waiting import PATIENCE

_NODES = ("left", "right")


class Bystander:
    """A job of two nodes that act as agents do, each on its own connection."""

    def __init__(self, address: str, run_id: str) -> None:
        self.run_id = run_id
        self.lost: list[str] = []
        """The errors with which the nodes lost their leases."""
        self._address = address
        self._channels = [open_channel(address, Plaintext()) for _ in _NODES]
        self.stub = pb_grpc.RendezvousServiceStub(self._channels[0])
        self._started: dict[str, int] = {}
        self._rounds: asyncio.Queue[int] = asyncio.Queue()
        self._members: dict[str, Membership] = {}
        self._running: list[asyncio.Task[None]] = []

    async def begin(self) -> int:
        """Join with both nodes; return the round that they form."""
        for node_id, channel in zip(_NODES, self._channels, strict=True):
            # A busy machine may need a while to reconnect.
            settings = pb.RunSettings(min_nodes=2, max_nodes=2, disconnect_grace=Duration(seconds=15))
            join = pb.JoinRun(
                run_id=self.run_id, node_id=node_id, settings=settings, address=node_id, role="w"
            )
            join.local_world_size = 1
            member = Membership(channel, self._address, join, partial(self._obey, node_id))
            self._members[node_id] = member
            self._running.append(asyncio.create_task(member.run()))
        return await self.formed()

    async def formed(self) -> int:
        """Wait until both nodes start their workers in one round; return it.

        Raises:
            TimeoutError: They don't.
        """
        async with asyncio.timeout(PATIENCE):
            numbers = {await self._rounds.get() for _ in _NODES}
        assert len(numbers) == 1, numbers
        return numbers.pop()

    def check(self) -> None:
        """Raise the error that ended a node, if one ended; fail if a round was formed without a request."""
        for node in self._running:
            if node.done():
                node.result()
        assert not any(node.done() for node in self._running), f"a node of {self.run_id} was sent away"
        assert self.lost == []
        assert self._rounds.empty(), f"{self.run_id} had to form round {self._rounds.get_nowait()}"

    async def close(self) -> None:
        """Cancel the nodes without a message."""
        for node in self._running:
            node.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for channel in self._channels[1:]:
            await channel.close()

    async def hang_up(self) -> None:
        """Close the connection of `stub`, too."""
        await self._channels[0].close()

    def _obey(self, node_id: str, event: Event) -> None:
        if isinstance(event, MembershipReset):
            self.lost.append(f"{node_id}: {event.reason}")
        if not isinstance(event, MembershipUpdate) or not event.update.HasField("assignment"):
            return
        round_ = event.update.assignment.round
        if event.update.phase == pb.PHASE_FROZEN:
            self._members[node_id].confirm(round_, 29_500)
        elif event.update.phase == pb.PHASE_FINAL and self._started.get(node_id) != round_:
            self._started[node_id] = round_
            self._rounds.put_nowait(round_)
