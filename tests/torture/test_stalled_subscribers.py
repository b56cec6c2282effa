"""Subscribers stop reading while their run changes all the time: it costs little, and delays no node."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.durations import to_duration
from torture.crowd import Crowd, crowd
from torture.length import FULL_LENGTH, ordinarily
from torture.mortal_server import PATIENCE, MortalServer, serving
from torture.stalled_subscriber import CHANNELS, KINDS, Subscriber
from torture.stopped_follower import following
from torture.tormented_node import RUN

pytestmark = [pytest.mark.slow, pytest.mark.integration]

STALL = ordinarily(10.0, in_full=60.0)  # seconds in which nothing is read
NODES = 48  # of the round
OF_EACH = 4  # subscribers of each kind, over each kind of channel
ROUND_EVERY = 0.125  # seconds
# One subscriber may cost 1 MiB. This is the mean of some that receive much and of others that receive little.
MOST_BYTES = 256 * 1024
SETTINGS = pb.RunSettings(min_nodes=NODES, max_nodes=NODES, last_call_timeout=to_duration(0.1))
# Sent with every round's end, so that an unread stream soon fills its buffers.
REASON = "because " * 100


@dataclass(slots=True)
class Scene:
    """A server with a run that an operator restarts over and over; `latencies`: seconds of each restart."""

    server: MortalServer
    nodes: Crowd
    operator: pb_grpc.RendezvousServiceAsyncStub
    latencies: list[float] = field(default_factory=list)

    async def restart(self) -> None:
        """End the round, and wait until every node has received that the next is FINAL."""
        began, round_ = time.perf_counter(), self.nodes.common_round()
        await self.operator.RestartRun(pb.RestartRunRequest(run_id=RUN, reason=REASON))
        await self.nodes.agree(PATIENCE, after=round_)
        self.latencies.append(time.perf_counter() - began)
        for node in self.nodes.nodes:
            node.told.clear()

    async def revision(self) -> int:
        """Return the run's present revision."""
        return (await self.operator.GetRun(pb.GetRunRequest(run_id=RUN))).run.revision

    def memory(self) -> int:
        """Return the resident bytes of the server, and the unread bytes that the kernel holds for it."""
        port = int(self.server.endpoint.rpartition(":")[2])
        return int(psutil.Process(self.server.pid).memory_info().rss) + sum(_unsent(port))


def _unsent(port: int) -> Sequence[int]:
    """Return the bytes in the send queue of each connection to a port."""
    queues = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            columns = line.split()
            if int(columns[1].rpartition(":")[2], 16) == port:
                queues.append(int(columns[4].partition(":")[0], 16))
    return queues


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Scene]:
    """Start a server, and form a round of all nodes."""
    server = MortalServer(folder)
    async with serving(server) as channel, crowd(server.endpoint, SETTINGS, NODES, random.Random(1)) as nodes:
        await nodes.agree(PATIENCE)
        yield Scene(server, nodes, pb_grpc.RendezvousServiceStub(channel))
    assert server.complaints() == []


async def load(scenes: Sequence[Scene], duration: float) -> None:
    """Restart the runs of all scenes in step, for `duration` seconds."""
    end = time.monotonic() + duration
    while time.monotonic() < end:
        await asyncio.gather(asyncio.sleep(ROUND_EVERY), *(each.restart() for each in scenes))


@pytest.mark.timeout(2 * STALL + 3 * PATIENCE)
async def test_subscribers_that_stop_reading_cost_little_and_delay_no_node(tmp_path: Path) -> None:
    """They cost the server a handful of messages each over any time, and catch up when they read again."""
    async with AsyncExitStack() as stack:
        # At the same time, so that other load of the machine affects both.
        quiet = await stack.enter_async_context(scene(tmp_path / "quiet"))
        tried = await stack.enter_async_context(scene(tmp_path / "tried"))
        await load([quiet, tried], duration=2.0)
        before = tried.memory() - quiet.memory()
        stalled: list[Subscriber] = []
        for open_one in CHANNELS:
            for number in range(OF_EACH):
                for kind in KINDS:
                    name = f"spare-{open_one.__name__}-{number}"
                    stalled.append(kind(open_one(tried.server.endpoint), SETTINGS, name))
                    stack.push_async_callback(stalled[-1].close)
        await asyncio.gather(*(subscriber.subscribe() for subscriber in stalled))
        follower = stack.enter_context(following(tried.server.endpoint, tmp_path))
        await asyncio.to_thread(follower.reach, await tried.revision())
        follower.stop()
        for each in (quiet, tried):
            each.latencies.clear()
        await load([quiet, tried], STALL)
        cost = (tried.memory() - quiet.memory() - before) / (len(stalled) + 1)
        seen = min(subscriber.revision for subscriber in stalled)
        present = await tried.revision()
        follower.go_on()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(subscriber.catch_up(present) for subscriber in stalled))
        await asyncio.to_thread(follower.reach, present)
        revisions = follower.revisions()
        assert revisions == list(range(revisions[0], revisions[-1] + 1)), "it has every event, each once"
        rounds = len(tried.latencies)
        without, with_ = statistics.median(quiet.latencies), statistics.median(tried.latencies)
        ends = Counter((type(each).__name__, *each.ends) for each in stalled)
        print(  # noqa: T201
            f"{len(stalled)} subscribers, and a stopped process, read nothing for {STALL:g} s, {rounds} rounds, "
            f"revisions {seen} to {present}: "
            f"{cost / 1024:.0f} KiB each; a round took {with_ * 1e3:.1f} ms with them, {without * 1e3:.1f} ms without "
            f"(medians; slowest {max(tried.latencies) * 1e3:.0f} and {max(quiet.latencies) * 1e3:.0f} ms); "
            f"streams were ended: {dict(ends)}"
        )
        assert cost < MOST_BYTES
        if FULL_LENGTH:
            assert with_ < 2 * without + 0.05
