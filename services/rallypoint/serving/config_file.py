"""The --config file: TOML, with a table per command that holds values of its flags, and contexts of clients.

A context is a table `[contexts.NAME]` with values of flags that clients share, such as the address of a service.
--context, or the key `current` at the top of the file, names the one in use.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import click


class ConfigFileError(click.ClickException):
    """A mistake in a configuration file. One line: file, table, key, and the expected value."""

    exit_code: ClassVar[int] = 2


def read_config(context: click.Context, _parameter: click.Parameter, file: Path | None) -> None:
    """Callback of an eager --config option: use the command's table as the defaults of its options.

    In click, flags and environment variables then override them. `rallypoint serve timer` reads the table
    `[serve.timer]`, a program with a single command the top of the file. Keys are the names of the flags, with
    dashes or underscores.

    Raises:
        ConfigFileError: unreadable, not TOML, an unknown command or key, a value of the wrong type or range.
    """
    if file is None:
        return
    _use(file, _load(file), context)


_CONTEXTS, _CURRENT = "contexts", "current"

_IN_CONTEXTS = frozenset(
    {
        "rdzv_endpoint",
        "timer_endpoint",
        "agent",
        "agents",
        "timeout",
        "insecure",
        "run_secret_file",
        "token_file",
    }
    | {"tls_ca", "tls_cert", "tls_key"}
)


def read_client_config(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    """Callback of the eager options --config and --context of a client: as `read_config`, and the context's values.

    Without --config, the file is rallypoint.toml in XDG_CONFIG_HOME (~/.config), if there is one. The command's own
    table has precedence over the context.

    Raises:
        ConfigFileError: As `read_config`; there is no such context; or others can read a password in the file.
    """
    given = context.meta.setdefault(__name__, {})
    given[parameter.name] = value
    if len(given) < 2:  # --config and --context, in any order
        return
    file, chosen = given["config"], given["context"]
    if file is None:
        folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
        file = Path(folder, "rallypoint.toml")
        if chosen is None and not os.path.isfile(file):  # False for one in a folder of another user, too
            return
    content = _load(file)
    name = content.get(_CURRENT) if chosen is None else chosen
    contexts = content.get(_CONTEXTS, {})
    if not isinstance(contexts, dict) or not all(isinstance(each, dict) for each in contexts.values()):
        raise ConfigFileError(f"{file}: contexts must be tables, as in [contexts.prod]")
    if name is not None:
        if not isinstance(name, str) or name not in contexts:
            raise ConfigFileError(f"{file} has no context {name!r}{_hint(str(name), contexts)}")
        table = contexts[name]
        known = [key.replace("_", "-") for key in _IN_CONTEXTS]
        for key in table:
            if key.replace("-", "_") not in _IN_CONTEXTS:
                raise ConfigFileError(
                    f"{file}: [contexts.{name}] has the unknown key {key!r}{_hint(key, known)}"
                )
        if file.stat().st_mode & 0o077 and re.search(r"://[^/\s]*:[^/\s]*@", str(table)):
            raise ConfigFileError(f"{file} holds a password, and others can read it: chmod 600 {file}")
        own = {option.name for option in context.command.params}
        shared = {key: entry for key, entry in table.items() if key.replace("-", "_") in own}
        context.default_map = _values(file, [_CONTEXTS, name], shared, context)
    _use(file, content, context)


def _use(file: Path, table: Mapping[str, Any], context: click.Context) -> None:
    """Use the command's table of the file as defaults of its options."""
    path: list[str] = []
    for group, name in _ancestry(context):
        if group.parent is None:
            table = {key: value for key, value in table.items() if key not in (_CONTEXTS, _CURRENT)}
        _check_commands(file, path, table, group)
        path.append(name)
        table = table.get(name, {})
    context.default_map = {**(context.default_map or {}), **_values(file, path, table, context)}


def _load(file: Path) -> Mapping[str, Any]:
    import tomllib  # noqa: PLC0415 (most clients have no file, and `rallypoint run` must start quickly)

    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigFileError(f"cannot read --config {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"--config {file} is not TOML: {error}") from None


def _ancestry(context: click.Context) -> list[tuple[click.Context, str]]:
    """Return each group on the way from the program to the command, with the name of the next element."""
    way: list[tuple[click.Context, str]] = []
    while context.parent is not None:
        way.append((context.parent, context.info_name or ""))
        context = context.parent
    return way[::-1]


def _check_commands(file: Path, path: list[str], table: Mapping[str, Any], group: click.Context) -> None:
    assert isinstance(group.command, click.Group)
    commands = group.command.list_commands(group)
    for key, value in table.items():
        name = ".".join([*path, key])
        if key not in commands:
            raise ConfigFileError(f"{file}: [{name}] is no command{_hint(key, commands)}")
        if not isinstance(value, dict):
            raise ConfigFileError(f"{file}: {name} must be a table, [{name}], not {_spoken(value)}")


def _values(file: Path, path: list[str], table: Mapping[str, Any], context: click.Context) -> dict[str, Any]:
    options = {
        option.name: option
        for option in context.command.params
        if isinstance(option, click.Option) and option.expose_value and option.name
    }
    where = f"{file}: [{'.'.join(path)}]" if path else f"{file}:"
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in options:
            raise ConfigFileError(
                f"{where} has the unknown key {key!r}{_hint(key, [each.replace('_', '-') for each in options])}"
            )
        if name in values:
            raise ConfigFileError(f"{where} sets {key!r} twice, with dash and underscore")
        _check_type(f"{where} {key}", options[name], value)
        try:
            options[name].type_cast_value(context, value)
        except click.BadParameter as error:
            raise ConfigFileError(f"{where} {key}: {error.message}") from None
        values[name] = value
    return values


def _check_type(where: str, option: click.Option, value: object) -> None:
    """Check that a value has the type of its flag, because click would accept "8" for 8 and 1 for true."""
    wanted = _toml_type(option)
    if option.multiple or option.nargs != 1:
        if not isinstance(value, list):
            raise ConfigFileError(f"{where} must be an array, not {_spoken(value)}")
        each: list[object] = value
    else:
        each = [value]
    for item in each:
        # A float flag accepts 5 as well as 5.0.
        if _spoken(item) != wanted and not (wanted == "a float" and _spoken(item) == "an integer"):
            raise ConfigFileError(f"{where} must be {wanted}, not {_spoken(item)}")


def _toml_type(option: click.Option) -> str:
    if option.is_flag and option.is_bool_flag:
        return "a boolean"
    if option.count or isinstance(option.type, type(click.INT)):
        return "an integer"
    return "a float" if isinstance(option.type, type(click.FLOAT)) else "a string"


def _spoken(value: object) -> str:
    # bool before int: True is an int to isinstance.
    names = {bool: "a boolean", int: "an integer", float: "a float", str: "a string", list: "an array"}
    return next(
        (name for kind, name in names.items() if isinstance(value, kind)),
        "a table" if isinstance(value, dict) else "a date or time",
    )


def _hint(key: str, known: Iterable[str]) -> str:
    from difflib import get_close_matches  # noqa: PLC0415 (for a mistake only)

    known = sorted(known)
    close = get_close_matches(key, known, n=1)
    return f", did you mean {close[0]!r}?" if close else f" (known: {', '.join(known)})"
