"""Where the hosts of a test's cluster are, and who of them can't reach whom."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

AGENTS = "agents"
"""The host of this very process, and of all that it starts without a host of their own."""

_NETWORKS = range(512)


class Network(Protocol):
    """Hosts with an address each. Names are those that it was made with, and AGENTS.

    Attributes:
        parts: Whether any two hosts can be parted here.
        why_not: Why not, in one line; empty if they can.
    """

    parts: bool
    why_not: str

    def address(self, host: str) -> str:
        """The IPv4 address of a host."""
        ...

    async def reach(self, one: str, other: str, port: int) -> str:
        """Where one host is to connect to, as `host:port`, in order to reach a port of another."""
        ...

    def command(self, host: str, *command: str) -> list[str]:
        """The command, as this process has to start it for it to run on that host."""
        ...

    def why_inseparable(self, one: str, other: str) -> str:
        """Why these two can't be parted, in one line; empty: they can."""
        ...

    async def part(self, one: str, other: str) -> None:
        """From now on nothing that one host sends the other arrives, either way; neither is told."""
        ...

    async def slow(self, host: str, kilobits: int) -> None:
        """From now on the host's link carries so many kilobits a second, each way; what is more waits for its turn."""
        ...

    async def heal(self) -> None:
        """Undo all that `part` and `slow` have done."""
        ...


class NoNetworkLeft(Exception):
    """All numbers are taken, by tests that run at this moment."""


def claim_number() -> tuple[int, socket.socket]:
    """A number that no other network on this machine has, for as long as the socket is open.

    The kernel forgets the claim with the process, however that ends: there is nothing that could be left behind.
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
    """A network of its own for these hosts: namespaces where the machine allows, otherwise loopback addresses."""
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
    """Those of the programs that aren't installed."""
    return [program for program in programs if shutil.which(program) is None]
