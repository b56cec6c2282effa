"""The command-line options that all servers have, and those of all clients.

A value comes from the flag, else from the environment (`RALLYPOINT_TLS_CERT` for `--tls-cert`), else from the
command's table in the --config file, else from the default.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import click

from rallypoint.rpc.endpoint import ClientTLS, ServerOptions, SettingError

__all__ = ["ClientTLS", "Finite", "Seconds", "ServerOptions", "Setting", "client_options", "server_options"]

Command = TypeVar("Command", bound=Callable[..., Any])
Flag = Callable[[Callable[..., Any]], Callable[..., Any]]

_FILE = click.Path(path_type=Path)
_DEFAULT = ServerOptions()
_KEY_HELP = "PEM private key of --tls-cert, not encrypted."
_CA_HELP = "PEM certificates that must have signed the server's certificate. Turns TLS on."


class Setting(click.Option):
    """A click option that an environment variable can set too: `--lease-time` as RALLYPOINT_LEASE_TIME.

    Use it for a command's own options: `@click.option("--journal", cls=Setting)`.
    """

    def __init__(self, *declarations: Any, **attributes: Any) -> None:
        attributes.setdefault("show_default", True)
        attributes.setdefault("show_envvar", True)
        super().__init__(*declarations, **attributes)
        if self.envvar is None and self.name:
            self.envvar = f"RALLYPOINT_{self.name.upper()}"


class Finite(click.FloatRange):
    """A click type for a number within bounds that is neither `nan` nor `inf`."""

    name = "number"
    unit: ClassVar[str] = "a number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse and check."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not {self.unit}", param, ctx)
        return number


class Seconds(Finite):
    """A click type for a duration in seconds."""

    unit: ClassVar[str] = "a number of seconds"


class SettingRefused(click.ClickException):
    """A setting could not be applied when it was used. One line, exit code 2."""

    exit_code: ClassVar[int] = 2


def server_options(default_port: int = 29400, *, also_client: bool = False) -> Callable[[Command], Command]:
    """Give a click command the flags of a server, and --config.

    The command gets them as the keyword argument `options`, a ServerOptions. A SettingError that it raises
    (ServiceStartError is one) becomes a one-line error with exit code 2.

    Args:
        default_port: default of --port.
        also_client: for a server that connects to others: adds --tls-ca, and the keyword argument `tls`, a
            ClientTLS with that authority and the server's own certificate; None for plaintext without --tls-ca.
    """
    flags = [
        _config_option(),
        _setting("--host", default=_DEFAULT.host, help="Name or address to listen on, or unix:/path."),
        _setting(
            "--port",
            type=click.IntRange(0, 65535),
            default=default_port,
            help="TCP port to listen on; 0 for any free one.",
        ),
        _setting("--tls-cert", type=_FILE, help="PEM certificate chain of this server. Needs --tls-key."),
        _setting("--tls-key", type=_FILE, help=_KEY_HELP),
        _setting(
            "--tls-client-ca",
            type=_FILE,
            help="PEM certificates that must have signed a client's own. Clients without one are refused.",
        ),
        _setting(
            "--insecure/--no-insecure",
            default=_DEFAULT.insecure,
            help="Serve plaintext even where other machines can reach it.",
        ),
        _setting(
            "--drain-grace",
            type=Seconds(0, 3600),
            default=_DEFAULT.drain_grace,
            metavar="SECONDS",
            help="How long open calls may take to end after SIGTERM or SIGINT.",
        ),
        _setting(
            "--request-rate",
            type=Finite(0, 1e9),
            default=_DEFAULT.request_rate,
            metavar="N",
            help="Calls a second that one client address may begin, health checks aside; 0: any number. Lower: a "
            "client that floods is refused sooner, and so are many agents behind one address.",
        ),
        _setting(
            "--request-burst",
            type=click.IntRange(1, 10**9),
            default=_DEFAULT.request_burst,
            metavar="N",
            help="Calls that one client address may begin at once: at least the agents behind it.",
        ),
        *_log_options(),
    ]
    if also_client:
        flags.append(_setting("--tls-ca", type=_FILE, help=_CA_HELP))

    def take(arguments: dict[str, Any]) -> None:
        names = [field.name for field in dataclasses.fields(ServerOptions)]
        options = ServerOptions(**{name: arguments.pop(name) for name in names})
        arguments["options"] = options
        if also_client:
            ca = arguments.pop("tls_ca")
            arguments["tls"] = None if ca is None else ClientTLS(ca, options.tls_cert, options.tls_key)

    return _command_with(flags, take)


def client_options(command: Command) -> Command:
    """Give a click command the TLS flags of a client.

    The command gets them as the keyword argument `tls`, a ClientTLS, or None for plaintext when no flag is set.
    A SettingError that it raises (EndpointError is one) becomes a one-line error with exit code 2.
    """
    flags = [
        _setting("--tls-ca", type=_FILE, help=_CA_HELP),
        _setting(
            "--tls-cert", type=_FILE, help="PEM certificate chain to show to the server. Needs --tls-key."
        ),
        _setting("--tls-key", type=_FILE, help=_KEY_HELP),
    ]

    def take(arguments: dict[str, Any]) -> None:
        files = [arguments.pop(name) for name in ("tls_ca", "tls_cert", "tls_key")]
        arguments["tls"] = ClientTLS(*files) if any(files) else None

    return _command_with(flags, take)(command)


def _log_options() -> tuple[Flag, ...]:
    return (
        _setting(
            "--log-level",
            type=click.Choice(["debug", "info", "warning", "error"]),
            default=_DEFAULT.log_level,
            help="Log events of this level and above.",
        ),
        _setting(
            "--log-format",
            type=click.Choice(["auto", "human", "json"]),
            default=_DEFAULT.log_format,
            help="auto: human on a terminal, one JSON object a line otherwise.",
        ),
    )


def _config_option() -> Flag:
    # Imported here and not at the top: clients have no such file, and `rallypoint run` must start quickly.
    from rallypoint.serving.config_file import read_config  # noqa: PLC0415

    return _setting(
        "--config",
        type=_FILE,
        is_eager=True,
        expose_value=False,
        callback=read_config,
        metavar="FILE",
        help="TOML file with a table per command, such as [serve.timer]; flags and environment win over it.",
    )


def _setting(*declarations: str, **attributes: Any) -> Flag:
    return click.option(*declarations, cls=Setting, **attributes)


def _command_with(
    flags: Iterable[Flag], take: Callable[[dict[str, Any]], None]
) -> Callable[[Command], Command]:
    """Return a decorator that adds flags to a command; `take` converts their values into its arguments."""
    flags = tuple(flags)

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def call(**arguments: Any) -> Any:
            take(arguments)
            try:
                return command(**arguments)
            except SettingError as error:
                raise SettingRefused(str(error)) from None

        decorated: Callable[..., Any] = call
        for flag in reversed(flags):
            decorated = flag(decorated)
        return cast(Command, decorated)

    return decorate
