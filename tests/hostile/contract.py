"""The promises of the .proto files: the reasons that each service may answer with, from their enums of reasons."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

PROTOS = Path(__file__).parents[2] / "protos"

_PACKAGE = re.compile(r"^package ([\w.]+);", re.MULTILINE)
_SERVICE = re.compile(r"^service (\w+) \{", re.MULTILINE)
_ENUM = re.compile(r"^enum \w+Reason \{(.*?)^\}", re.MULTILINE | re.DOTALL)
# A value of the enum: the code with which its comment begins, and its name without the prefix.
_VALUE = re.compile(r"^  // ([A-Z_]+): (?:.*\n  //)*.*\n  [A-Z]+_REASON_([A-Z_]+) = \d+;", re.MULTILINE)

Reasons = frozenset[tuple[str, str]]
"""(name of the status code, reason) pairs."""


def documented_reasons() -> Mapping[str, Reasons]:
    """Return the errors in the enum of reasons of each service, by its full name."""
    found: dict[str, Reasons] = {}
    for file in sorted(PROTOS.rglob("*_service.proto")):
        text = file.read_text(encoding="utf-8")
        package, service, reasons = _PACKAGE.search(text), _SERVICE.search(text), _ENUM.search(text)
        assert package is not None, file
        assert service is not None, file
        assert reasons is not None, file
        found[f"{package[1]}.{service[1]}"] = frozenset(_VALUE.findall(reasons[1]))
        assert len(found[f"{package[1]}.{service[1]}"]) == reasons[1].count(" = ") - 1, file
    return found
