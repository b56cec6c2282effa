"""The supervisor of `rallypoint run` is served in plaintext to this host alone, and with TLS to others."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import grpc
import pytest

from rallypoint.agent.spawner.client import Spawner
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.agent.v1 import supervisor_service_pb2_grpc as pb_grpc
from rallypoint.launcher.launch import launch
from rallypoint.launcher.plan import LaunchPlan
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ClientSecurity, ClientTLS, SettingError
from serving.conftest import make_certificates
from support.ports import free_port
from support.waiting import PATIENCE, until

WAIT = ("sh", "-c", "touch $1; exec sleep 600", "worker")


def plan(folder: Path, address: str, security: ClientSecurity) -> LaunchPlan:
    """Return a job whose worker touches a file and stays."""
    return LaunchPlan(
        command=(*WAIT, str(folder / "started")),
        environment={"PATH": "/usr/bin:/bin"},
        run_id="run-1",
        supervisor_address=address,
        security=security,
        signals=(),
        job={"log_dir": folder / "logs", "shutdown_timeout": PATIENCE},
    )


async def test_others_need_a_certificate_of_the_same_authority(tmp_path: Path) -> None:
    """A client with one can read and control; a client without one can't."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command (apt install openssl)")
    files = make_certificates(tmp_path / "tls", "ours")
    port = free_port()
    here = ClientTLS(files.ca, files.server, files.server_key)
    running = asyncio.create_task(launch(plan(tmp_path, f"0.0.0.0:{port}", here), Spawner.start()))
    await until((tmp_path / "started").exists, "the worker")
    for stranger in (None, ClientTLS(files.ca)):
        async with open_channel(f"127.0.0.1:{port}", stranger) as channel:
            stub = pb_grpc.SupervisorServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.GetJob(pb.GetJobRequest(), timeout=PATIENCE)
    async with open_channel(
        f"127.0.0.1:{port}", ClientTLS(files.ca, files.client, files.client_key)
    ) as channel:
        stub = pb_grpc.SupervisorServiceStub(channel)
        assert (await stub.GetJob(pb.GetJobRequest(), timeout=PATIENCE)).job.run_id == "run-1"
        await stub.StopJob(pb.StopJobRequest(now=True), timeout=PATIENCE)
    assert (await asyncio.wait_for(running, PATIENCE)).exit_code == 143


@pytest.mark.parametrize(
    ("security", "complaint"),
    [
        (None, "refusing to serve plaintext"),
        (ClientTLS(Path("ca.pem")), "give --tls-cert and --tls-key beside --tls-ca"),
        (ClientTLS(None, Path("c.pem"), Path("k.pem")), "give --tls-cert and --tls-key beside --tls-ca"),
    ],
)
async def test_an_address_without_authentication_is_refused(
    tmp_path: Path, security: ClientSecurity, complaint: str
) -> None:
    """Any client of the address can kill the job."""
    with pytest.raises(SettingError, match=complaint):
        await launch(plan(tmp_path, "0.0.0.0:0", security), Spawner.start())
