"""The shards of one session: an action checks the state when it begins, not the state when it was decided."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from rallypoint.etcd.values import KeyValue
from rallypoint.rendezvous.cluster import shard_manager as hosting_module
from rallypoint.rendezvous.cluster.keys import Keys
from rallypoint.rendezvous.cluster.ownership import (
    Claim,
    DeleteOwnerKey,
    HandOver,
    MoveReason,
    MoveSettings,
    decide,
)
from rallypoint.rendezvous.cluster.shard_manager import OpenShard, ReleaseShard, ShardManager
from rallypoint.rendezvous.cluster.view import Cluster, ReplicaRegistration
from rallypoint.rendezvous.journal.etcd.keys import Owner
from rallypoint.rendezvous.journal.journal import JournalError, MemoryJournal
from rallypoint.rendezvous.shard.shard import Shard, open_shard
from rallypoint.rpc.loop import Notifier
from support.log_events import log_events

_KEYS = Keys("/test")
_ME = Owner("replica-0", "10.0.0.1:29400", "mine")
_OTHER = Owner("replica-1", "10.0.0.2:29400", "another's")
_SHARD = 3


def _owned_by(owner: Owner, revision: int) -> KeyValue:
    return KeyValue(_KEYS.owner(_SHARD), owner.encode("id"), revision, revision, 1, 7)


def _manager(
    cluster: Cluster,
    changes: Notifier,
    open_shard: OpenShard,
    release: ReleaseShard,
    clock: Callable[[], float] = lambda: 0.0,
) -> ShardManager:
    moves = MoveSettings()
    return ShardManager(
        cluster, _ME, open_shard=open_shard, release=release, changes=changes, moves=moves, clock=clock
    )


async def _never(shard: int, on_failure: Callable[[BaseException], None], /) -> Shard:
    raise AssertionError("nothing is claimed here")


async def test_a_shard_that_breaks_whenever_it_is_claimed_is_claimed_seldom() -> None:
    """Each claim reads the whole shard: the pauses grow up to half a minute, until it has held for as long."""
    now = 0.0
    broken: list[Callable[[BaseException], None]] = []

    async def claim(shard: int, on_failure: Callable[[BaseException], None], /) -> Shard:
        broken.append(on_failure)
        return await open_shard(MemoryJournal(), on_failure=on_failure)

    async def release(shard: int, fence: int, /) -> None:
        raise AssertionError("no key is seen here")

    changes = Notifier()
    hosting = _manager(Cluster(_KEYS, 8), changes, claim, release, lambda: now)

    async def pause_after_breaking() -> float:
        hosting.begin(Claim(_SHARD, MoveReason.PREFERRED))
        assert await changes.until(lambda: _SHARD in hosting.serving, 30.0)
        broken.pop()(JournalError("etcd refuses"))
        assert await changes.until(lambda: hosting.empty, 30.0)
        return hosting.state().not_before[_SHARD] - now

    pauses = []
    for _ in range(7):
        pauses.append(await pause_after_breaking())
        now += pauses[-1]
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    now += 31
    assert await pause_after_breaking() == 1


@pytest.mark.parametrize("then", [[], [_owned_by(_OTHER, 9)]], ids=["gone", "another's"])
async def test_an_owner_key_that_went_meanwhile_is_not_let_go_of(
    then: list[KeyValue], caplog: pytest.LogCaptureFixture
) -> None:
    """Between the decision to delete our owner key and the deletion, it went: with its lease, or to another owner."""
    released: list[int] = []

    async def release(shard: int, fence: int, /) -> None:
        released.append(fence)

    cluster, changes = Cluster(_KEYS, 8), Notifier()
    cluster.read([_owned_by(_ME, 5)], 0.0)
    hosting = _manager(cluster, changes, _never, release)
    hosting.begin(DeleteOwnerKey(_SHARD))
    cluster.read(then, 1.0)
    assert await changes.until(lambda: hosting.empty, 30.0)
    assert released == []
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


def _registered(owner: Owner) -> KeyValue:
    registration = ReplicaRegistration(owner.address, owner.instance, 0.0, 10.0)
    return KeyValue(_KEYS.replica(owner.replica), registration.encode(), 2, 2, 1, 7)


async def _opened(shard: int, on_failure: Callable[[BaseException], None], /) -> Shard:
    return await open_shard(MemoryJournal(), on_failure=on_failure)


async def _released(shard: int, fence: int, /) -> None:
    """Do nothing: there is no etcd here."""


async def _serving(
    monkeypatch: pytest.MonkeyPatch, successor_within: float
) -> tuple[Cluster, Notifier, ShardManager]:
    """Return a session that serves one shard, beside another replica."""
    monkeypatch.setattr(hosting_module, "_SUCCESSOR_WITHIN", successor_within)
    cluster, changes = Cluster(_KEYS, 8), Notifier()
    hosting = _manager(cluster, changes, _opened, _released)
    hosting.begin(Claim(_SHARD, MoveReason.PREFERRED))
    assert await changes.until(lambda: _SHARD in hosting.serving, 30.0)
    hosting.flush_log()
    cluster.read([_registered(_OTHER)], 0.0)
    return cluster, changes, hosting


async def test_a_successor_that_leaves_as_well_is_not_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a job its replicas leave together, and each may have looked like the others' successor."""
    caplog.set_level(logging.INFO)
    cluster, changes, hosting = await _serving(monkeypatch, 3600.0)
    caplog.clear()
    hosting.begin(HandOver(_SHARD, "replica-1", MoveReason.DRAIN))
    assert not await changes.until(lambda: hosting.empty, 0.1)
    cluster.read([], 1.0)
    changes.notify()
    assert await changes.until(lambda: hosting.empty, 30.0)
    hosting.flush_log()
    (line,) = log_events(caplog.records)
    assert (line.name, line.level) == ("released shards; there is no other replica", "INFO")


async def test_a_successor_that_does_not_come_is_worth_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is live, and does not take the shard: no replica serves its runs."""
    _, changes, hosting = await _serving(monkeypatch, 0.01)
    hosting.begin(HandOver(_SHARD, "replica-1", MoveReason.DRAIN))
    assert await changes.until(lambda: hosting.empty, 30.0)
    hosting.flush_log()
    (line,) = log_events(caplog.records)
    assert (line.name, line.level) == ("released shards; no other replica claimed them yet", "WARNING")


async def test_a_shard_of_ended_runs_needs_no_successor(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another replica may take the shards of ended runs. It is not waited for, and this is not logged."""
    caplog.set_level(logging.INFO)
    _, changes, hosting = await _serving(monkeypatch, 3600.0)
    caplog.clear()
    hosting.draining = hosting.finished = True
    (action,) = decide(hosting.state(), 0.0, MoveSettings()).actions
    assert isinstance(action, HandOver)
    hosting.begin(action)
    assert await changes.until(lambda: hosting.empty, 30.0)
    hosting.flush_log()
    assert caplog.records == []
