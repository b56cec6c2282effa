"""Compare the golden files with the product, and rewrite them."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import unified_diff
from pathlib import Path

FOLDER = Path(__file__).parent
_MOST_LINES = 40  # of a diff that is shown


def stored() -> dict[str, str]:
    """Return the text of each golden file by its path in this folder."""
    return {str(path.relative_to(FOLDER)): path.read_text() for path in sorted(FOLDER.rglob("*.txt"))}


def write(texts: Mapping[str, str]) -> None:
    """Write the golden files, and delete those that are no longer rendered."""
    for name in stored().keys() - texts.keys():
        (FOLDER / name).unlink()
    for name, text in texts.items():
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def difference(name: str, old: str, new: str) -> str:
    """Return a unified diff of at most 40 lines, with the advice how to accept it; an empty string if none."""
    lines = list(
        unified_diff(old.splitlines(), new.splitlines(), f"tests/golden/{name}", "now", lineterm="", n=1)
    )
    if not lines:
        return ""
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"... {len(lines) - _MOST_LINES} more lines"]
    return "\n".join([*lines, "If this is intended, `make golden` rewrites the files."])
