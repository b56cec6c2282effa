"""Client process of `watchdog`: agents with many timers; some expire while others are acquired and released."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import deque
from dataclasses import dataclass

from benchmarks.clients.command import carry_out
from benchmarks.clients.swarm import RUN_ID, ServerCost, SwarmError, idle, ready
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import Plaintext
from rallypoint.timer.client.client import ExpiredTimer, NodeTimers
from rallypoint.timer.v1 import timer_service_pb2 as pb
from rallypoint.timer.v1 import timer_service_pb2_grpc as pb_grpc

_LASTING = 600.0  # seconds of a timer that does not expire here
# Timers that do expire stay this many seconds away from the start and the end of the measurement.
_EARLIEST = 0.5


@dataclass(frozen=True, slots=True)
class WatchdogOrder:
    """A request to the client process.

    Attributes:
        endpoint: address of the server.
        server: its process id.
        agents: number of agents, each with its own connection and stream.
        workers: number of workers of each agent.
        timers: number of timers that each worker holds all the time.
        pairs: acquires and releases per second, of all agents.
        expiries: number of timers that expire, of all agents.
        look: seconds between two scans of an agent over its workers' tables.
        seconds: duration of the measurement.
        count: True to count the service's timers afterwards; a bare server has none.
        timeout: seconds until it counts as failed.
    """

    endpoint: str
    server: int
    agents: int
    workers: int
    timers: int
    pairs: float
    expiries: int
    look: float
    seconds: float
    count: bool
    timeout: float


@dataclass(frozen=True, slots=True)
class WatchdogResult:
    """Seconds from the deadline until the agent is notified, and the server's CPU.

    Attributes:
        p50: median of the seconds.
        p99: 99th percentile of the seconds.
        latest: maximum of the seconds.
        share: CPU time of the server, as a share of a core.
        pairs: measured pairs per second.
    """

    p50: float
    p99: float
    latest: float
    share: float
    pairs: float


class _Agent:
    """An agent's client, with the timers that its workers would have."""

    def __init__(self, order: WatchdogOrder, number: int) -> None:
        self.told = asyncio.Event()
        self._order = order
        self._number = number
        self._held: deque[tuple[str, str]] = deque()
        self._due: dict[tuple[str, str], float] = {}
        self.late: list[float] = []
        self.pairs = 0
        self._client = NodeTimers(
            open_channel(order.endpoint, Plaintext()), run_id=RUN_ID, node_id=f"node-{number}", lease=1
        )

    def start(self) -> None:
        """Acquire the timers that do not expire."""
        self._client.start(self._expired)
        for worker in range(self._order.workers):
            for place in range(self._order.timers):
                name = (f"{worker}@1", f"/workspace/train.py#{place}")
                self._client.acquire(*name, _LASTING)
                self._held.append(name)

    def _let_run_out(self) -> None:
        """Start this agent's share of the timers that are never released."""
        order, now = self._order, time.monotonic()
        draw = random.Random(self._number)
        for number in range(len(range(self._number, order.expiries, order.agents))):
            after = draw.uniform(_EARLIEST, order.seconds - _EARLIEST)
            name = (f"{number % order.workers}@1", f"hang-{number}")
            self._due[name] = now + after
            self._client.acquire(*name, after, now)
        if not self._due:
            self.told.set()

    async def work(self, until: float) -> None:
        """Until then, release and acquire some timers at each scan; the first also starts those that expire."""
        order = self._order
        began = time.monotonic() + order.look * self._number / order.agents
        looks = 0
        while (due := began + looks * order.look) < until:
            await asyncio.sleep(due - time.monotonic())
            if not looks:
                self._let_run_out()
            looks += 1
            # Agents round up at different scans, so that their requests spread evenly.
            share = order.pairs / order.agents * order.look
            wanted = int(looks * share + self._number / order.agents)
            for _ in range(wanted - self.pairs):
                name = self._held.popleft()
                self._client.release(*name)
                self._client.acquire(name[0], f"{name[1]}'", _LASTING)
                self._held.append((name[0], f"{name[1]}'"))
                self.pairs += 1

    async def _expired(self, expired: ExpiredTimer) -> None:
        now = time.monotonic()
        self.late.append(now - self._due.pop((expired.worker_id, expired.scope)))
        if not self._due:
            self.told.set()


async def watchdog(order: WatchdogOrder) -> WatchdogResult:
    """Carry out the order.

    Raises:
        SwarmError: Timers did not expire, or the service does not have all of them.
    """
    await ready(order.endpoint)
    agents = [_Agent(order, number) for number in range(order.agents)]
    for agent in agents:
        agent.start()
        await asyncio.sleep(0)
    await idle(order.server)
    before, began = ServerCost.of(order.server), time.monotonic()
    await asyncio.gather(*(agent.work(began + order.seconds) for agent in agents))
    after, took = ServerCost.of(order.server), time.monotonic() - began
    try:
        async with asyncio.timeout(order.timeout):
            await asyncio.gather(*(agent.told.wait() for agent in agents))
    except TimeoutError:
        told = sum(len(agent.late) for agent in agents)
        raise SwarmError(f"of {order.expiries} timers that ran out, {told} were told") from None
    if order.count:
        await _check_all_are_held(order)
    late = sorted(each for agent in agents for each in agent.late)
    return WatchdogResult(
        p50=statistics.median(late),
        p99=late[int(len(late) * 0.99)],
        latest=late[-1],
        share=(after.cpu - before.cpu) / took,
        pairs=sum(agent.pairs for agent in agents) / took,
    )


async def _check_all_are_held(order: WatchdogOrder) -> None:
    """Check that the service has the expected number of timers."""
    expected = order.agents * order.workers * order.timers
    await idle(order.server)
    async with open_channel(order.endpoint, Plaintext()) as channel:
        stub = pb_grpc.TimerServiceStub(channel)
        found = 0
        for number in range(order.agents):
            request = pb.ListTimersRequest(run_id=RUN_ID, node_id=f"node-{number}")
            while True:
                page = await stub.ListTimers(request)
                found += len(page.timers)
                if not page.next_page_token:
                    break
                request.page_token = page.next_page_token
    if found != expected:
        raise SwarmError(f"the service has {found} timers; {expected} are held")


if __name__ == "__main__":
    carry_out(WatchdogOrder, watchdog)
