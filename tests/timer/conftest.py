"""A timer service on a real socket, and fixtures for its tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc
import pytest

from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.serving.server import Server
from rallypoint.timer.core.values import TimerSettings
from rallypoint.timer.server.service import registration_of, translate
from rallypoint.timer.server.watchdog import Watchdog
from rallypoint.timer.v1 import timer_service_pb2_grpc as pb_grpc
from support.clock import Clock
from support.timer_agent import Agent


class Service:
    """A timer service that can be stopped and started again at its address."""

    def __init__(self, path: Path) -> None:
        self.options = ServerOptions(host=f"unix:{path}")
        self.address = self.options.host
        self.watchdog: Watchdog
        self.server: Server
        self.channels: list[grpc.aio.Channel] = []

    async def start(
        self, settings: TimerSettings | None = None, clock: Callable[[], float] | None = None
    ) -> None:
        self.watchdog = Watchdog(settings, clock) if clock else Watchdog(settings)
        self.server = Server(self.options, services=[registration_of(self.watchdog)], translate=translate)
        await self.server.start()

    def channel(self) -> grpc.aio.Channel:
        self.channels.append(open_channel(self.address))
        return self.channels[-1]

    def stub(self) -> pb_grpc.TimerServiceAsyncStub:
        return pb_grpc.TimerServiceStub(self.channel())

    async def close(self) -> None:
        for channel in self.channels:
            await channel.close()
        await self.server.stop()


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    service = Service(tmp_path / "timer")
    await service.start()
    yield service
    await service.close()


@pytest.fixture
async def quick(service: Service) -> Service:
    """A service that soon reports expiries again."""
    await service.server.stop()
    await service.start(TimerSettings(reoffer_interval=0.05, max_timers_per_node=3))
    return service


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    """An agent that listens at the path `s`."""
    agent = Agent(tmp_path / "s")
    yield agent
    agent.close()
