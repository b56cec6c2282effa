"""Texts that are cut fit, and none of their characters is broken."""

from __future__ import annotations

import pytest

from rallypoint.rpc.text import clip, clip_start, one_line, size_in_words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the fan stands still", "the fan stands still"),
        ("two\nlines\x1b[31m", "two lines [31m"),
        ("x" * 2000, "x" * 1024),
        ("ä" * 1000, "ä" * 512),
        ("x" * 1023 + "ä", "x" * 1023),
        ("\udcff", "?"),
    ],
)
def test_a_reason_is_one_line_that_a_service_accepts(text: str, expected: str) -> None:
    """It has at most so many bytes, in whole characters."""
    assert one_line(text, 1024) == expected


def test_a_cut_is_between_characters_and_marked() -> None:
    """The cut may be at either end; a text that fits is unchanged."""
    assert clip("abc", 3, "...") == clip_start("abc", 3, "...") == "abc"
    assert clip("\N{SNOWMAN}" * 10, 12, "\n...") == "\N{SNOWMAN}\N{SNOWMAN}\n..."
    assert clip_start("\N{SNOWMAN}" * 10, 12, "...\n") == "...\n\N{SNOWMAN}\N{SNOWMAN}"
    assert clip_start("abc", 0) == ""


def test_bytes_in_words() -> None:
    """The unit is the largest that leaves a digit before the point."""
    assert [size_in_words(count) for count in (0, 1023, 1024, 3 << 29, 1 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 GiB",
        "1.0 TiB",
    ]
