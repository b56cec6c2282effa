"""A timer service that can be paused, killed and started again, and agents that let timers expire."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import grpc

from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import Plaintext
from rallypoint.timer.client.client import ExpiredTimer, NodeTimers
from rallypoint.timer.v1 import timer_service_pb2 as pb
from rallypoint.timer.v1 import timer_service_pb2_grpc as pb_grpc
from torture.mortal_server import PATIENCE, MortalServer

RUN = "run-1"
_LOOK = 0.02  # seconds between two requests


class MortalWatchdog(MortalServer):
    """One timer service over all its processes, at one port. Its methods block."""

    def __init__(self, folder: Path, *more: str, learned: Path | None = None) -> None:
        """Start nothing yet.

        Args:
            folder: For logs; made if it is missing.
            more: Arguments of the command.
            learned: The file for learned data; None: there is none.
        """
        super().__init__(folder)
        self._more = (*more, "--learned", str(learned or "none"))

    def accused(self) -> list[str]:
        """Return the scopes of expired timers, from the log of the present process."""
        records = (json.loads(line) for line in self.log().splitlines() if line.startswith("{"))
        return [record["scope"] for record in records if record["event"] == "timer expired"]

    @property
    def _arguments(self) -> tuple[str, ...]:
        listening = ("--insecure", "--port", str(self._address[1]), "--log-format", "json")
        return ("serve", "timer", *listening, *self._more)


class GuardedNode:
    """An agent's client that records expiries and kills no worker.

    Attributes:
        client: To acquire and release timers with.
        reaped: Scopes whose workers it had to kill, with the time in seconds of CLOCK_MONOTONIC.
    """

    def __init__(self, name: str, endpoint: str, reaping: float = 0.0) -> None:
        """Connect to the service. `reaping`: seconds that it takes to kill a worker."""
        self.reaped: list[tuple[str, float]] = []
        self._reaping = reaping
        self._channel = open_channel(endpoint, Plaintext())
        self.client = NodeTimers(self._channel, run_id=RUN, node_id=name, lease=1)
        self.client.start(self._reap)

    async def _reap(self, expired: ExpiredTimer) -> None:
        self.reaped.append((expired.scope, time.monotonic()))
        await asyncio.sleep(self._reaping)

    async def close(self) -> None:
        """Close the client and its channel."""
        await self.client.close(grace=0)
        await self._channel.close()


async def listed(channel: grpc.aio.Channel) -> list[pb.Timer]:
    """Return all timers of the service: a thousand at most, which fit into one response."""
    request = pb.ListTimersRequest(run_id=RUN)
    answer = await pb_grpc.TimerServiceStub(channel).ListTimers(
        request, wait_for_ready=True, timeout=PATIENCE
    )
    return list(answer.timers)


async def until_listed(channel: grpc.aio.Channel, count: int) -> None:
    """Wait until the service has `count` timers."""
    deadline = time.monotonic() + PATIENCE
    while (found := len(await listed(channel))) != count:
        assert time.monotonic() < deadline, f"the service has {found} timers, not {count}"
        await asyncio.sleep(_LOOK)
