"""Homes of what a test has built by itself: an engine, a store or fenced states, without a shard around it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from rallypoint.rendezvous.runs.engine import RendezvousEngine
from rallypoint.rendezvous.shard.locator import RunLocator, SingleShardLocator
from rallypoint.rendezvous.state.service import FencedStateService
from rallypoint.rendezvous.store.service import StoreService


def home_of(part: RendezvousEngine | StoreService | FencedStateService) -> RunLocator:
    """Where all runs are with that one; whoever asks for another part of a shard finds none."""
    match part:
        case RendezvousEngine():
            parts: dict[str, Any] = {"engine": part, "runs": part}
        case StoreService():
            parts = {"store": part}
        case FencedStateService():
            parts = {"states": part}
    return SingleShardLocator(cast(Any, SimpleNamespace(**parts)))
