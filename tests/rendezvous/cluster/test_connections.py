"""Only the owner of a run knows its connections: no other replica reports a node as disconnected."""

from __future__ import annotations

import asyncio

from cli.cli_process import RALLYPOINT
from rallypoint.etcd.endpoint import EtcdAddress
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rendezvous.cluster.served import run_in, served, shared_out
from support.etcd_server import NEEDS_ETCD
from support.mortal import mortal
from support.refusals import refusal
from support.waiting import PATIENCE

pytestmark = NEEDS_ETCD

LONG = 600.0
"""Seconds that the lease of a replica lives: none ends here."""


def _join(run_id: str) -> pb.JoinRequest:
    settings = pb.RunSettings(min_nodes=1, max_nodes=1)
    settings.keep_alive_interval.FromSeconds(300)
    # The node stays in the run after its stream has broken, for as long as a slow machine may need.
    settings.disconnect_grace.FromSeconds(600)
    return pb.JoinRequest(
        join=pb.JoinRun(
            run_id=run_id, node_id="node-1", settings=settings, address="a", local_world_size=1, role="d"
        )
    )


async def _status(run_id: str, endpoint: str) -> str:
    command = mortal(str(RALLYPOINT), "status", run_id, "--rdzv-endpoint", endpoint)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(PATIENCE):
        told, _ = await process.communicate()
    assert process.returncode == 0
    return told.decode()


async def test_the_owner_is_asked_for_the_connections(address: EtcdAddress) -> None:
    """Another replica reports `durable_only` and the owner; `rallypoint status` asks the owner, or reports unknown."""
    async with served(address, "a", ttl=LONG) as a, served(address, "b", ttl=LONG) as b:
        await shared_out(a, b)
        run_id = run_in(min(b.serving))
        stream = b.rendezvous.Join(timeout=2 * PATIENCE)
        await stream.write(_join(run_id))
        first = await stream.read()
        assert isinstance(first, pb.JoinResponse)
        assert first.HasField("lease")
        request = pb.GetRunRequest(run_id=run_id)
        owner_s = await b.rendezvous.GetRun(request, timeout=PATIENCE)
        assert (owner_s.durable_only, owner_s.owner_address, owner_s.run.nodes[0].connected) == (
            False,
            "",
            True,
        )
        others = await a.rendezvous.GetRun(request, timeout=PATIENCE)
        assert (others.durable_only, others.owner_address, others.run.nodes[0].connected) == (
            True,
            b.address,
            False,
        )
        request.owner_only = True
        assert await b.rendezvous.GetRun(request, timeout=PATIENCE) == owner_s
        error = await refusal(a.rendezvous.GetRun(request, timeout=PATIENCE))
        assert (error.reason, error.metadata["owner_address"]) == ("NOT_OWNER", b.address)

        (line,) = [line for line in (await _status(run_id, a.address)).splitlines() if "node-1" in line]
        assert line.split()[-1] == "yes"
        await b.server.stop()  # its lease stays: etcd still names it
        told = (await _status(run_id, a.address)).splitlines()
        (line,) = [line for line in told if "node-1" in line]
        assert line.split()[-1] == "-"
        why = f"the replica at {b.address}, which owns the run, did not reply"
        assert told[-1] == f"connections are unknown: {why}"
