"""Cut texts to a number of bytes, to one line without control characters; read and write numbers in texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def clip(text: str, most_bytes: int, mark: str = "") -> str:
    """Return the beginning of a text: whole characters, in at most `most_bytes` bytes of UTF-8.

    Args:
        text: The text. Lone surrogates, which can't be encoded, become question marks.
        most_bytes: At least the bytes of `mark`.
        mark: Stands for the rest if the text is cut.
    """
    data = text.encode(errors="replace")
    if len(data) <= most_bytes:
        return data.decode()
    return data[: most_bytes - len(mark.encode())].decode(errors="ignore") + mark


def clip_start(text: str, most_bytes: int, mark: str = "") -> str:
    """Return the end of a text: like `clip`, but the beginning is cut."""
    data = text.encode(errors="replace")
    if len(data) <= most_bytes:
        return data.decode()
    return mark + data[len(data) - most_bytes + len(mark.encode()) :].decode(errors="ignore")


def printable(text: str) -> str:
    """Return the text as one line without control characters: users choose names, and these may hold anything."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def one_line(text: str, most_bytes: int) -> str:
    """Return the beginning of a text, printable: a request must not be refused for the wording of its reason."""
    return printable(clip(text, most_bytes))


def whole_number(text: str, least: int, most: int) -> int | None:
    """Return the decimal number in a text; None if it is none from `least` to `most`. `int` refuses 5,000 digits."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 19 else -1
    return number if 0 <= least <= number <= most else None


def text_in(path: Path) -> str:
    """Return the text of a file, without the white space around it; "" if it can't be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def size_in_words(count: int) -> str:
    """Return a number of bytes as text with a unit, as in "1.5 GiB"."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
