"""A replica of the rendezvous service as a server: what `serve rendezvous --journal etcd://…` runs."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rallypoint.cli.limit_options import Limits
from rallypoint.cli.replica_options import ReplicaFlags
from rallypoint.etcd.endpoint import parse_address
from rallypoint.rendezvous.api.errors import translate
from rallypoint.rendezvous.cluster.keys import advertised_address, replica_name, split_shards
from rallypoint.rendezvous.cluster.replica import Replicas
from rallypoint.rendezvous.cluster.service import replicated_services
from rallypoint.rpc.endpoint import ServerOptions, SettingError, parse_endpoint
from rallypoint.rpc.logs import get_logger
from rallypoint.serving.server import Server

_log = get_logger(__name__)


async def serve_replica_role(
    options: ServerOptions, journal_url: str, limits: Limits, flags: ReplicaFlags
) -> None:
    """Serve rendezvous as one of the replicas over an etcd, until a signal; then hand its shards over.

    Raises:
        SettingError: It can't, and trying again would not help; one line.
    """
    url, shards = split_shards(journal_url)
    try:
        address = parse_address(url)
    except SettingError as error:
        raise SettingError(f"--journal: {error}") from None
    if flags.advertise:
        advertised_address(flags.advertise, "")  # refused before anything is begun
    wanted = Replicas(shards=shards)
    if flags.lease_ttl is not None:
        wanted = replace(wanted, lease_ttl=flags.lease_ttl)
    failed: list[BaseException] = []
    stopping: list[asyncio.Task[None]] = []

    def stop(error: BaseException) -> None:
        failed.append(error)
        stopping.append(asyncio.create_task(server.stop()))

    async def tell_ready(ready: bool) -> None:
        await server.set_ready(ready)

    async with replicated_services(
        address,
        wanted,
        limits=limits.rendezvous,
        store_limits=limits.store,
        state_limits=limits.state,
        state_ttl=limits.state_ttl,
        on_ready=tell_ready,
    ) as services:
        server = Server(options, services=services.registrations, translate=translate, ready=False)

        def begin() -> None:
            try:
                advertised = advertised_address(flags.advertise, server.address)
                name = replica_name(flags.name, advertised)
            except SettingError as error:
                stop(error)
            else:
                _warn_of_loopback(advertised)
                services.begin(name, advertised, stop)

        await server.serve_until_signal(before_drain=services.drain, after_start=begin)
    if failed:
        raise SettingError(str(failed[0])) from failed[0]


def _warn_of_loopback(advertised: str) -> None:
    """Say so where what leads clients to this replica leads those of other machines to themselves."""
    if parse_endpoint(advertised).loopback:
        _log.warning(
            "this replica is advertised on loopback: only clients of this machine can follow to it",
            address=advertised,
            advice="--host with an address that others reach, or --advertise HOST:PORT",
        )
