"""A tap on the journals in etcd: it passes entries to the referee at the moment at which etcd commits them.

The product packs entries, and merges several appends into one commit. Each commit has a random id in its head, drawn
when it is sent: its entries are kept here under that id until etcd has committed the transaction with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from rallypoint.journal.v1.etcd_pb2 import EtcdHead
from rallypoint.rendezvous.cluster.keys import Keys
from rallypoint.rendezvous.journal.etcd import journal
from rallypoint.rendezvous.journal.etcd.fence import Fence
from rallypoint.rendezvous.journal.etcd.keys import HEAD
from rallypoint.rendezvous.journal.journal import Entry
from rendezvous.core.ledger import Violation, require
from simulation.replicas.etcd_model import Commit
from support.replacing import instead_of


class Given(list[Entry]):
    """The entries of one append."""

    at: float
    """Time of the append, just after the decision. They may be sent later, and again (seed 120676196)."""


@dataclass(slots=True)
class Tap:
    """The observer of every commit of one cluster."""

    keys: Keys
    now: Callable[[], float]
    on_durable: Callable[[Sequence[Entry], float], None]
    on_owner: Callable[[int], None]
    blame: Callable[[Violation], None]
    sent: dict[bytes, Sequence[Given]] = field(default_factory=dict)

    def committed(self, commit: Commit) -> None:
        """etcd has committed a transaction."""
        for put in commit.puts:
            if (shard := self.keys.shard_owned(put.key)) is not None:
                self.on_owner(shard)
            space, _, name = put.key.rpartition(b"/")
            if name != HEAD or b"/shards/" not in put.key:
                continue
            head = EtcdHead.FromString(put.value)
            owner = commit.before.get(self.keys.owner(int(space[-4:], 16)))
            try:
                mine = owner is not None and owner.create_revision == head.fence
                require(mine, "nobody but its owner writes to a shard")
                require(bytes(head.id) in self.sent, "a commit is done once")
            except Violation as violation:
                self.blame(violation)
            for given in self.sent.pop(bytes(head.id), ()):
                self.on_durable(given, given.at)


def tapped(patch: pytest.MonkeyPatch, tap: Tap) -> None:
    """Patch the journals of all replicas to pass the entries that they send to a tap."""
    commit, write = journal.EtcdJournal._commit, journal.EtcdJournal._write

    @instead_of(patch, journal.EtcdJournal, "append")
    async def appending(append: Any, self: Any, entries: Sequence[Entry]) -> None:
        given = Given(entries)
        given.at = tap.now()
        await append(self, given)

    async def committing(self: Any, calls: Sequence[Given]) -> None:
        self._calls = calls
        await commit(self, calls)

    async def writing(self: Any, step: Any) -> None:
        fence: Fence = self._fence
        draw = fence._draw
        calls: Sequence[Given] = getattr(self, "_calls", ()) if step.durable else ()
        if step.durable:
            self._calls = ()

        def drawn(count: int) -> bytes:
            id_ = draw(count)
            tap.sent[id_] = calls
            return id_

        fence._draw = drawn
        try:
            await write(self, step)
        finally:
            fence._draw = draw

    patch.setattr(journal.EtcdJournal, "_commit", committing)
    patch.setattr(journal.EtcdJournal, "_write", writing)
