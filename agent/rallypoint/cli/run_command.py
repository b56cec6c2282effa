"""The command behind `rallypoint run`: flags as argparse takes them, and a help that has sections."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from rallypoint.serving.options import Setting

_F = TypeVar("_F", bound=Callable[..., Any])


class Flag(Setting):
    """A flag of one section of the help."""

    def __init__(
        self, *declarations: Any, section: str = "Other", torchrun: bool = False, **attributes: Any
    ) -> None:
        """Declare.

        Args:
            declarations: As click has them.
            section: Under which heading the help shows it.
            torchrun: Whether torchrun has it: then an abbreviation means it rather than one of ours.
            attributes: As click has them.
        """
        super().__init__(*declarations, **attributes)
        self.section = section
        self.torchrun = torchrun

    def type_cast_value(self, context: click.Context, value: Any) -> Any:
        """Read a value; after a short name it may follow "=", as argparse has it, where click leaves the sign in."""
        if isinstance(value, str) and any(not name.startswith("--") for name in self.opts):
            value = value.removeprefix("=")
        return super().type_cast_value(context, value)

    def get_help_extra(self, context: click.Context) -> click.types.OptionHelpExtra:
        """What the help says beside the text: the default, also of what is read elsewhere, and no range."""
        extra = super().get_help_extra(context)
        extra.pop("range", None)
        if isinstance(self.show_default, str):
            extra["default"] = self.show_default
        return extra

    def get_error_hint(self, context: click.Context | None) -> str:
        """How an error names the flag: with the variable, where that gave the value."""
        hint = super().get_error_hint(context)
        if (
            context is None
            or context.get_parameter_source(self.name or "") is not ParameterSource.ENVIRONMENT
        ):
            return hint
        variables = [self.envvar] if isinstance(self.envvar, str) else self.envvar or ()
        return f"{hint} (from {next(name for name in variables if os.environ.get(name))})"


class RunCommand(click.Command):
    """Takes flags with dashes or underscores, abbreviated if one likes, as torchrun does."""

    def make_context(self, *arguments: Any, **attributes: Any) -> click.Context:
        """Parse a command line."""
        attributes["token_normalize_func"] = self._whole_name
        return super().make_context(*arguments, **attributes)

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        """Parse; the beginning of several flags is refused with all of them."""
        try:
            return super().parse_args(context, arguments)
        except click.NoSuchOption as error:
            begun = self._begun(error.option_name.lstrip("-")) if error.option_name.startswith("--") else []
            if len(begun) < 2:
                raise
            *names, last = (f"--{name}" for name in begun)
            raise click.UsageError(
                f"{error.option_name} could be {', '.join(names)} or {last}; say which", context
            ) from None

    def _begun(self, name: str) -> list[str]:
        """The flags that begin so; torchrun's alone if there are any."""
        flags = [flag for flag in self.params if isinstance(flag, Flag)]
        for among in ([flag for flag in flags if flag.torchrun], flags):
            names = [part.lstrip("-") for flag in among for part in flag.opts if part.startswith("--")]
            if begun := [each for each in names if each.startswith(name)]:
                return begun
        return []

    def _whole_name(self, name: str) -> str:
        """A flag's name with dashes, completed if it is the beginning of one; without its own leading dashes.

        What is the beginning of several is left as it is, and refused by click, which names them.
        """
        name = name.replace("_", "-")
        begun = self._begun(name) if len(name) > 1 else []
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
    """A decorator that gives a command the flags of one section, in this order."""

    def decorate(command: _F) -> _F:
        for declare in reversed(declared):
            command = declare(command)
        for parameter in getattr(command, "__click_params__", [])[-len(declared) :]:
            parameter.section = section
        return command

    return decorate


def flag(*declarations: str, torchrun: bool = False, **attributes: Any) -> Callable[[_F], _F]:
    """A flag that the environment sets too: RALLYPOINT_<NAME>, after it PET_<NAME> as with torchrun.

    Args:
        declarations: As click has them.
        torchrun: Whether torchrun has it.
        attributes: As click has them. `envvar`: one more variable, asked last.
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
