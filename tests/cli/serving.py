"""The values with which `rallypoint serve` would serve."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rallypoint.cli import serve as serve_module
from rallypoint.cli.main import main


class Serving:
    """Runs `serve` with a role up to where it would serve.

    Attributes:
        role: The role, in lower case.
    """

    def __init__(self, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.role = role
        self._taken: list[tuple[Any, ...]] = []

        async def serve(*arguments: Any) -> None:
            self._taken.append(arguments)

        monkeypatch.setattr(serve_module, "configure_logs", lambda *_: None)
        monkeypatch.setattr(serve_module, f"serve_{role}_role", serve)

    def __call__(self, *flags: str, **environment: str) -> tuple[Any, ...]:
        """Return the arguments that the role gets."""
        result = CliRunner().invoke(main, ["serve", self.role, *flags], env=environment)
        assert result.exit_code == 0, result.stderr
        return self._taken.pop()

    def in_each_way(self, values: Mapping[str, float], file: Path) -> list[tuple[Any, ...]]:
        """Return the arguments if values are given by flags, in the environment, and in a file."""
        names = {flag: flag.removeprefix("--").replace("-", "_") for flag in values}
        environment = {f"RALLYPOINT_{names[flag].upper()}": str(value) for flag, value in values.items()}
        lines = (f"{names[flag]} = {value}" for flag, value in values.items())
        file.write_text("\n".join([f"[serve.{self.role}]", *lines]))
        flags = [str(part) for flag in values.items() for part in flag]
        return [self(*flags), self(**environment), self("--config", str(file))]
