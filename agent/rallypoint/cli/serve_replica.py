"""Options and server of `serve rendezvous` as one of several replicas."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import click

from rallypoint.cli.values import Text
from rallypoint.etcd.endpoint import parse_address
from rallypoint.launcher.backends import ETCD_SCHEMES
from rallypoint.rendezvous.api.errors import translate
from rallypoint.rendezvous.base.limits import Limits
from rallypoint.rendezvous.cluster.keys import advertised_address, replica_name, split_shards
from rallypoint.rendezvous.cluster.replica import Replicas
from rallypoint.rendezvous.cluster.service import replicated_services
from rallypoint.rpc.endpoint import ServerOptions, SettingError, parse_endpoint
from rallypoint.rpc.logs import get_logger
from rallypoint.serving.options import Command, Seconds, Setting, command_with
from rallypoint.serving.server import Server


@dataclass(frozen=True, slots=True)
class ReplicaFlags:
    """Values of the flags; empty: determined at the start. `lease_ttl` None: the default of `Replicas`."""

    advertise: str = ""
    name: str = ""
    lease_ttl: float | None = None

    def refuse_without_etcd(self) -> None:
        """Raise SettingError if a flag for replicas is given without an etcd journal."""
        given = {
            "--advertise": bool(self.advertise),
            "--replica-name": bool(self.name),
            "--lease-ttl": self.lease_ttl is not None,
        }
        for flag in (flag for flag, is_given in given.items() if is_given):
            raise SettingError(
                f"{flag} is for replicas over --journal etcd://…: leave it out, or give that journal"
            )


def is_etcd(journal: str) -> bool:
    """Return True if a `--journal` value names an etcd, well-formed or not."""
    return journal.partition(":")[0] in ETCD_SCHEMES


_FLAGS = (
    click.option(
        "--advertise",
        cls=Setting,
        type=Text(),
        default="",
        metavar="HOST:PORT",
        help="With etcd: address at which clients and other replicas reach this one. Default: the listening address, "
        "or this machine's name if it listens on all addresses.",
    ),
    click.option(
        "--replica-name",
        cls=Setting,
        type=Text(),
        default="",
        metavar="NAME",
        help="With etcd: name of this replica, the same after each restart. Default: made of host and port.",
    ),
    click.option(
        "--lease-ttl",
        cls=Setting,
        type=Seconds(2, 60),
        # The default of `Replicas`, which is loaded for replicas only.
        show_default="10.0",
        metavar="SECONDS",
        help="With etcd: how long a replica that died or lost etcd keeps its runs. Shorter: others take over "
        "sooner, but a shorter pause of the machine, or election of etcd, counts as death.",
    ),
)


def replica_options(command: Command) -> Command:
    """Add the flags of a replica to a command, which gets them as the argument `replica`, a ReplicaFlags."""

    def take(arguments: dict[str, Any]) -> None:
        flags = (arguments.pop(name) for name in ("advertise", "replica_name", "lease_ttl"))
        arguments["replica"] = ReplicaFlags(*flags)

    return command_with(_FLAGS, take)(command)


# ---- The server: `serve rendezvous --journal etcd://…`.


_log = get_logger(__name__)


async def serve_replica_role(
    options: ServerOptions, journal_url: str, limits: Limits, flags: ReplicaFlags
) -> None:
    """Serve rendezvous as one of the replicas over an etcd, until a signal; then hand its shards over.

    Raises:
        SettingError: It can't, and another attempt would not help; one line.
    """
    url, shards = split_shards(journal_url)
    try:
        address = parse_address(url)
    except SettingError as error:
        raise SettingError(f"--journal: {error}") from None
    if flags.advertise:
        advertised_address(flags.advertise, "")  # refuse a wrong address before anything is started
    wanted = Replicas(shards=shards)
    if flags.lease_ttl is not None:
        wanted = replace(wanted, lease_ttl=flags.lease_ttl)
    failed: list[BaseException] = []
    stopping: list[asyncio.Task[None]] = []

    def stop(error: BaseException) -> None:
        failed.append(error)
        stopping.append(asyncio.create_task(server.stop()))

    async def publish_ready(ready: bool) -> None:
        await server.set_ready(ready)

    async with replicated_services(address, wanted, limits=limits, on_ready=publish_ready) as services:
        server = Server(
            options,
            services=services.registrations,
            translate=translate,
            ready=False,
            instance=services.replica.registration.instance,
        )

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
    """Log a warning if the advertised address is loopback: clients on other machines would connect to themselves."""
    if parse_endpoint(advertised).loopback:
        _log.warning(
            "this replica is advertised on loopback: only clients of this machine can reach it",
            address=advertised,
            advice="--host with an address that others reach, or --advertise HOST:PORT",
        )
