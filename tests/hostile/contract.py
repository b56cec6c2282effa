"""What the .proto files promise: which reasons each service may answer with, read from the tables in their comments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

PROTOS = Path(__file__).parents[2] / "protos"

_PACKAGE = re.compile(r"^package ([\w.]+);", re.MULTILINE)
# The comment right above a service: its lines, and its name.
_SERVICE = re.compile(r"((?:^//.*\n)+)^service (\w+) \{", re.MULTILINE)
_ROW = re.compile(r"^//   ([A-Z_]+) +([A-Z_]{2,}) +\S", re.MULTILINE)

Reasons = frozenset[tuple[str, str]]
"""(name of the status code, reason) pairs."""


def documented_reasons() -> Mapping[str, Reasons]:
    """By the full name of each service, the errors in the table of its comment."""
    found: dict[str, Reasons] = {}
    for file in sorted(PROTOS.rglob("*_service.proto")):
        text = file.read_text(encoding="utf-8")
        package = _PACKAGE.search(text)
        assert package is not None, file
        for comment, name in _SERVICE.findall(text):
            found[f"{package[1]}.{name}"] = frozenset(_ROW.findall(comment))
    return found
