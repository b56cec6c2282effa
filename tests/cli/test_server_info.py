"""Each service process describes itself, with the limits of its flags; `status` shows another version."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from cli.cli_process import rallypoint, service
from house.source import ROOT
from rallypoint.rendezvous.api.errors import translate
from rallypoint.rendezvous.api.service import rendezvous_services
from rallypoint.rendezvous.journal.journal import MemoryJournal
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as rendezvous_pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as rendezvous_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.durations import to_seconds
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.rpc.runtime_folder import new_run_socket
from rallypoint.serving import info
from rallypoint.serving.server import Registration, Server
from support.server_info import info_at
from support.waiting import PATIENCE

pytestmark = pytest.mark.integration

RENDEZVOUS = [f"rallypoint.rendezvous.v1.{name}Service" for name in ("Rendezvous", "Store", "State")]
SERVERS = {"rendezvous": ("--journal", "memory"), "timer": (), "agent": ("--max-jobs", "3")}
SERVICES = {
    "rendezvous": RENDEZVOUS,
    "timer": ["rallypoint.timer.v1.TimerService"],
    "agent": ["rallypoint.agent.v1.SupervisorService", *RENDEZVOUS],
}


def limit_flags(role: str) -> list[str]:
    """Return a role's flags in docs/limits.md: the first table is of the rendezvous service, the second of timers."""
    page = (ROOT / "docs/limits.md").read_text()
    tables = [re.findall(r"^\| (`--.*?) \|", table, re.MULTILINE) for table in page.split("| flag |")[1:3]]
    rows = tables[["rendezvous", "timer"].index(role)]
    return [flag for row in rows for flag in re.findall(r"--[\w-]+", row)]


def values(message: Message) -> Iterator[float]:
    """Yield each number in a message, and each duration in seconds."""
    for field, value in message.ListFields():
        if isinstance(value, Duration):
            yield to_seconds(value)
        elif field.message_type is not None:
            yield from values(value)
        else:
            yield value


@pytest.mark.parametrize("role", SERVERS)
async def test_each_service_describes_itself(role: str) -> None:
    """The description has its services, only their limits, and its capabilities."""
    with service(role, *SERVERS[role]) as endpoint:
        found = await info_at(endpoint)
    assert [*found.services] == [*SERVICES[role], info.SERVICE_NAME]
    assert (found.version, found.protocol_version) == (info.VERSION, info.PROTOCOL_VERSION)
    launch = ["launch-jobs"] if role == "agent" else []
    assert [*found.capabilities] == ["health", *launch, "reflection"]
    limits = {field.name for field, _ in found.limits.ListFields()}
    of_runs = {"rendezvous", "store", "state"}
    expected = {"rendezvous": of_runs, "timer": {"timer"}, "agent": {"supervisor", *of_runs}}[role]
    assert limits == {"calls", *expected}
    assert found.limits.supervisor.jobs == (3 if role == "agent" else 0)


@pytest.mark.parametrize("role", ["rendezvous", "timer"])
async def test_each_limit_of_the_documentation_is_described_as_it_was_set(role: str) -> None:
    """Each flag has a value that no other flag has."""
    flags = {flag: 5_001 + number for number, flag in enumerate(limit_flags(role))}
    assert len(flags) > 6
    given = [str(part) for flag in flags.items() for part in flag]
    with service(role, *SERVERS[role], *given) as endpoint:
        found = set(values((await info_at(endpoint)).limits))
    assert {flag for flag, value in flags.items() if value not in found} == set()


async def test_the_name_of_the_process_is_that_of_the_replica() -> None:
    with service("rendezvous", "--journal", "memory") as endpoint:
        found = await info_at(endpoint)
        async with open_channel(endpoint) as channel:
            stub: rendezvous_grpc.RendezvousServiceAsyncStub = rendezvous_grpc.RendezvousServiceStub(channel)
            listed = await stub.ListReplicas(rendezvous_pb.ListReplicasRequest(), timeout=PATIENCE)
    assert [replica.instance for replica in listed.replicas] == [found.instance]


@asynccontextmanager
async def rendezvous(*, old: bool = False) -> AsyncIterator[str]:
    """A rendezvous service in this process; an old one has no ServerService."""
    async with rendezvous_services(MemoryJournal()) as services:
        with new_run_socket("rendezvous", "other") as endpoint:
            server = older(endpoint, services) if old else newer(endpoint, services)
            await server.start()
            yield endpoint
            await (server.stop(None) if isinstance(server, grpc.aio.Server) else server.stop())


def newer(endpoint: str, services: Sequence[Registration]) -> Server:
    """Return a server of the present version."""
    return Server(ServerOptions(host=endpoint), services=services, translate=translate)


def older(endpoint: str, services: Sequence[Registration]) -> grpc.aio.Server:
    """Return a server with the services alone."""
    server = grpc.aio.server()
    for each in services:
        each.add(server)
    server.add_insecure_port(endpoint)
    return server


async def status(endpoint: str, *flags: str) -> tuple[str, str]:
    """Run `rallypoint status` as a process; return its stdout and stderr."""
    done = await asyncio.to_thread(rallypoint, "status", "--rdzv-endpoint", endpoint, *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


async def test_status_is_silent_about_a_service_of_its_own_version() -> None:
    async with rendezvous() as endpoint:
        assert await status(endpoint) == ("no runs\n", "")


async def test_status_shows_another_version_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is on stderr, so that the output for programs is not affected."""
    ours = info.VERSION
    monkeypatch.setattr(info, "VERSION", "99.0")
    async with rendezvous() as endpoint:
        for flags in ((), ("--json",)):
            out, err = await status(endpoint, *flags)
            assert err == f"the rendezvous service has version 99.0, and this command version {ours}\n"
            assert json.loads(out)["runs"] == [] if flags else out == "no runs\n"


async def test_status_shows_that_a_service_is_older_than_server_info() -> None:
    async with rendezvous(old=True) as endpoint:
        out, err = await status(endpoint)
    assert out == "no runs\n"
    assert err == f"the rendezvous service has an older version, and this command version {info.VERSION}\n"
