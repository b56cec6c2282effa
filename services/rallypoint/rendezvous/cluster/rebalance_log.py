"""Log messages about shards that a replica claimed or released: one for each batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rallypoint.rendezvous.cluster.ownership import MoveReason
from rallypoint.rendezvous.cluster.view import PreviousOwner
from rallypoint.rendezvous.journal.etcd.keys import Owner
from rallypoint.rpc.logs import get_logger

_log = get_logger(__name__)

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


@dataclass(frozen=True, slots=True)
class ClaimedShards:
    """Shards that are served here now; `before`: their last owner; None: unknown."""

    before: PreviousOwner | None
    why: MoveReason


@dataclass(frozen=True, slots=True)
class ReleasedShards:
    """Shards that were handed over.

    Attributes:
        owner: The new owner; None: no other replica took them.
        why: The reason for the hand-over.
        declined: True if no other replica took them in time although there are others.
    """

    owner: Owner | None
    why: MoveReason
    declined: bool


def _log_moves(moved: ClaimedShards | ReleasedShards, batch: RebalanceBatch) -> None:
    counts = {"shards": batch.shards, "runs": batch.runs, "seconds": round(batch.slowest, 3)}
    match moved:
        case ClaimedShards(None, why):
            _log.info("took free shards", **counts, why=why.value)
        case ClaimedShards(PreviousOwner(owner, ended), why):
            how = "its lease ended" if ended else "it handed them over"
            owner_fields = {"before": owner.replica, "address": owner.address}
            _log.info("took shards over", **counts, **owner_fields, how=how, why=why.value)
        case ReleasedShards(None, why, True):
            _log.warning("released shards; no other replica claimed them yet", **counts, why=why.value)
        case ReleasedShards(None, why):
            # The normal end of a service that has one replica.
            _log.info("released shards; there is no other replica", **counts, why=why.value)
        case ReleasedShards(Owner() as owner, why):
            owner_fields = {"to": owner.replica, "address": owner.address}
            _log.info("handed shards over", **counts, **owner_fields, why=why.value)


class RebalanceLog:
    """Adds up shards that move for the same cause and soon after one another, and logs them together."""

    def __init__(
        self, log_batch: Callable[[ClaimedShards | ReleasedShards, RebalanceBatch], None] = _log_moves
    ) -> None:
        """`log_batch` is called with the common cause and the totals."""
        self._log_batch = log_batch
        self._batches: dict[ClaimedShards | ReleasedShards, RebalanceBatch] = {}
        self._ends: asyncio.TimerHandle | None = None
        self._log_by = 0.0

    def add(self, moved: ClaimedShards | ReleasedShards, *, runs: int, seconds: float) -> None:
        """Add a shard.

        Args:
            moved: The cause that it shares with the others of its batch.
            runs: Number of its runs.
            seconds: Time for which it was free before a claim; duration of a hand-over.
        """
        loop = asyncio.get_running_loop()
        if not self._batches:
            self._log_by = loop.time() + LONGEST
        before = self._batches.get(moved, RebalanceBatch())
        self._batches[moved] = RebalanceBatch(
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
        for moved, batch in batches.items():
            self._log_batch(moved, batch)
