"""Hosts as loopback addresses, where there are no network namespaces, with links between them that can be cut."""

from __future__ import annotations

from collections.abc import Sequence

from ha.network import AGENTS
from support.link import Link


class Loopback:
    """See `Network`. Hosts can be partitioned only where one reaches the other through a link."""

    parts = False

    def __init__(self, number: int, hosts: Sequence[str], why_not: str) -> None:
        """Set up nothing: all addresses of 127/8 exist.

        Args:
            number: A number that no other network has; it determines the addresses.
            hosts: Their names.
            why_not: The reason for which there are no network namespaces.
        """
        self.why_not = why_not
        self._addresses = {
            host: f"127.{77 + number // 256}.{number % 256}.{place}"
            for place, host in enumerate((AGENTS, *hosts), start=1)
        }
        self._links: dict[tuple[str, str], list[Link]] = {}

    async def close(self) -> None:
        """Close all links."""
        for links in self._links.values():
            for link in links:
                await link.close()

    def address(self, host: str) -> str:
        return self._addresses[host]

    async def reach(self, one: str, other: str, port: int) -> str:
        link = Link(f"{self._addresses[other]}:{port}")
        await link.open(self._addresses[one])
        self._links.setdefault((one, other), []).append(link)
        return link.address

    def command(self, host: str, *command: str) -> list[str]:
        return list(command)

    def why_inseparable(self, one: str, other: str) -> str:
        return "" if self._between(one, other) else f"{one} and {other} can't be parted here: {self.why_not}"

    async def part(self, one: str, other: str) -> None:
        for link in self._between(one, other):
            link.part()

    async def slow(self, host: str, kilobits: int) -> None:
        for ends, links in self._links.items():
            for link in links if host in ends else ():
                link.kilobits = kilobits

    async def heal(self) -> None:
        for links in self._links.values():
            for link in links:
                link.heal()

    def _between(self, one: str, other: str) -> list[Link]:
        return [*self._links.get((one, other), []), *self._links.get((other, one), [])]
