"""Output of many workers on one terminal: whole lines, each with a prefix that says whose it is."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, Protocol, TypeVar

LONGEST = 128 * 1024
"""Bytes of a line without an end that are kept back; a longer one goes out in pieces."""


_Source = TypeVar("_Source", bound=Hashable)


class Output(Protocol):
    """Where lines go: rallypoint.agent.logs.follower.OutputThread, for one."""

    async def write(self, data: bytes) -> None:
        """Returns when all of it is taken; one write's bytes are never mixed with another's."""


class Lines(Generic[_Source]):
    """Puts pieces of output together to lines. Bytes are never decoded."""

    def __init__(self, outputs: Mapping[int, Output]) -> None:
        """`outputs`: by the number of the stream."""
        self._outputs = outputs
        # By whose output it is: the line that has no end yet, its prefix, and whether its beginning is out.
        self._unfinished: dict[tuple[_Source, int], tuple[bytes, bytes, bool]] = {}

    @property
    def sources(self) -> set[_Source]:
        """Whose last line has no end yet."""
        return {source for source, _ in self._unfinished}

    async def add(self, source: _Source, stream: int, prefix: bytes, data: bytes) -> None:
        """Output of a worker.

        Args:
            source: Whose.
            stream: Which of its streams.
            prefix: What comes before each line.
            data: A piece; its first line may go on where that of the piece before had no end.
        """
        begun, of_begun, in_line = self._unfinished.pop((source, stream), (b"", prefix, False))
        data = begun + data
        end = data.rfind(b"\n") + 1
        out = b""
        if end:
            lines = data[: end - 1].replace(b"\n", b"\n" + prefix) + b"\n"
            out = lines if in_line else of_begun + lines
            in_line, of_begun = False, prefix
        rest = data[end:]
        if len(rest) >= LONGEST:
            out += rest if in_line else of_begun + rest
            rest, in_line = b"", True
        if rest or in_line:
            self._unfinished[source, stream] = rest, of_begun, in_line
        if out:
            await self._outputs[stream].write(out)

    async def finish(self, source: _Source) -> None:
        """Nothing more comes of a worker: its last line goes out, whether or not it has an end."""
        for key in [key for key in self._unfinished if key[0] == source]:
            rest, prefix, in_line = self._unfinished.pop(key)
            await self._outputs[key[1]].write((b"" if in_line else prefix) + rest + b"\n")
