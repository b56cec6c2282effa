"""Where a run is served just now, for a client in the same process: a home of no runs that always knows the way.

Seats change hands as hosts come and go. A client that was given their addresses at the start would have a list of dead
hosts in the end; this one is told by etcd.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import NoReturn

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.errors import EtcdError
from rallypoint.etcd.values import KeyValue
from rallypoint.rendezvous.base.errors import NotOwner
from rallypoint.rendezvous.cluster.keys import Keys
from rallypoint.rendezvous.journal.etcd.journal import Owner
from rallypoint.rendezvous.shard.reader import RunReader
from rallypoint.rendezvous.shard.shard import Shard
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.selector import FIRST_BACKOFF, Pace

_log = get_logger("rallypoint.run")

# Seconds between two attempts at reading who owns the run, at the most.
_LONGEST_BACKOFF = 1.0


class Signpost:
    """A Home that refuses everything with the address of whoever owns the run.

    Attributes:
        owner: Where it is served; None: nowhere, or not known yet.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self.owner: str | None = None
        self._known = asyncio.Event()

    async def served(self) -> None:
        """Wait until the run is served anywhere, for the first time."""
        await self._known.wait()

    def list_replicas(self, run_id: str) -> NoReturn:
        """Raises NotOwner."""
        self._refuse(run_id)

    def shard(self, run_id: str) -> Shard:
        """Raises NotOwner."""
        self._refuse(run_id)

    def writer(self, run_id: str) -> Shard:
        """Raises NotOwner."""
        self._refuse(run_id)

    async def reader(self, run_id: str) -> RunReader:
        """Raises NotOwner."""
        self._refuse(run_id)

    async def readers(self) -> Sequence[RunReader]:
        """Raises NotOwner."""
        self._refuse("")

    def shards(self) -> Sequence[Shard]:
        """None."""
        return []

    async def follow(self, client: EtcdClient, pace: Pace | None = None) -> None:
        """Keep up to date with etcd until cancelled. What was known last stands while there is no etcd.

        Args:
            client: Of the etcd; its address names the prefix of the run, which has one shard.
            pace: How time passes.
        """
        pace = pace or Pace()
        key = Keys(client.address.prefix).owner(0)
        backoff = FIRST_BACKOFF
        while True:
            try:
                found = await client.get(key)
                self._take(found.pairs)
                backoff = FIRST_BACKOFF
                async with aclosing(client.watch(key, b"", found.revision + 1)) as watching:
                    async for changes in watching:
                        last = changes[-1]
                        self._take([] if last.deleted else [last.pair])
            except EtcdError as error:
                _log.debug("who serves the run can't be read from etcd", error=str(error))
            await pace.sleep(pace.draw() * backoff)
            backoff = min(2 * backoff, _LONGEST_BACKOFF)

    def _take(self, pairs: Sequence[KeyValue]) -> None:
        self.owner = next((Owner.decode(pair.value).address for pair in pairs), None)
        if self.owner is not None:
            self._known.set()

    def _refuse(self, run_id: str) -> NoReturn:
        raise NotOwner(run_id, self.owner)
