"""Options of the commands that call a rendezvous service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from rallypoint.cli.values import Text
from rallypoint.launcher.backends import is_etcd_url
from rallypoint.serving.options import Seconds, Setting, client_options

_Command = TypeVar("_Command", bound=Callable[..., Any])


class ServiceAddress(Text):
    """Address of a rendezvous service; the URL of an etcd, which `rallypoint run` accepts, is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the value."""
        text = super().convert(value, param, ctx)
        refuse_etcd_url(text)
        return text


def refuse_etcd_url(endpoint: str) -> None:
    """Raise click.BadParameter for an etcd URL in `--rdzv-endpoint`, without quoting it: it may hold a password."""
    if is_etcd_url(endpoint):
        raise click.BadParameter(
            "this command needs the address of a rendezvous replica (host:port), not the URL of an etcd",
            param_hint="--rdzv-endpoint",
        )


def service_options(command: _Command) -> _Command:
    """Add the options `rdzv_endpoint`, `timeout` in seconds, and `tls`, a ClientTLS or None."""
    return click.option(
        "--rdzv-endpoint",
        cls=Setting,
        type=ServiceAddress(),
        default="127.0.0.1:29400",
        metavar="HOST:PORT[,...]",
        help="Address of the rendezvous service, or of its replicas.",
    )(timeout_option(client_options(command)))


def timeout_option(command: _Command) -> _Command:
    """Add the option `timeout`: the time limit of the command, in seconds."""
    return click.option(
        "--timeout",
        cls=Setting,
        type=Seconds(0.1),
        default=10.0,
        metavar="SECONDS",
        help="How long to wait for a response, retries included.",
    )(command)


# ---- Options of the commands that call a timer service.


def timer_service_options(command: _Command) -> _Command:
    """Add the options `timer_endpoint`, `timeout` in seconds, and `tls`, a ClientTLS or None."""
    return click.option(
        "--timer-endpoint",
        cls=Setting,
        type=Text(),
        default="127.0.0.1:29410",
        metavar="HOST:PORT",
        help="Address of the timer service. An agent with an embedded one logs its address in `supervisor ready`.",
    )(timeout_option(client_options(command)))
