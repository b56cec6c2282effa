"""The assembled rendezvous service: journal, engine, store, and the gRPC services on them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from rallypoint.rendezvous.api.event_pages import MOST_EVENTS
from rallypoint.rendezvous.api.requests import MOST_RUNS
from rallypoint.rendezvous.api.servicer import RendezvousServicer
from rallypoint.rendezvous.api.state_servicer import fenced_registration
from rallypoint.rendezvous.api.store_servicer import store_registration
from rallypoint.rendezvous.base.errors import draining_error
from rallypoint.rendezvous.base.limits import Limits
from rallypoint.rendezvous.journal.journal import Journal, MemoryJournal
from rallypoint.rendezvous.runs.run import NODES_PER_MESSAGE
from rallypoint.rendezvous.shard.locator import ListReplicas, RunLocator, SingleShardLocator
from rallypoint.rendezvous.shard.shard import Shard, open_shard
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.endpoint import SettingError
from rallypoint.rpc.loop import boot_time
from rallypoint.server.v1 import server_service_pb2 as server_pb
from rallypoint.serving.flow import Rate
from rallypoint.serving.info import Capability, limits_of
from rallypoint.serving.policy import ALL_READERS, NODES, OPERATORS, READERS, Rights
from rallypoint.serving.server import Registration

SERVICE_NAME = "rallypoint.rendezvous.v1.RendezvousService"


def open_journal(url: str) -> Journal:
    """Return the journal of a `--journal` value: `memory`, or `sqlite:PATH`.

    Raises:
        SettingError: The value is neither.
    """
    kind, _, path = url.partition(":")
    if url == "memory":
        return MemoryJournal()
    if kind == "sqlite" and path:
        # Imported here: a job on one host alone has its journal in memory, and needs no SQLite.
        from rallypoint.rendezvous.journal.sqlite import SqliteJournal  # noqa: PLC0415

        return SqliteJournal(Path(path))
    raise SettingError(f"--journal: {url!r} is not a journal; expected memory, sqlite:PATH or etcd://…")


@asynccontextmanager
async def rendezvous_services(
    journal: Journal,
    *,
    clock: Callable[[], float] = boot_time,
    limits: Limits | None = None,
    list_replicas: ListReplicas | None = None,
    on_failure: Callable[[BaseException], None] = lambda error: None,
) -> AsyncIterator[list[Registration]]:
    """Recover from a journal and work for as long as the context lasts; yields the services for a server.

    Args:
        journal: Not opened yet; closed at the end.
        clock: Monotonic seconds that count on while the machine is suspended: then, too, streams break.
        limits: Limits of the service and of each run.
        list_replicas: Makes the response of ListReplicas; None: this is the only replica.
        on_failure: Called if the journal breaks: the process must end, and start again from the journal.

    Raises:
        JournalError: The journal can't be opened.
    """
    async with own_shard(journal, clock=clock, limits=limits, on_failure=on_failure) as shard:
        yield registrations(SingleShardLocator(shard), limits, list_replicas)


@asynccontextmanager
async def own_shard(
    journal: Journal,
    *,
    clock: Callable[[], float] = boot_time,
    limits: Limits | None = None,
    on_failure: Callable[[BaseException], None] = lambda error: None,
) -> AsyncIterator[Shard]:
    """Yield the only shard of a service, as long as the context lasts. See `rendezvous_services`."""
    shard = await open_shard(journal, clock=clock, limits=limits, on_failure=on_failure)
    try:
        yield shard
    finally:
        await shard.retire(draining_error)
        shard.end_streams(draining_error)


_RIGHTS: Rights = {
    "Join": NODES,
    "GetRun": ALL_READERS,
    "ListNodes": ALL_READERS,
    "ListRuns": READERS,
    "WatchRun": ALL_READERS,
    "CloseRun": OPERATORS,
    "DeleteRun": OPERATORS,
    "RestartRun": OPERATORS,
    "EvictNode": OPERATORS,
    "ReadmitNode": OPERATORS,
    "ListEvents": READERS,
    "WatchEvents": READERS,
    "ListReplicas": ALL_READERS,
}


def registrations(
    locator: RunLocator,
    limits: Limits | None = None,
    list_replicas: ListReplicas | None = None,
    *,
    replicated: bool = False,
) -> list[Registration]:
    """Return the services of a server for the runs of a locator; draining it drains the shards of this process.

    Args:
        limits: Limits of the service, of each run and of each client.
        list_replicas: Makes the response of ListReplicas; None: this is the only replica.
        replicated: True if the locator may find that another replica owns a run.
    """
    limits = limits or Limits()
    servicer = RendezvousServicer(locator, list_replicas)
    rendezvous = Registration(
        SERVICE_NAME,
        partial(pb_grpc.add_RendezvousServiceServicer_to_server, servicer),
        servicer.drain,
        Rate(limits.rendezvous.messages_per_second, limits.rendezvous.message_burst),
        _RIGHTS,
        [Capability.REPLICAS] if replicated else (),
        server_pb.ServerLimits(
            rendezvous=limits_of(
                server_pb.RendezvousLimits,
                limits.rendezvous,
                runs_per_page=MOST_RUNS,
                nodes_per_page=NODES_PER_MESSAGE,
                events_per_page=MOST_EVENTS,
            )
        ),
    )
    return [rendezvous, store_registration(locator, limits.store), fenced_registration(locator, limits)]
