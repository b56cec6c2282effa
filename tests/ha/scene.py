"""A small cluster with clients: its replicas may have a plant, and their networks may hold back their writes."""

from __future__ import annotations

import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ha.caller import Caller
from ha.cluster import REPLICAS, Cluster, running_cluster
from ha.doors import Doors, open_doors
from ha.history import History, Told
from ha.members import Members
from ha.waiting import until
from ha.writers import StateClient

RUN = "crew-0"

_STARTER = Path(__file__).with_name("planted.py")


class Scene:
    """The cluster and clients of a test with directed faults.

    Attributes:
        cluster: Three replicas, all with the same plant, or none.
        history: The history of all clients.
        doors: The connections to all replicas.
    """

    def __init__(self, cluster: Cluster, doors: Doors, history: History, folder: Path) -> None:
        """Use parts that the caller opens and closes."""
        self.cluster = cluster
        self.doors = doors
        self.history = history
        self._folder = folder
        self._clients = 0

    def client(self) -> StateClient:
        """Create one more client of the run's state."""
        return StateClient(self.caller(), RUN)

    def caller(self) -> Caller:
        """Create one more client."""
        self._clients += 1
        return Caller(f"client-{self._clients}", self.doors, self.history, random.Random(self._clients))

    def members(self) -> Members:
        """Create the nodes of the run; none has joined."""
        draw = random.Random(0)
        return Members(RUN, self.cluster.endpoints, self.doors, self.history, draw)

    def told(self) -> int:
        """Return the number of reports of the run's state that subscribers received."""
        return sum(1 for _ in self.history.of(Told))

    def third(self, *others: str) -> str:
        """Return a replica that is none of these."""
        return next(name for name in REPLICAS if name not in others)

    def network(self, replica: str, mode: str) -> None:
        """Set the network between a replica and etcd to "hold", "keep" or "pass" its writes: see `planted.Held`."""
        network = _network(self._folder, replica)
        fresh = network.with_suffix(".fresh")
        fresh.write_text(mode)
        fresh.replace(network)

    async def holds(self, replica: str) -> None:
        """Wait until the network holds a write of a replica.

        Raises:
            AssertionError: It holds none in time.
        """

        async def look() -> str:
            return "" if self._counted(replica)[0] else "nothing is held"

        await until(f"{replica} to write", look)

    async def delivered(self, replica: str) -> None:
        """Wait until the network has delivered all held writes of a replica.

        Raises:
            AssertionError: It has not in time.
        """

        async def look() -> str:
            held, delivered = self._counted(replica)
            return "" if held == delivered else f"{delivered} of {held} arrived"

        await until(f"what {replica} wrote to arrive", look)

    def _counted(self, replica: str) -> tuple[int, int]:
        count = _network(self._folder, replica).with_suffix(".count")
        held, delivered = count.read_text().split() if count.exists() else ("0", "0")
        return int(held), int(delivered)


@asynccontextmanager
async def scene(folder: Path, plant: str = "") -> AsyncIterator[Scene]:
    """Run a cluster whose replicas all have a plant; "": none."""
    planted = ["--plant", plant] if plant else []
    async with running_cluster(folder / "cluster", replicas=False) as cluster:
        for name in REPLICAS:
            network = _network(folder, name)
            network.write_text("pass")
            cluster.replicas.wrappers[name] = [
                sys.executable,
                str(_STARTER),
                *planted,
                "--held",
                str(network),
            ]
        await cluster.replicas.open()
        endpoints = {name: cluster.replicas.endpoint(name) for name in REPLICAS}
        async with open_doors(endpoints) as doors:
            yield Scene(cluster, doors, History(), folder)


def _network(folder: Path, replica: str) -> Path:
    return folder / f"{replica}.network"
