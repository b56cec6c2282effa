"""Prefixes and filters for the lines of a log that are copied."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from string import Template

from rallypoint.agent.logs.streams import LogError

_VARIABLES = ("role_name", "local_rank", "rank", "hostname")


def check_line_prefix(template: str, option: str) -> str:
    """Refuse a line prefix template with an unknown variable. (torchrun leaves such a variable as it is.)

    Args:
        template: as in torch: `${role_name}`, `${local_rank}`, `${rank}` and `${hostname}` are replaced, `$$` is a
            dollar sign.
        option: name of the option that set it, for the error.

    Returns:
        The template.

    Raises:
        LogError: the template is invalid; one line.
    """
    for match in Template.pattern.finditer(template):
        name = match["named"] or match["braced"]
        if name is not None and name not in _VARIABLES:
            known = ", ".join(f"${{{variable}}}" for variable in _VARIABLES)
            raise LogError(f"{option} {template}: there is no variable ${{{name}}}; there are {known}")
    if "\n" in template:
        raise LogError(f"{option}: the prefix of a line can't contain a line break; leave the line break out")
    return template


def line_prefix(template: str | None, *, role: str, local_rank: int, rank: int) -> bytes:
    """Return the prefix of one worker's lines; without a template torchrun's, `[<role><local rank>]:`."""
    if template is None:
        template = "[${role_name}${local_rank}]:"
    host = socket.gethostname()
    return os.fsencode(
        Template(template).safe_substitute(role_name=role, local_rank=local_rank, rank=rank, hostname=host)
    )


class LineFilter:
    """Selects the lines that contain one of several texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        """`texts`: literal, case-sensitive."""
        self._pattern = re.compile(b"|".join(re.escape(os.fsencode(text)) for text in texts))

    def __call__(self, data: bytes) -> bytes:
        """Return the lines of `data` that contain a text, with their line ends. Costs one pass."""
        picked: list[bytes] = []
        at = 0
        while (match := self._pattern.search(data, at)) is not None:
            begin = data.rfind(b"\n", at, match.start()) + 1 or at
            at = data.find(b"\n", match.end()) + 1 or len(data)
            picked.append(data[begin:at])
            if at == len(data):
                break
        return b"".join(picked)
