"""Supervise streams as an agent uses them, one event at a time."""

from __future__ import annotations

from typing import Any

import grpc

from rallypoint.rpc.durations import to_duration
from rallypoint.timer.v1 import timer_service_pb2 as pb

from .conftest import Service


def act(**action: Any) -> pb.SuperviseAction:
    return pb.SuperviseAction(**action)


def subscribe(node_id: str = "a", lease: int = 0, stall_after: float | None = None) -> pb.SuperviseAction:
    stall = to_duration(stall_after) if stall_after is not None else None
    return act(subscribe=pb.Subscribe(run_id="run", node_id=node_id, lease=lease, stall_after=stall))


def acquire(
    scope: str, after: float, sequence: int, elapsed: float = 0.0, learned_as: str = ""
) -> pb.SuperviseAction:
    return act(
        acquire=pb.Acquire(
            worker_id="0@1",
            scope=scope,
            after=to_duration(after),
            elapsed=to_duration(elapsed),
            sequence=sequence,
            learned_as=learned_as,
        )
    )


class Stream:
    """One Supervise call, one event at a time."""

    def __init__(self, service: Service) -> None:
        self.call = service.stub().Supervise()
        self.waiting: list[pb.SuperviseEvent] = []

    async def send(self, *actions: pb.SuperviseAction) -> None:
        await self.call.write(pb.SuperviseRequest(actions=actions))

    async def next(self) -> Any:
        while not self.waiting:
            response = await self.call.read()
            if response is grpc.aio.EOF:
                return None
            assert isinstance(response, pb.SuperviseResponse)
            self.waiting.extend(response.events)
        event = self.waiting.pop(0)
        kind = event.WhichOneof("event")
        assert kind is not None
        return getattr(event, kind)

    async def rest(self) -> None:
        """Read on to the end of the stream."""
        while await self.next() is not None:
            pass
