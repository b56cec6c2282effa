"""The options of every command that asks a rendezvous service something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from rallypoint.cli.values import Text
from rallypoint.launcher.backends import is_etcd_url
from rallypoint.serving.options import Seconds, Setting, client_options

_Command = TypeVar("_Command", bound=Callable[..., Any])


class ServiceAddress(Text):
    """Where a rendezvous service is; no URL of the etcd behind it, as `rallypoint run` takes it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check."""
        text = super().convert(value, param, ctx)
        refuse_etcd_url(text)
        return text


def refuse_etcd_url(endpoint: str) -> None:
    """Raises click.BadParameter if a `--rdzv-endpoint` is the URL of an etcd, which may have a password in it."""
    if is_etcd_url(endpoint):
        raise click.BadParameter(
            "this command wants the address of a rendezvous replica (host:port), and this is the URL of an etcd",
            param_hint="--rdzv-endpoint",
        )


def service_options(command: _Command) -> _Command:
    """Gives a command `rdzv_endpoint`, `timeout` in seconds, and `tls`, a ClientTLS or None."""
    return click.option(
        "--rdzv-endpoint",
        cls=Setting,
        type=ServiceAddress(),
        default="127.0.0.1:29400",
        metavar="HOST:PORT[,...]",
        help="Address of the rendezvous service, or those of its replicas.",
    )(timeout_option(client_options(command)))


def timeout_option(command: _Command) -> _Command:
    """Gives a command `timeout`: seconds in which it is to be answered."""
    return click.option(
        "--timeout",
        cls=Setting,
        type=Seconds(0.1),
        default=10.0,
        metavar="SECONDS",
        help="How long to try.",
    )(command)


# ---- The options of every command that asks a timer service something.


def timer_service_options(command: _Command) -> _Command:
    """Gives a command `timer_endpoint`, `timeout` in seconds, and `tls`, a ClientTLS or None."""
    return click.option(
        "--timer-endpoint",
        cls=Setting,
        type=Text(),
        default="127.0.0.1:29410",
        metavar="HOST:PORT",
        help="Address of the timer service; one inside an agent is in the agent's log line `supervisor ready`.",
    )(timeout_option(client_options(command)))
