"""The lines by which a replica tells people that shards came to it, or went: one for each wave of those that did."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from rallypoint.rendezvous.cluster.ownership import MoveReason
from rallypoint.rendezvous.cluster.view import PreviousOwner
from rallypoint.rendezvous.journal.etcd.keys import Owner
from rallypoint.rpc.logs import get_logger

# ---- Shards move by the dozen, as a rule: who reads the log is told of each wave once, not of each shard.


QUIET = 0.5
"""Seconds without another shard after which a wave is over."""

LONGEST = 5.0
"""Seconds after which a wave is told of though it goes on."""


@dataclass(frozen=True, slots=True)
class RebalanceBatch:
    """What moved alike: so many shards, with so many runs, the slowest of them in so many seconds."""

    shards: int = 0
    runs: int = 0
    slowest: float = 0.0


class RebalanceBatches:
    """Adds up shards that move alike and soon after one another, and tells of them together."""

    def __init__(self, tell: Callable[[Hashable, RebalanceBatch], None]) -> None:
        """`tell` is called with what is alike, and with how many it was."""
        self._log_batch = tell
        self._batches: dict[Hashable, RebalanceBatch] = {}
        self._ends: asyncio.TimerHandle | None = None
        self._log_by = 0.0

    def add(self, alike: Hashable, *, runs: int, seconds: float = 0.0) -> None:
        """A shard moved.

        Args:
            alike: What it has in common with the others of its wave.
            runs: How many runs are in it.
            seconds: How long it took.
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
        """Tell of what there is now."""
        if self._ends is not None:
            self._ends.cancel()
        waves, self._batches, self._ends = self._batches, {}, None
        for alike, wave in waves.items():
            self._log_batch(alike, wave)


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
    """Tells what happened to the shards of one session."""

    def __init__(self) -> None:
        """Nothing has happened yet."""
        self._batches = RebalanceBatches(_log_moves)

    def claimed(self, before: PreviousOwner | None, why: MoveReason, runs: int, seconds: float) -> None:
        """A shard is served here now.

        Args:
            before: Who owned it; None: nobody whom we saw.
            why: Why it was claimed.
            runs: How many it has.
            seconds: For how long it was free.
        """
        self._batches.add(_ClaimedShards(before, why), runs=runs, seconds=seconds)

    def released(
        self, owner: Owner | None, why: MoveReason, runs: int, seconds: float, *, declined: bool
    ) -> None:
        """A shard was handed over.

        Args:
            owner: Who has it now; None: no other replica took it.
            why: Why it was handed over.
            runs: How many it has.
            seconds: How long that took.
            declined: Whether no other replica took it in time though others are there.
        """
        self._batches.add(_ReleasedShards(owner, why, declined), runs=runs, seconds=seconds)

    def end(self) -> None:
        """Tell at once what was not told yet."""
        self._batches.end()


def _log_moves(moved: Hashable, wave: RebalanceBatch) -> None:
    counts = {"shards": wave.shards, "runs": wave.runs, "seconds": round(wave.slowest, 3)}
    match moved:
        case _ClaimedShards(None, why):
            _log.info("took free shards", **counts, why=why.value)
        case _ClaimedShards(PreviousOwner(owner, ended), why):
            how = "its lease ended" if ended else "it handed them over"
            places = {"before": owner.replica, "address": owner.address}
            _log.info("took shards over", **counts, **places, how=how, why=why.value)
        case _ReleasedShards(None, why, True):
            _log.warning("gave shards up, and nobody took them yet", **counts, why=why.value)
        case _ReleasedShards(None, why):
            # The normal end of a service that has one replica.
            _log.info("gave shards up, no other replica is there", **counts, why=why.value)
        case _ReleasedShards(Owner() as owner, why):
            places = {"to": owner.replica, "address": owner.address}
            _log.info("handed shards over", **counts, **places, why=why.value)
