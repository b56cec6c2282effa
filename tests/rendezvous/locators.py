"""Run locators for an engine, a store or fenced states that a test has built without a shard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from rallypoint.rendezvous.runs.engine import RendezvousEngine
from rallypoint.rendezvous.shard.locator import RunLocator, SingleShardLocator
from rallypoint.rendezvous.state.service import FencedStateService
from rallypoint.rendezvous.store.service import StoreService


def locator_of(part: RendezvousEngine | StoreService | FencedStateService) -> RunLocator:
    """A locator that finds all runs at `part`; it has no other part of a shard."""
    match part:
        case RendezvousEngine():
            parts: dict[str, Any] = {"engine": part, "runs": part}
        case StoreService():
            parts = {"store": part}
        case FencedStateService():
            parts = {"states": part}
    return SingleShardLocator(cast(Any, SimpleNamespace(**parts)))
