"""The command class of `rallypoint run`: flags parsed as argparse does, and help in sections."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from rallypoint.serving.options import Setting

_F = TypeVar("_F", bound=Callable[..., Any])


class Flag(Setting):
    """A flag in one section of the help."""

    def __init__(
        self, *declarations: Any, section: str = "Other", torchrun: bool = False, **attributes: Any
    ) -> None:
        """Declare the flag.

        Args:
            declarations: As in click.
            section: Heading of the help under which the flag is listed.
            torchrun: True for torchrun's flags: an abbreviation then means them rather than our own flags.
            attributes: As in click.
        """
        super().__init__(*declarations, **attributes)
        self.section = section
        self.torchrun = torchrun

    def type_cast_value(self, context: click.Context, value: Any) -> Any:
        """Convert a value. After a short name, remove a leading "=" as argparse does; click keeps it."""
        if isinstance(value, str) and any(not name.startswith("--") for name in self.opts):
            value = value.removeprefix("=")
        return super().type_cast_value(context, value)

    def get_help_extra(self, context: click.Context) -> click.types.OptionHelpExtra:
        """Return the additions to the help text: the default, also if another module applies it; no range."""
        extra = super().get_help_extra(context)
        extra.pop("range", None)
        if isinstance(self.show_default, str):
            extra["default"] = self.show_default
        return extra

    def get_error_hint(self, context: click.Context | None) -> str:
        """Return the flag's name for an error, with the environment variable if the value is from there."""
        hint = super().get_error_hint(context)
        if (
            context is None
            or context.get_parameter_source(self.name or "") is not ParameterSource.ENVIRONMENT
        ):
            return hint
        variables = [self.envvar] if isinstance(self.envvar, str) else self.envvar or ()
        return f"{hint} (from {next(name for name in variables if os.environ.get(name))})"


class RunCommand(click.Command):
    """A command that takes flags with dashes or underscores, and abbreviated, like torchrun."""

    def make_context(self, *arguments: Any, **attributes: Any) -> click.Context:
        """Parse a command line."""
        attributes["token_normalize_func"] = self._whole_name
        return super().make_context(*arguments, **attributes)

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        """Parse the arguments; refuse an ambiguous abbreviation with the list of its flags."""
        try:
            return super().parse_args(context, arguments)
        except click.NoSuchOption as error:
            begun = self._match(error.option_name.lstrip("-")) if error.option_name.startswith("--") else []
            if len(begun) < 2:
                raise
            *names, last = (f"--{name}" for name in begun)
            raise click.UsageError(
                f"{error.option_name} could be {', '.join(names)} or {last}; give the full name", context
            ) from None

    def _match(self, name: str) -> list[str]:
        """Return the flags that begin with `name`; only torchrun's if it has any."""
        flags = [flag for flag in self.params if isinstance(flag, Flag)]
        for among in ([flag for flag in flags if flag.torchrun], flags):
            names = [part.lstrip("-") for flag in among for part in flag.opts if part.startswith("--")]
            if begun := [each for each in names if each.startswith(name)]:
                return begun
        return []

    def _whole_name(self, name: str) -> str:
        """Complete an abbreviated flag; `name` and result are without leading dashes, underscores become dashes.

        An ambiguous abbreviation is returned unchanged; click refuses it.
        """
        name = name.replace("_", "-")
        begun = self._match(name) if len(name) > 1 else []
        return begun[0] if len(begun) == 1 and not self._is_whole(name) else name

    def _is_whole(self, name: str) -> bool:
        return any(f"--{name}" in flag.opts for flag in self.params)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """List the flags by section, in the order in which sections first occur."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(context):
            record = parameter.get_help_record(context)
            if record is not None and isinstance(parameter, click.Option):
                of_all_clients = "TLS" if (parameter.name or "").startswith("tls_") else "Other"
                sections.setdefault(getattr(parameter, "section", of_all_clients), []).append(record)
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)


def flags(section: str, *declared: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """Return a decorator that adds the flags of one section to a command, in this order."""

    def decorate(command: _F) -> _F:
        for declare in reversed(declared):
            command = declare(command)
        for parameter in getattr(command, "__click_params__", [])[-len(declared) :]:
            parameter.section = section
        return command

    return decorate


def flag(*declarations: str, torchrun: bool = False, **attributes: Any) -> Callable[[_F], _F]:
    """Declare a flag that RALLYPOINT_<NAME> or, as with torchrun, PET_<NAME> can set too.

    Args:
        declarations: As in click.
        torchrun: True if torchrun has the flag.
        attributes: As in click. `envvar`: one more variable, with the lowest precedence.
    """
    long = next(declaration for declaration in declarations if declaration.startswith("--"))
    name = long.lstrip("-").replace("-", "_").upper()
    variables = [f"RALLYPOINT_{name}", f"PET_{name}"]
    if (more := attributes.pop("envvar", None)) is not None:
        variables.append(more)
    if attributes.get("default") in ("", None):
        attributes.setdefault("show_default", False)
    return click.option(
        *declarations, cls=Flag, torchrun=torchrun, envvar=variables, show_envvar=False, **attributes
    )
