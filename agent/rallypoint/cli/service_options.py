"""The options of every command that asks a rendezvous service something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from rallypoint.cli.nodes import Text
from rallypoint.serving.options import Seconds, Setting, client_options

_Command = TypeVar("_Command", bound=Callable[..., Any])


def service_options(command: _Command) -> _Command:
    """Gives a command `rdzv_endpoint`, `timeout` in seconds, and `tls`, a ClientTLS or None."""
    return click.option(
        "--rdzv-endpoint",
        cls=Setting,
        type=Text(),
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
