"""Many nodes of one run, and the state they agree on."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.endpoint import ClientSecurity
from torture.tormented_node import PLAINTEXT, RUN, TormentedNode


class Crowd:
    """Nodes of one run, in it after `join`. `changed` is set whenever one of them receives an update."""

    def __init__(
        self,
        endpoint: str,
        settings: pb.RunSettings,
        count: int,
        draw: random.Random,
        security: ClientSecurity = PLAINTEXT,
        *,
        run_id: str = RUN,
    ) -> None:
        """Create `count` nodes."""
        self.changed = asyncio.Event()
        self.nodes = [
            TormentedNode(
                f"node-{number}", endpoint, settings, draw, self.changed.set, run_id=run_id, security=security
            )
            for number in range(count)
        ]

    def join(self) -> None:
        """Let all join at once."""
        for node in self.nodes:
            node.join()

    def common_round(self) -> int:
        """Return the FINAL round in which every node has its place, by its last update; 0: there is none."""
        rounds = {node.place.round if node.place is not None else 0 for node in self.nodes}
        return rounds.pop() if len(rounds) == 1 else 0

    async def until(self, what: str, condition: Callable[[], bool], timeout: float) -> None:
        """Wait until a condition on the nodes' updates is true.

        Raises:
            AssertionError: It did not become true, or a node was refused meanwhile.
        """
        try:
            async with asyncio.timeout(timeout):
                while not condition():
                    self.check_alive()
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            raise AssertionError(f"waited {timeout:g} s in vain for {what}; {self.describe()}") from None

    async def agree(self, timeout: float, after: int = 0) -> int:
        """Wait until all of them have a place in one FINAL round, later than `after`; return its number."""
        await self.until("one FINAL round of all nodes", lambda: self.common_round() > after, timeout)
        return self.common_round()

    def check_alive(self) -> None:
        """Raise the error that ended a node, if any."""
        for node in self.nodes:
            node.check_alive()

    def describe(self) -> str:
        """Return their phases and rounds, for an error."""
        latest = [node.told[-1].update if node.told else pb.NodeUpdate() for node in self.nodes]
        counts: dict[str, int] = {}
        for update in latest:
            where = f"{pb.Phase.Name(update.phase)} {update.assignment.round}"
            counts[where] = counts.get(where, 0) + 1
        return f"nodes were told last: {counts}"

    async def die(self) -> None:
        """End all of them without notice."""
        await asyncio.gather(*(node.die() for node in self.nodes if node.is_in))


@asynccontextmanager
async def crowd(
    endpoint: str,
    settings: pb.RunSettings,
    count: int,
    draw: random.Random,
    security: ClientSecurity = PLAINTEXT,
    *,
    run_id: str = RUN,
) -> AsyncIterator[Crowd]:
    """Start nodes that join; end them all afterwards."""
    nodes = Crowd(endpoint, settings, count, draw, security, run_id=run_id)
    nodes.join()
    try:
        yield nodes
    finally:
        await nodes.die()


_HIGHER = 5


@contextmanager
def hosts_of_their_own() -> Iterator[None]:
    """Give the nodes a higher priority, where allowed: their hosts do not share the service's machine."""
    _raise_priority(_HIGHER)
    try:
        yield
    finally:
        _raise_priority(-_HIGHER)


def _raise_priority(by: int) -> None:
    for thread in os.listdir("/proc/self/task"):
        with suppress(PermissionError, ProcessLookupError):
            before = os.getpriority(os.PRIO_PROCESS, int(thread))
            os.setpriority(os.PRIO_PROCESS, int(thread), before - by)


async def calm(
    agree: Callable[[float], Awaitable[int]], restart: Callable[[], Awaitable[None]], patience: float
) -> int:
    """Return the round that forms after failures, as `agree` does within some seconds.

    Newcomers that failed on probation delay all others, by 60 s or more (rendezvous/core/newcomers.py). An operator's
    `restart` ends that delay.
    """
    for _ in range(4):
        with suppress(AssertionError):
            return await agree(patience / 4)
        await restart()
    return await agree(patience)
