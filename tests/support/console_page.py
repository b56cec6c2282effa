"""The commands of docs/grpcurl.md for one of its tools, with the replies that the page promises."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "grpcurl.md"
TOOLS = ("buf", "grpcurl")
_INTERRUPTED = "^C\n"

_BLOCK = re.compile(r"^```(sh|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ANY = re.compile(r"…|\d{4}-\d\d-\d\dT[\d:.]+Z")


@dataclass
class Example:
    """A command.

    Attributes:
        before: Shell lines that precede it on the page.
        command: The command.
        reply: Its output. `…` stands for any text, alone on a line for any lines; a time stands for any time. Ends
            with `^C` if the command runs until Ctrl-C.
    """

    before: str
    command: str
    reply: str = ""

    @property
    def goes_on(self) -> bool:
        """True if the command runs until Ctrl-C."""
        return self.reply.endswith(_INTERRUPTED)

    @property
    def lines(self) -> list[str]:
        """The promised lines."""
        return self.reply.removesuffix(_INTERRUPTED).splitlines()

    def is_answered_by(self, output: str) -> bool:
        """Return True if an output is the promised one, except for the case of header names and trailing spaces."""
        pattern = ""
        for line in self.lines:
            text = ".*".join(re.escape(part) for part in _ANY.split(line))
            pattern += r"(?:.*\n)*?" if line.strip() == "…" else rf"{text}\n"
        lines = "".join(f"{line.rstrip()}\n" for line in output.strip().splitlines())
        return re.fullmatch(pattern, lines, re.IGNORECASE) is not None


def examples(tool: str) -> list[Example]:
    """Return the page's commands for a tool, without the lines that call the other tool."""
    (other,) = (re.compile(rf"\b{name}\b") for name in TOOLS if name != tool)
    before = ""
    found: list[Example] = []
    for kind, block in _BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        for line in block.splitlines(keepends=True):
            if (kind == "sh" or line.startswith("$ ")) and other.search(line):
                continue
            if kind == "sh":
                before += line
            elif line.startswith("$ "):
                found.append(Example(before, line.removeprefix("$ ")))
            else:
                found[-1].reply += line
    return found
