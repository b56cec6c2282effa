"""Log messages about shards that a replica claimed or released: one for each batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from rallypoint.rendezvous.cluster.ownership import MoveReason
from rallypoint.rendezvous.cluster.view import PreviousOwner
from rallypoint.rendezvous.journal.etcd.keys import Owner
from rallypoint.rpc.logs import get_logger

# ---- Shards usually move in dozens: one message per batch, not per shard.


QUIET = 0.5
"""Seconds without another shard after which a batch ends."""

LONGEST = 5.0
"""Seconds after which a batch is logged even if it continues."""


@dataclass(frozen=True, slots=True)
class RebalanceBatch:
    """Moves with the same cause: number of shards, their runs, and the duration of the slowest in seconds."""

    shards: int = 0
    runs: int = 0
    slowest: float = 0.0


class RebalanceBatches:
    """Adds up shards that move for the same cause and soon after one another, and logs them together."""

    def __init__(self, log_batch: Callable[[Hashable, RebalanceBatch], None]) -> None:
        """`log_batch` is called with the common cause and the totals."""
        self._log_batch = log_batch
        self._batches: dict[Hashable, RebalanceBatch] = {}
        self._ends: asyncio.TimerHandle | None = None
        self._log_by = 0.0

    def add(self, alike: Hashable, *, runs: int, seconds: float = 0.0) -> None:
        """Add the move of a shard.

        Args:
            alike: The cause that it shares with the others of its batch.
            runs: Number of its runs.
            seconds: Duration of the move.
        """
        loop = asyncio.get_running_loop()
        if not self._batches:
            self._log_by = loop.time() + LONGEST
        before = self._batches.get(alike, RebalanceBatch())
        self._batches[alike] = RebalanceBatch(
            before.shards + 1, before.runs + runs, max(before.slowest, seconds)
        )
        if self._ends is not None:
            self._ends.cancel()
        self._ends = loop.call_at(min(loop.time() + QUIET, self._log_by), self.end)

    def end(self) -> None:
        """End the present batches and log them."""
        if self._ends is not None:
            self._ends.cancel()
        batches, self._batches, self._ends = self._batches, {}, None
        for alike, batch in batches.items():
            self._log_batch(alike, batch)


_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _ClaimedShards:
    before: PreviousOwner | None
    why: MoveReason


@dataclass(frozen=True, slots=True)
class _ReleasedShards:
    owner: Owner | None
    why: MoveReason
    declined: bool


class RebalanceLog:
    """Logs the moves of the shards of one session."""

    def __init__(self) -> None:
        """Start without moves."""
        self._batches = RebalanceBatches(_log_moves)

    def claimed(self, before: PreviousOwner | None, why: MoveReason, runs: int, seconds: float) -> None:
        """Add a shard that is served here now.

        Args:
            before: Its last owner; None: unknown.
            why: The reason for the claim.
            runs: Number of its runs.
            seconds: Time for which it was free.
        """
        self._batches.add(_ClaimedShards(before, why), runs=runs, seconds=seconds)

    def released(
        self, owner: Owner | None, why: MoveReason, runs: int, seconds: float, *, declined: bool
    ) -> None:
        """Add a shard that was handed over.

        Args:
            owner: The new owner; None: no other replica took it.
            why: The reason for the hand-over.
            runs: Number of its runs.
            seconds: Duration of the hand-over.
            declined: True if no other replica took it in time although there are others.
        """
        self._batches.add(_ReleasedShards(owner, why, declined), runs=runs, seconds=seconds)

    def end(self) -> None:
        """Log now all moves not logged yet."""
        self._batches.end()


def _log_moves(moved: Hashable, batch: RebalanceBatch) -> None:
    counts = {"shards": batch.shards, "runs": batch.runs, "seconds": round(batch.slowest, 3)}
    match moved:
        case _ClaimedShards(None, why):
            _log.info("took free shards", **counts, why=why.value)
        case _ClaimedShards(PreviousOwner(owner, ended), why):
            how = "its lease ended" if ended else "it handed them over"
            owner_fields = {"before": owner.replica, "address": owner.address}
            _log.info("took shards over", **counts, **owner_fields, how=how, why=why.value)
        case _ReleasedShards(None, why, True):
            _log.warning("released shards; no other replica claimed them yet", **counts, why=why.value)
        case _ReleasedShards(None, why):
            # The normal end of a service that has one replica.
            _log.info("released shards; there is no other replica", **counts, why=why.value)
        case _ReleasedShards(Owner() as owner, why):
            owner_fields = {"to": owner.replica, "address": owner.address}
            _log.info("handed shards over", **counts, **owner_fields, why=why.value)
