"""The command-line options that all servers have, and those of all clients.

A value comes from the flag, else from the environment (`RALLYPOINT_TLS_CERT` for `--tls-cert`), else from the
command's table in the --config file, else (of a client) from its context there, else from the default.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import click

from rallypoint.rpc.endpoint import (
    SECRET_VARIABLE,
    AccessFiles,
    ClientTLS,
    ServerOptions,
    SettingError,
    client_security,
    run_secret,
)
from rallypoint.rpc.runtime_folder import role_socket
from rallypoint.serving.config_file import read_client_config, read_config

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
        attributes.setdefault("show_default", attributes.get("default") not in ("", None))
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


def server_options(
    role: str, default_port: int, *, also_client: bool = False
) -> Callable[[Command], Command]:
    """Give a click command the flags of a server, and --config.

    The command gets them as the keyword argument `options`, a ServerOptions. A SettingError that it raises
    (ServiceStartError is one) becomes a one-line error with exit code 2.

    Args:
        role: the name of the role's Unix socket, which is served if neither --host nor --port is given.
        default_port: default of --port beside --host.
        also_client: for a server that connects to others: adds --tls-ca, and the keyword argument `security`, a
            ClientSecurity with that authority and the server's own certificate.
    """
    flags = [
        _config_option(),
        _setting(
            "--host",
            help="Name or address to listen on, or unix:/path. Default: a Unix socket that only this user can reach, "
            "where the other commands look; with --port, --tls-cert or --insecure, 127.0.0.1.",
        ),
        _setting(
            "--port",
            type=click.IntRange(0, 65535),
            help=f"TCP port to listen on; 0 for any free one. Default beside --host: {default_port}.",
        ),
        _setting("--tls-cert", type=_FILE, help="PEM certificate chain of this server. Needs --tls-key."),
        _setting("--tls-key", type=_FILE, help=_KEY_HELP),
        _setting(
            "--tls-client-ca",
            type=_FILE,
            help="PEM certificates that must have signed a client's own. Clients without one are refused.",
        ),
        _SECRET_FILE,
        _setting(
            "--insecure/--no-insecure",
            default=_DEFAULT.insecure,
            help="Serve plaintext: everyone who can reach the port can control all jobs.",
        ),
        *_ACCESS,
        _setting(
            "--health/--no-health",
            default=_DEFAULT.health,
            help="Answer health checks (grpc.health.v1) of every client that can connect.",
        ),
        _setting(
            "--reflection/--no-reflection",
            default=_DEFAULT.reflection,
            help="Describe the services to every client that can connect, as grpcurl and buf curl need it.",
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
        _setting(
            "--request-byte-rate",
            type=click.IntRange(0, 10**12),
            default=_DEFAULT.request_byte_rate,
            metavar="BYTES",
            help="Bytes of requests a second that one client address may send, such as store writes; 0: any number.",
        ),
        _setting(
            "--max-watches-per-client",
            type=click.IntRange(0, 10**9),
            default=_DEFAULT.max_watches_per_client,
            metavar="N",
            help="Streams of changes or log lines that one client address may have open; 0: any number.",
        ),
        *_log_options(),
    ]
    if also_client:
        flags += [_setting("--tls-ca", type=_FILE, help=_CA_HELP), _TOKEN_FILE]

    def take(arguments: dict[str, Any]) -> None:
        host, port = arguments.pop("host"), arguments.pop("port")
        if host is None:
            networked = port is not None or arguments["tls_cert"] is not None or arguments["insecure"]
            host = _DEFAULT.host if networked else role_socket(role)
        arguments["run_secret"] = run_secret(arguments.pop("run_secret_file"))
        _take_access(arguments)
        names = [
            field.name for field in dataclasses.fields(ServerOptions) if field.name not in ("host", "port")
        ]
        options = ServerOptions(
            host=host,
            port=default_port if port is None else port,
            **{name: arguments.pop(name) for name in names},
        )
        arguments["options"] = options
        if also_client:
            ca, token = arguments.pop("tls_ca"), arguments.pop("token_file")
            tls = None if ca is None else ClientTLS(ca, options.tls_cert, options.tls_key)
            arguments["security"] = client_security(
                tls, options.run_secret, insecure=options.insecure, token=token
            )

    return command_with(flags, take)


def client_options(command: Command) -> Command:
    """Give a click command the flags with which a client secures its connections.

    The command gets them as the keyword argument `security`, a ClientSecurity.
    A SettingError that it raises (EndpointError is one) becomes a one-line error with exit code 2.
    """
    flags = [
        _setting(
            "--config",
            type=_FILE,
            is_eager=True,
            expose_value=False,
            callback=read_client_config,
            metavar="FILE",
            help="TOML file with contexts, and a table per command. Default: ~/.config/rallypoint.toml.",
        ),
        _setting(
            "--context",
            is_eager=True,
            expose_value=False,
            callback=read_client_config,
            metavar="NAME",
            help="Table [contexts.NAME] of that file, with addresses and credentials; default: its `current`.",
        ),
        _setting("--tls-ca", type=_FILE, help=_CA_HELP),
        _setting(
            "--tls-cert", type=_FILE, help="PEM certificate chain to show to the server. Needs --tls-key."
        ),
        _setting("--tls-key", type=_FILE, help=_KEY_HELP),
        _SECRET_FILE,
        _TOKEN_FILE,
        _setting(
            "--insecure/--no-insecure",
            default=False,
            help="Speak plaintext over TCP: everyone on the way can read and change everything.",
        ),
    ]

    def take(arguments: dict[str, Any]) -> None:
        files = [arguments.pop(name) for name in ("tls_ca", "tls_cert", "tls_key")]
        secret = run_secret(arguments.pop("run_secret_file"))
        tls = ClientTLS(*files) if any(files) else None
        token = arguments.pop("token_file")
        arguments["security"] = client_security(tls, secret, insecure=arguments.pop("insecure"), token=token)

    return command_with(flags, take)(command)


def access_options(command: Command) -> Command:
    """Give a click command the flags that restrict the calls to the services inside its process.

    The command gets them as the keyword argument `access`, an AccessFiles.
    """
    return command_with(_ACCESS, _take_access)(command)


def _take_access(arguments: dict[str, Any]) -> None:
    names = [field.name for field in dataclasses.fields(AccessFiles)]
    arguments["access"] = AccessFiles(**{name: arguments.pop(name) for name in names})


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


_ACCESS = (
    _setting(
        "--policy",
        type=_FILE,
        metavar="FILE",
        help="TOML file that says which roles the names in clients' certificates have, for which runs. Clients need a "
        "certificate then.",
    ),
    _setting(
        "--token-keys",
        type=_FILE,
        metavar="FILE",
        help="PEM public keys of those who issue tokens (`rallypoint token`). Clients without a certificate need a "
        "token then.",
    ),
    _setting(
        "--audit-log",
        type=_FILE,
        metavar="FILE",
        help="Append refused calls and all actions of operators to FILE, a line of JSON each.",
    ),
)

_SECRET_FILE = _setting(
    "--run-secret-file",
    type=_FILE,
    metavar="FILE",
    help=f"File with the secret that all hosts of a job hold, in place of TLS files; or its text in {SECRET_VARIABLE}.",
)


_TOKEN_FILE = _setting(
    "--token-file",
    type=_FILE,
    metavar="FILE",
    help="File with a token (`rallypoint token issue`) to send with each call; read again when it changes.",
)


def command_with(
    flags: Iterable[Flag], take: Callable[[dict[str, Any]], None]
) -> Callable[[Command], Command]:
    """Return a decorator that adds flags to a command; `take` converts their values into its arguments."""
    flags = tuple(flags)

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def call(**arguments: Any) -> Any:
            try:
                take(arguments)
                return command(**arguments)
            except SettingError as error:
                raise SettingRefused(str(error)) from None

        decorated: Callable[..., Any] = call
        for flag in reversed(flags):
            decorated = flag(decorated)
        return cast(Command, decorated)

    return decorate
