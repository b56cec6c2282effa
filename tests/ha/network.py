"""The hosts of a test's cluster: their addresses, and partitions between them."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

AGENTS = "agents"
"""The host of this process, and of all processes that it starts without another host."""

_NETWORKS = range(512)


class Network(Protocol):
    """Hosts, each with an address. Their names are those given at its creation, and AGENTS.

    Attributes:
        parts: True if any two hosts can be partitioned here.
        why_not: The reason if they can't, in one line; empty if they can.
    """

    parts: bool
    why_not: str

    def address(self, host: str) -> str:
        """Return the IPv4 address of a host."""
        ...

    async def reach(self, one: str, other: str, port: int) -> str:
        """Return the address, `host:port`, to which one host must connect to reach a port of another."""
        ...

    def command(self, host: str, *command: str) -> list[str]:
        """Return the command with which this process starts `command` on a host."""
        ...

    def why_inseparable(self, one: str, other: str) -> str:
        """Return the reason for which these two can't be partitioned, in one line; empty if they can."""
        ...

    async def part(self, one: str, other: str) -> None:
        """Deliver nothing between two hosts from now on, either way; neither gets an error."""
        ...

    async def slow(self, host: str, kilobits: int) -> None:
        """Limit the link of a host to so many kilobits per second, each way; further data is queued."""
        ...

    async def heal(self) -> None:
        """Undo all effects of `part` and `slow`."""
        ...


class NoNetworkLeft(Exception):
    """Tests that run now have taken all numbers."""


def claim_number() -> tuple[int, socket.socket]:
    """Return a number that no other network on this machine has while the socket is open.

    The kernel drops the claim when the process ends, however it ends: nothing can be left behind.
    """
    for number in _NETWORKS:
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0rallypoint-ha-{number}")
        except OSError:
            claim.close()
            continue
        return number, claim
    raise NoNetworkLeft(f"{len(_NETWORKS)} networks of tests run on this machine")


@asynccontextmanager
async def network_of(hosts: Sequence[str]) -> AsyncIterator[Network]:
    """Create a network for these hosts: namespaces if the machine allows them, otherwise loopback addresses."""
    from ha.loopback import Loopback
    from ha.namespaces import Namespaces, why_no_namespaces

    number, claim = claim_number()
    with claim:
        why_not = await asyncio.to_thread(why_no_namespaces)
        if why_not:
            loopback = Loopback(number, hosts, why_not)
            try:
                yield loopback
            finally:
                await loopback.close()
            return
        namespaces = Namespaces(number, hosts)
        try:
            await namespaces.open()
            yield namespaces
        finally:
            await namespaces.close()


def missing(*programs: str) -> list[str]:
    """Return the programs that aren't installed."""
    return [program for program in programs if shutil.which(program) is None]
