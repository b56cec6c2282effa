"""SIGTERM under load: every stream ends with an error to retry, and no workers stop."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from torture.crowd import crowd
from torture.durable_run import read_durable_run
from torture.length import ordinarily
from torture.mortal_server import PATIENCE, MortalServer, serving
from torture.stalled_subscriber import EventWatcher, RunWatcher, Spare, our_channel
from torture.tormented_node import RUN
from torture.writers import Writers

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(5 * PATIENCE)]

NODES = 200
RESTARTS = ordinarily(2, in_full=10)
SETTINGS = pb.RunSettings(min_nodes=NODES, max_nodes=NODES, keep_alive_interval=Duration(seconds=2))


async def test_a_restart_in_good_order_is_no_event(tmp_path: Path) -> None:
    """The server stops and restarts, again and again: the same round, the same leases, each write in effect once."""
    server = MortalServer(tmp_path)
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(serving(server))
        nodes = await stack.enter_async_context(crowd(server.endpoint, SETTINGS, NODES, random.Random(1)))
        round_ = await nodes.agree(PATIENCE)
        operator = pb_grpc.RendezvousServiceStub(channel)
        watchers = [kind(our_channel(server.endpoint), SETTINGS, "") for kind in (RunWatcher, EventWatcher)]
        spare = Spare(our_channel(server.endpoint), SETTINGS, "spare")
        for each in (*watchers, spare):
            stack.push_async_callback(each.close)
            await each.subscribe()
        revision = (await operator.GetRun(pb.GetRunRequest(run_id=RUN))).run.revision
        writers = Writers(server.endpoint, channel, nodes.nodes[:8], 2)
        writers.start()
        try:
            for restart in range(1, RESTARTS + 1):
                farewells = [asyncio.create_task(each.farewell()) for each in (*watchers, spare)]
                assert await asyncio.to_thread(server.terminate) == 0, "it ended in good order"
                assert "grace is over" not in server.log(), "every stream ended by itself"
                assert set(await asyncio.gather(*farewells)) == {"DRAINING"}, "every stream is told"
                watchers.clear()
                await asyncio.to_thread(server.start)
                await spare.subscribe()
                await nodes.until(
                    "every node to resume",
                    lambda restart=restart: all(node.resumptions >= restart for node in nodes.nodes),  # type: ignore[misc]
                    PATIENCE,
                )
                await writers.go_on(round_, PATIENCE)
            await writers.stop()
        finally:
            await writers.abandon()
        await writers.check()
        assert writers.refused == {}, "no writer was taken for one of another round"
        run = (await operator.GetRun(pb.GetRunRequest(run_id=RUN))).run
        assert (run.phase, run.round, run.revision) == (pb.PHASE_FINAL, round_, revision), "nothing happened"
        assert all(node.connected for node in run.nodes)
        assert await asyncio.to_thread(server.terminate) == 0
    for node in nodes.nodes:
        assert (len(node.admissions), node.losses) == (1, [])
        places = [update.assignment.round for _, update in node.told if update.phase == pb.PHASE_FINAL]
        assert set(places) == {round_}
        phases = [update.phase for _, update in node.told]
        assert pb.PHASE_JOINABLE not in phases[phases.index(pb.PHASE_FINAL) :], "no worker was to stop"
    chronicle = await read_durable_run(server)
    assert chronicle.counts()["NodeJoined"] == NODES + 1  # the spare
    assert server.complaints() == []
    print(  # noqa: T201
        f"{RESTARTS} restarts under {NODES} nodes and writers: acknowledged writes {dict(writers.acknowledged)}"
    )
