"""The server is SIGKILLed again and again under nodes that come and go, and writers: all its messages stay true."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.durations import to_duration
from torture.crowd import Crowd, calm, crowd
from torture.durable_run import check_one_membership_a_round, last_revision, read_durable_run
from torture.length import ordinarily
from torture.mortal_server import PATIENCE, MortalServer, QuickServer, serving
from torture.tormented_node import RUN, TormentedNode
from torture.writers import Writers

pytestmark = [pytest.mark.slow, pytest.mark.integration]

DURATION = ordinarily(10.0, in_full=60.0)  # seconds of killing
NODES = 200
SERVED = 0.2  # seconds that a server serves before it is killed
WAVE = 12  # nodes that are disturbed at the same time
CALM = ordinarily(4.0, in_full=20.0)  # seconds at most between two such disturbances
WORKING_NODES = 8  # whose workers write
WRITERS = 3  # of each kind
SETTINGS = pb.RunSettings(
    min_nodes=NODES // 2,
    max_nodes=NODES,
    max_restarts=100_000,
    restart_backoff=to_duration(0),
    # Both shorter than a server lives, since each start begins them again. So rounds form during the storm, and nodes
    # that die are also lost, and not only superseded when they come back.
    last_call_timeout=to_duration(0.05),
    disconnect_grace=to_duration(0.05),
)


class Storm:
    """Disturbs the server and the nodes at the same time.

    Attributes:
        restarts: Rounds that were reported to an operator as ended for a restart.
        start_ups: Seconds of each completed start of a server.
    """

    def __init__(
        self, server: MortalServer, nodes: Crowd, channel: grpc.aio.Channel, draw: random.Random
    ) -> None:
        self.restarts: list[int] = []
        self.start_ups: list[float] = []
        self._server = server
        self._nodes = nodes
        self._operator = pb_grpc.RendezvousServiceStub(channel)
        self._draw = draw

    async def rage(self, duration: float) -> None:
        """Disturb them for `duration` seconds; at the end a server serves, and every node has an agent."""
        over = time.monotonic() + duration
        churning = asyncio.create_task(self._churn(over))
        try:
            # On a thread of its own: the nodes keep this one so busy that the kills would come late.
            await asyncio.to_thread(self._kill_and_start, over)
            await churning
        finally:
            churning.cancel()

    def _kill_and_start(self, over: float) -> None:
        while time.monotonic() < over:
            time.sleep(SERVED)
            self._kill()
            if self._draw.random() < 0.2:  # killed while it starts, or reads its journal
                self._server.spawn()
                time.sleep(self._draw.uniform(0.0, 0.05))
                self._kill()
            self.start_ups.append(self._server.start())

    def _kill(self) -> None:
        self._server.kill()
        told = max(node.told[-1].update.revision for node in self._nodes.nodes if node.told)
        assert told <= last_revision(self._server.journal), "what was told is durable when the server is dead"

    async def _churn(self, over: float) -> None:
        while time.monotonic() < over:
            some = self._draw.sample(self._nodes.nodes, WAVE)
            await asyncio.gather(self._restart(), *(self._happen(node) for node in some))
            with suppress(AssertionError):  # a round need not form; if it does, it is checked
                await self._nodes.agree(timeout=self._draw.uniform(0.5, 1.0) * CALM)

    async def _happen(self, node: TormentedNode) -> None:
        what = self._draw.choice((node.leave, node.die, node.break_worker))
        if what == node.break_worker:
            node.break_worker()
            return
        await asyncio.sleep(self._draw.uniform(0.0, 0.5))
        await (node.leave() if what == node.leave else node.die())
        await asyncio.sleep(self._draw.uniform(0.0, 0.5))
        node.join()

    async def calm(self) -> int:
        """Return the round of all nodes that forms after the storm."""
        return await calm(self._nodes.agree, lambda: self._request_restart(PATIENCE), PATIENCE)

    async def _restart(self) -> None:
        if self._draw.random() < 0.3:
            with suppress(grpc.aio.AioRpcError):  # then the outcome is unknown
                await self._request_restart(1.0)

    async def _request_restart(self, timeout: float) -> None:
        request = pb.RestartRunRequest(run_id=RUN, reason="an operator wanted it")
        answer = await self._operator.RestartRun(request, timeout=timeout)
        self.restarts += [answer.ended_round] if answer.ended_round else []


@pytest.mark.timeout(DURATION + 6 * PATIENCE)
async def test_a_server_killed_again_and_again_stays_consistent(tmp_path: Path) -> None:
    """No acknowledged write is lost, all sent facts were durable, and no round has two memberships."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")  # noqa: T201
    draw = random.Random(seed)
    server = QuickServer(tmp_path)
    async with serving(server) as channel:
        async with crowd(server.endpoint, SETTINGS, NODES, draw) as nodes:
            writers = Writers(server.endpoint, channel, draw.sample(nodes.nodes, WORKING_NODES), WRITERS)
            await nodes.agree(PATIENCE)
            writers.start()
            storm = Storm(server, nodes, channel, draw)
            try:
                await storm.rage(DURATION)
                last = await storm.calm()
                await writers.go_on(last, PATIENCE)
                await writers.stop()
            finally:
                await writers.abandon()
            await writers.check()
            operator = pb_grpc.RendezvousServiceStub(channel)
            run = (await operator.GetRun(pb.GetRunRequest(run_id=RUN))).run
            await asyncio.to_thread(server.kill)
        chronicle = await read_durable_run(server)
    assert server.complaints() == []
    assert (run.phase, run.round, run.world_size) == (pb.PHASE_FINAL, last, 2 * NODES)
    check_one_membership_a_round((node.name, told) for node in nodes.nodes for told in node.told)
    for node in nodes.nodes:
        chronicle.check_told(node.name, node.told)
        chronicle.check_admissions(node.name, node.admissions)
        chronicle.check_departures(node.name, node.departures)
        assert not [loss for loss in node.losses if "revision" in loss], "nobody was told what is not durable"
    chronicle.check_restarts(storm.restarts)
    counts = chronicle.counts()
    print(  # noqa: T201
        f"{server.kills} kills, start-up {sorted(storm.start_ups)[len(storm.start_ups) // 2]:.2f} s (median); "
        f"{counts['NodeJoined']} joins, {counts['NodeLeft']} left, {counts['NodeLost']} lost, "
        f"{sum(node.resumptions for node in nodes.nodes)} resumed; "
        f"{counts['RoundFrozen']} rounds formed, {counts['RoundFinalized']} FINAL, {len(storm.restarts)} restarted; "
        f"{len(chronicle.entries)} facts; acknowledged writes {dict(writers.acknowledged)}, fenced off "
        f"{dict(writers.refused)}; longest without a FINAL round {chronicle.longest_without_final():.1f} s"
    )
