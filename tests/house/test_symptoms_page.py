"""docs/symptoms.md has messages of the program only."""

from __future__ import annotations

import ast
import re

from house.source import ROOT, product

PAGE = (ROOT / "docs" / "symptoms.md").read_text()


def texts(tree: ast.Module) -> list[str]:
    """All strings of a module; in a formatted one, each value is a mark."""
    return [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
        if isinstance(node, ast.JoinedStr)
        else str(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr | ast.Constant)
    ]


def test_each_message_is_one_of_the_program() -> None:
    """Each part between two `…`."""
    program = "\n".join(text for module in product() for text in texts(module.tree))
    messages = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
    assert len(messages) > 50
    parts = [part.strip() for message in messages for part in message.split("…")]
    assert [part for part in parts if part not in program] == []
