"""Where runs are: what the servicers ask for whoever answers for a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rallypoint.rendezvous.reader import RunReader
from rallypoint.rendezvous.shard import Shard


class Home(Protocol):
    """Knows which runs are here, and who else answers for the others."""

    def shard(self, run_id: str) -> Shard:
        """The shard of a run, if this process owns it: for whatever waits or streams.

        Raises:
            NotOwner: It is owned elsewhere, or by nobody at the moment.
        """

    def writer(self, run_id: str) -> Shard:
        """The shard of a run, for what writes; as `shard`, but refused where a write would wait for an operator.

        Raises:
            NotOwner: As of `shard`.
            EtcdFull: Its journal takes nothing at the moment.
        """

    async def reader(self, run_id: str) -> RunReader:
        """Who answers reads of a run here: its shard, or what is durable of it.

        Raises:
            NotOwner: It can't be read here at the moment.
        """

    async def readers(self) -> Sequence[RunReader]:
        """Those of all runs that there are; no run is in two of them.

        Raises:
            NotOwner: Some can't be read here at the moment.
        """

    def shards(self) -> Sequence[Shard]:
        """All shards that this process has, those included whose streams are still open: what a drain must end."""


class OneShard:
    """The home of runs that are all here, for as long as the process lives."""

    def __init__(self, shard: Shard) -> None:
        """All runs are in `shard`."""
        self._shard = shard

    def shard(self, run_id: str) -> Shard:
        """The one."""
        return self._shard

    def writer(self, run_id: str) -> Shard:
        """The one."""
        return self._shard

    async def reader(self, run_id: str) -> RunReader:
        """The one."""
        return self._shard

    async def readers(self) -> Sequence[RunReader]:
        """The one."""
        return [self._shard]

    def shards(self) -> Sequence[Shard]:
        """The one."""
        return [self._shard]
