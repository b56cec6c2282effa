"""One node of many is lost with its process: all others receive the loss and its reason, and go on without it."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cli.cli_process import clean_environment
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import to_duration
from support.marks import slow
from support.mortal import mortal
from torture import lone_node
from torture.crowd import Crowd, crowd
from torture.durable_run import check_one_membership_a_round, read_durable_run
from torture.length import ordinarily
from torture.mortal_server import PATIENCE, MortalServer, serving
from torture.tormented_node import Told, TormentedNode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(5 * PATIENCE)]

NODES = ordinarily(256, in_full=1024)
GRACE = 2.0  # seconds
LOST_ID = "victim"
TESTS = Path(lone_node.__file__).parents[1]
# Rare heartbeats, so that a thousand nodes don't overload a small machine.
SETTINGS = pb.RunSettings(
    min_nodes=NODES - 1,
    max_nodes=NODES,
    last_call_timeout=to_duration(5.0),
    disconnect_grace=to_duration(GRACE),
    keep_alive_interval=to_duration(20.0),
)


class Lookout:
    """Checks the updates that each node receives after a round."""

    def __init__(self, nodes: Crowd, round_: int) -> None:
        """Begin with the updates after this one."""
        self._round = round_
        self._nodes = nodes
        self._seen = {node.name: len(node.told) for node in nodes.nodes}

    def after(self, node: TormentedNode) -> list[Told]:
        """Return the updates that a node received since."""
        return node.told[self._seen[node.name] :]

    def all_notified(self) -> bool:
        """Return True if each received the end of the round."""
        return all(
            any(update.last_round_end.round == self._round for _, update in self.after(node))
            for node in self._nodes.nodes
        )

    def all_assigned(self) -> bool:
        """Return True if each received its place in the next round."""
        return all(
            any(update.assignment.round > self._round for _, update in self.after(node))
            for node in self._nodes.nodes
        )


@asynccontextmanager
async def victim(endpoint: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a process that holds one node of the run; kill it afterwards."""
    process = await asyncio.create_subprocess_exec(
        *mortal(sys.executable, lone_node.__file__, endpoint, LOST_ID),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=clean_environment(PYTHONPATH=str(TESTS)),
    )
    try:
        assert process.stdin is not None
        process.stdin.write(SETTINGS.SerializeToString())
        process.stdin.close()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("spares", [slow(0, id="no spare"), pytest.param(1, id="a spare")])
async def test_every_survivor_receives_the_name_of_the_lost_node(tmp_path: Path, spares: int) -> None:
    """With a spare the next round forms at once, as large as before; without one, after the last call."""
    server = MortalServer(tmp_path)
    async with serving(server) as _, victim(server.endpoint) as process:
        assert process.stdout is not None
        async with crowd(server.endpoint, SETTINGS, NODES - 1, random.Random(1)) as nodes:
            async with asyncio.timeout(PATIENCE):
                assert await process.stdout.readline() == b"placed\n"
            round_ = await nodes.agree(PATIENCE)
            rest = TormentedNode("spare", server.endpoint, SETTINGS, random.Random(2), nodes.changed.set)
            if spares:
                rest.join()
                nodes.nodes.append(rest)
                await nodes.until("the spare to be in", lambda: bool(rest.told), PATIENCE)
                assert rest.place is None
            lookout = Lookout(nodes, round_)
            os.kill(process.pid, 9)
            killed = time.perf_counter()
            await nodes.until("the loss to be told", lookout.all_notified, PATIENCE)
            told = time.perf_counter() - killed
            await nodes.until("places in the next round", lookout.all_assigned, PATIENCE)
            assigned = time.perf_counter() - killed
            await nodes.agree(PATIENCE, after=round_)
            news = {node.name: lookout.after(node) for node in nodes.nodes}
            everything = [(node.name, each) for node in nodes.nodes for each in node.told]
        assert await asyncio.to_thread(server.terminate) == 0
    print(  # noqa: T201
        f"{NODES} nodes, one killed, {spares} to spare: last survivor told {(told - GRACE) * 1e3:.0f} ms past the "
        f"grace of {GRACE:g} s; last one knew its new place {(assigned - GRACE) * 1e3:.0f} ms past it"
    )
    assert told >= GRACE - 0.1, "a node whose connection broke has the grace to come back"
    for name, updates in news.items():
        end = updates[0].update.last_round_end
        assert (end.round, end.cause, end.node_id) == (round_, pb.ROUND_END_CAUSE_NODE_LOST, LOST_ID), name
        assert (
            end.detail == f"node {LOST_ID} was lost: its connection broke and it did not come back within 2 s"
        )
        places = [update.assignment for _, update in updates if update.HasField("assignment")]
        assert {place.round for place in places} == {round_ + 1}, "it took one round to go on"
        assert places[0].group_world_size == NODES - 1 + spares
        if spares:
            assert updates[0].update.phase == pb.PHASE_FROZEN, "there is nobody to wait for"
    check_one_membership_a_round(everything)
    chronicle = await read_durable_run(server)
    for name, each in everything:
        chronicle.check_told(name, [each])
    assert server.complaints() == []
