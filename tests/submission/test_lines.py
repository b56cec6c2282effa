"""Lines of many workers are written whole, each with its prefix, byte for byte."""

from __future__ import annotations

import random

from rallypoint.submission.output import LONGEST, Lines


class Screen:
    """A writer that records its writes."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    async def write(self, data: bytes) -> None:
        self.writes.append(data)


async def shown(*pieces: tuple[str, bytes], finish: bool = True) -> list[bytes]:
    """Return the writes for pieces of output, given as (source, data)."""
    screen = Screen()
    lines: Lines[str] = Lines({1: screen})
    for source, data in pieces:
        await lines.add(source, 1, f"[{source}]: ".encode(), data)
    if finish:
        for source in sorted(lines.sources):
            await lines.finish(source)
    return screen.writes


async def test_each_line_gets_its_prefix() -> None:
    """Each line gets its prefix, also an empty one; bytes are not decoded."""
    assert await shown(("a", b"one\n\n\xff\x00\n")) == [b"[a]: one\n[a]: \n[a]: \xff\x00\n"]


async def test_lines_of_two_sources_do_not_mix() -> None:
    """A line is written when it is complete; an incomplete last line is written with an end of line."""
    found = await shown(("a", b"o"), ("b", b"two\n"), ("a", b"ne"), ("a", b"\nrest"), ("b", b""))
    assert found == [b"[b]: two\n", b"[a]: one\n", b"[a]: rest\n"]


async def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    """A very long line is written in pieces, with one prefix."""
    found = await shown(("a", b"x" * LONGEST), ("a", b"y"), ("a", b"z\nnext\n"))
    assert found == [b"[a]: " + b"x" * LONGEST, b"yz\n[a]: next\n"]


async def test_any_cut_of_the_output_gives_the_same_lines() -> None:
    """The lines do not depend on the sizes of the pieces."""
    draw = random.Random(7)
    text = b"".join(b"x" * draw.randrange(9) + b"\n" for _ in range(50)) + b"end"
    for _ in range(50):
        cuts = sorted(draw.randrange(len(text)) for _ in range(20))
        parts = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        found = b"".join(await shown(*(("a", part) for part in parts)))
        assert found == b"".join(b"[a]: " + line + b"\n" for line in text.split(b"\n"))
