"""Health of real servers: a service that can't work is NOT_SERVING, while the others of its process serve."""

from __future__ import annotations

import signal
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from cli.test_serve_replicas import Process
from integration.daemons import cluster, users_channel
from support.etcd_server import NEEDS_ETCD, etcd_cluster
from support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.integration

RENDEZVOUS = {f"rallypoint.rendezvous.v1.{name}Service" for name in ("Rendezvous", "Store", "State")}
SUPERVISOR = "rallypoint.agent.v1.SupervisorService"
SERVER = "rallypoint.server.v1.ServerService"


def serving(channel: grpc.Channel) -> set[str]:
    """Return the services that are SERVING; "" is the server as a whole."""
    listed = health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest(), timeout=PATIENCE)
    return {
        name
        for name, each in listed.statuses.items()
        if each.status == health_pb2.HealthCheckResponse.SERVING
    }


def test_a_daemon_that_leaves_takes_no_jobs_and_serves_its_runs(tmp_path: Path) -> None:
    with cluster(tmp_path, 1) as made:
        (host,) = made.hosts
        with users_channel(host.address) as channel:
            assert serving(channel) == {"", SERVER, SUPERVISOR, *RENDEZVOUS}
            made.submit("ignore", flags=("--shutdown-timeout", "1800"))
            made.up(0)
            host.program.process.send_signal(signal.SIGTERM)
            wait_until(lambda: serving(channel) == {SERVER, *RENDEZVOUS}, "the daemon to leave")


@NEEDS_ETCD
def test_a_replica_that_cannot_reach_etcd_serves_nothing_until_it_can(tmp_path: Path) -> None:
    with etcd_cluster(tmp_path / "etcd") as etcd:
        replica = Process(tmp_path / "log", f"{etcd.url}/health", "--lease-ttl", "2")
        try:
            wait_until(lambda: replica.has_logged("ready"), "the server")
            with users_channel(replica.address) as channel:
                wait_until(lambda: serving(channel) == {"", SERVER, *RENDEZVOUS}, "a session with etcd")
                etcd.members[0].kill()
                wait_until(lambda: serving(channel) == {SERVER}, "the end of its lease")
                etcd.members[0].start()
                wait_until(lambda: serving(channel) == {"", SERVER, *RENDEZVOUS}, "a new session")
        finally:
            replica.process.kill()
            replica.process.wait()
