"""The options of a `serve rendezvous` that is one of several replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import click

from rallypoint.cli.nodes import Text
from rallypoint.launcher.backends import ETCD_SCHEMES
from rallypoint.rpc.endpoint import SettingError
from rallypoint.serving.options import Seconds, Setting

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class ReplicaFlags:
    """What the flags say; empty: find out. `lease_ttl` None: the default of `Replicas`."""

    advertise: str = ""
    name: str = ""
    lease_ttl: float | None = None

    def refuse_without_etcd(self) -> None:
        """Raises SettingError if something is asked of replicas that there are not."""
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
    """Whether a `--journal` value names an etcd, well-formed or not."""
    return journal.partition(":")[0] in ETCD_SCHEMES


def replica_options(command: _Command) -> _Command:
    """Gives a click command the flags of a replica; it gets them as the keyword argument `replica`."""

    @functools.wraps(command)
    def call(**arguments: Any) -> Any:
        flags = ReplicaFlags(*(arguments.pop(name) for name in ("advertise", "replica_name", "lease_ttl")))
        return command(replica=flags, **arguments)

    decorated: Callable[..., Any] = call
    for flag in reversed(_FLAGS):
        decorated = flag(decorated)
    return cast(_Command, decorated)


_FLAGS = (
    click.option(
        "--advertise",
        cls=Setting,
        type=Text(),
        default="",
        show_default=False,
        metavar="HOST:PORT",
        help="With etcd: how clients and the other replicas reach this one. Without it, where it listens, or by this "
        "machine's name if it listens at all addresses.",
    ),
    click.option(
        "--replica-name",
        cls=Setting,
        type=Text(),
        default="",
        show_default=False,
        metavar="NAME",
        help="With etcd: what this replica is called, the same after each restart. Without it, after host and port.",
    ),
    click.option(
        "--lease-ttl",
        cls=Setting,
        type=Seconds(2, 60),
        # That of `Replicas`, which is loaded for replicas only.
        show_default="10.0",
        metavar="SECONDS",
        help="With etcd: how long a replica that died, or that can't reach etcd, keeps its runs. Shorter: others take "
        "them over sooner, and a shorter pause of the machine, or election of etcd, is taken for death.",
    ),
)
