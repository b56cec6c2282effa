"""Runs as single replicas report them: every replica answers reads, not only the owner."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from ha.cluster import PATIENCE, Cluster
from ha.waiting import until
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import Plaintext

_ANSWER = 5.0  # seconds for one reply


async def run_at(endpoint: str, run_id: str, timeout: float = _ANSWER) -> pb.Run:
    """Read a run at one replica.

    Raises:
        grpc.aio.AioRpcError: It does not reply, or refuses.
    """
    channel = open_channel(endpoint, Plaintext())
    try:
        stub = pb_grpc.RendezvousServiceStub(channel)
        return (await stub.GetRun(pb.GetRunRequest(run_id=run_id), timeout=timeout, wait_for_ready=True)).run
    finally:
        await channel.close()


async def run_everywhere(cluster: Cluster, run_id: str) -> pb.Run:
    """Wait until every replica reports the same state of a run; return the run.

    Raises:
        AssertionError: They don't agree in time.
    """
    runs: list[pb.Run] = []

    async def look() -> str:
        try:
            names = cluster.replicas.replicas
            runs[:] = await asyncio.gather(
                *(run_at(cluster.replicas.endpoint(name), run_id) for name in names)
            )
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        told = {(run.round, run.revision, run.phase, run.world_size, run.restart_count) for run in runs}
        return f"they tell {told}" if len(told) > 1 else ""

    await until("all replicas to tell the same", look, PATIENCE)
    return runs[0]


async def run_until(cluster: Cluster, run_id: str, what: str, condition: Callable[[pb.Run], bool]) -> pb.Run:
    """Wait until a condition holds for a run, as any replica reports it; return the run."""
    found = pb.Run()

    async def look() -> str:
        silence = "nobody runs"
        for name, replica in cluster.replicas.replicas.items():
            if replica.running and not replica.paused:
                try:
                    found.CopyFrom(await run_at(cluster.replicas.endpoint(name), run_id))
                except grpc.aio.AioRpcError as error:
                    silence = f"{error.code().name}: {error.details()}"
                    continue
                return "" if condition(found) else f"it is in {pb.Phase.Name(found.phase)} {found.round}"
        return silence

    await until(what, look, PATIENCE)
    return found
