"""Shards that move alike and soon after one another are logged together, and none is omitted."""

from __future__ import annotations

import asyncio

import pytest

from rallypoint.rendezvous.cluster import rebalance_log
from rallypoint.rendezvous.cluster.ownership import MoveReason
from rallypoint.rendezvous.cluster.rebalance_log import (
    ClaimedShards,
    RebalanceBatch,
    RebalanceLog,
    ReleasedShards,
)
from support.waiting import PATIENCE

CAME = ClaimedShards(None, MoveReason.PREFERRED)
WENT = ReleasedShards(None, MoveReason.DRAIN, declined=False)


async def test_a_batch_is_logged_once_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its totals; a move of another kind is logged separately."""
    monkeypatch.setattr(rebalance_log, "QUIET", 0.05)
    monkeypatch.setattr(rebalance_log, "LONGEST", 3600.0)
    told: asyncio.Queue[tuple[object, RebalanceBatch]] = asyncio.Queue()
    both = RebalanceLog(lambda alike, batch: told.put_nowait((alike, batch)))
    for number in range(64):
        both.add(CAME, runs=2, seconds=number / 100)
    both.add(WENT, runs=5, seconds=0.0)
    assert told.empty()
    async with asyncio.timeout(PATIENCE):
        assert await told.get() == (CAME, RebalanceBatch(64, 128, 0.63))
        assert await told.get() == (WENT, RebalanceBatch(1, 5, 0.0))
    both.add(CAME, runs=1, seconds=0.0)
    async with asyncio.timeout(PATIENCE):
        assert await told.get() == (CAME, RebalanceBatch(1, 1, 0.0))


async def test_a_batch_without_end_is_logged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebalance_log, "QUIET", 3600.0)
    monkeypatch.setattr(rebalance_log, "LONGEST", 0.05)
    told: asyncio.Queue[RebalanceBatch] = asyncio.Queue()
    endless = RebalanceLog(lambda alike, batch: told.put_nowait(batch))
    endless.add(CAME, runs=1, seconds=0.0)
    async with asyncio.timeout(PATIENCE):
        assert await told.get() == RebalanceBatch(1, 1, 0.0)


async def test_a_pending_batch_is_logged_at_the_end() -> None:
    """Once."""
    told: list[RebalanceBatch] = []
    ended = RebalanceLog(lambda alike, batch: told.append(batch))
    ended.add(CAME, runs=1, seconds=0.0)
    ended.end()
    ended.end()
    assert told == [RebalanceBatch(1, 1, 0.0)]
