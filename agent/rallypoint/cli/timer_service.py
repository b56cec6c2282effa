"""The options of every command that asks a timer service something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from rallypoint.cli.nodes import Text
from rallypoint.cli.service_options import timeout_option
from rallypoint.serving.options import Setting, client_options

_Command = TypeVar("_Command", bound=Callable[..., Any])


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
