"""Launching a job on this host from a plan, for the command line, for Python and for the daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rallypoint.launcher.api import (
        CallError,
        ChildFailedError,
        LaunchConfig,
        WorkersFailedError,
        elastic_launch,
        launch_agent,
    )

__all__ = [
    "CallError",
    "ChildFailedError",
    "LaunchConfig",
    "WorkersFailedError",
    "elastic_launch",
    "launch_agent",
]


def __getattr__(name: str) -> Any:
    """Import the Python API on first use: the command line starts without it."""
    if name in __all__:
        from rallypoint.launcher import api  # noqa: PLC0415

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
