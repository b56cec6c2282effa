"""docs/symptoms.md has only messages of the program."""

from __future__ import annotations

import ast
import re

from house.source import ROOT, product

PAGE = (ROOT / "docs" / "symptoms.md").read_text()


def test_each_message_is_one_of_the_program() -> None:
    """A message is split at each `…`: the text between two values of a formatted string is a constant."""
    nodes = (node for module in product() for node in ast.walk(module.tree))
    program = "\n".join(str(node.value) for node in nodes if isinstance(node, ast.Constant))
    messages = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
    assert len(messages) > 50
    parts = [part.strip() for message in messages for part in message.split("…")]
    assert [part for part in parts if part not in program] == []
