"""The policy of a server: which roles the names in certificates have, for which runs.

A policy is a TOML file with tables `[[grant]]`, each with `names`, `roles` and `runs`. Names and runs are patterns of
the shell (`*`, `?`, `[...]`). It is read again when it changes; an unusable one changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from rallypoint.rpc.endpoint import SettingError
from rallypoint.rpc.live_file import LiveFile


class Role(StrEnum):
    """The purpose of a client. Each method of a service may be called by one role or several."""

    NODE = "node"
    """An agent: joins runs, uses their stores and states, has its workers watched."""

    TIMER = "timer"
    """A client that only has timers."""

    OBSERVER = "observer"
    """Reads the state of runs, jobs and timers, their events and logs; not their stores and states."""

    OPERATOR = "operator"
    """Reads as observers do, and stops, restarts, deletes and launches."""


Rights: TypeAlias = Mapping[str, Collection[Role]]
"""By the name of each method of a service, the roles that may call it."""

NODES = frozenset({Role.NODE})
TIMERS = frozenset({Role.NODE, Role.TIMER})
READERS = frozenset({Role.OBSERVER, Role.OPERATOR})
ALL_READERS = READERS | NODES
OPERATORS = frozenset({Role.OPERATOR})
EVERY_ROLE = frozenset(Role)
"""Of methods about the server, not about runs: a caller may have its role for any runs."""

ALL_RUNS = "*"
_SPIFFE = "spiffe://"


@dataclass(frozen=True, slots=True)
class Grant:
    """The clients whose name matches a pattern have these roles for the runs that match a pattern."""

    names: Sequence[str]
    roles: frozenset[Role]
    runs: Sequence[str]


class PolicyError(SettingError):
    """A policy can't be used. One line: the file, the grant, and the expected value."""


class Policy:
    """The grants of a file, which is read again when it changes."""

    def __init__(self, path: Path) -> None:
        """Read the file. Raises PolicyError."""
        self._grants = LiveFile("policy", [path], partial(_read, path))

    def runs(self, name: str, roles: Collection[Role]) -> list[str]:
        """Return the patterns of the runs for which the client of this name has one of the roles."""
        self._grants.refresh()
        return [
            run
            for grant in self._grants.content
            if grant.roles.intersection(roles) and any(_matches(name, pattern) for pattern in grant.names)
            for run in grant.runs
        ]


def _matches(name: str, pattern: str) -> bool:
    """Return True if a pattern is for this name: a SPIFFE ID matches only a pattern that begins as one."""
    return name.startswith(_SPIFFE) == pattern.startswith(_SPIFFE) and fnmatchcase(name, pattern)


def _read(path: Path) -> Sequence[Grant]:
    # Here and not at the top: an agent has no policy, and must start quickly.
    import tomllib  # noqa: PLC0415

    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PolicyError(f"cannot read --policy {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PolicyError(f"--policy {path} is not TOML: {error}") from None
    tables = content.pop("grant", None)
    if content or not isinstance(tables, list) or not tables:
        raise PolicyError(f"--policy {path}: expected one or more tables [[grant]], and nothing beside them")
    return [_grant(table, f"--policy {path}: [[grant]] {number}") for number, table in enumerate(tables, 1)]


def _grant(table: Mapping[str, Any], where: str) -> Grant:
    if not isinstance(table, dict):
        raise PolicyError(f"{where} is no table")
    if unknown := sorted(table.keys() - {"names", "roles", "runs"}):
        raise PolicyError(f"{where} has {unknown[0]!r}, expected names, roles and runs")
    names, roles, runs = (_texts(table.get(key), f"{where}: {key}") for key in ("names", "roles", "runs"))
    for role in roles:
        if role not in list(Role):
            raise PolicyError(f"{where}: {role!r} is no role, expected {', '.join(Role)}")
    return Grant(names, frozenset(map(Role, roles)), runs)


def _texts(value: object, where: str) -> Sequence[str]:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
        raise PolicyError(f'{where} must be a list of texts, as in ["*"]')
    return value
