"""The --config file: TOML, with a table per command that holds values of the command's flags."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
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
    table = _load(file)
    path: list[str] = []
    for group, name in _ancestry(context):
        _check_commands(file, path, table, group)
        path.append(name)
        table = table.get(name, {})
    context.default_map = {**(context.default_map or {}), **_values(file, path, table, context)}


def _load(file: Path) -> Mapping[str, Any]:
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
    known = sorted(known)
    close = get_close_matches(key, known, n=1)
    return f", did you mean {close[0]!r}?" if close else f" (known: {', '.join(known)})"
