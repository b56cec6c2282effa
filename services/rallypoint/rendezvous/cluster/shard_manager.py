"""The shards that a replica serves in one session with etcd: claimed, handed over, released or dropped."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from rallypoint.etcd.errors import EtcdError
from rallypoint.rendezvous.base.errors import NotOwner, Refusal
from rallypoint.rendezvous.cluster.ownership import (
    Claim,
    DeleteOwnerKey,
    HandOver,
    MoveSettings,
    ReplicaState,
    declined_until,
)
from rallypoint.rendezvous.cluster.rebalance_log import ClaimedShards, RebalanceLog, ReleasedShards
from rallypoint.rendezvous.cluster.view import Cluster
from rallypoint.rendezvous.journal.etcd.keys import OwnedElsewhere, Owner
from rallypoint.rendezvous.journal.journal import JournalError
from rallypoint.rendezvous.shard.shard import Shard
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.loop import Notifier

_log = get_logger(__name__)

# Seconds until the retry of a failed claim: the first, doubled each time, up to the second.
_RETRY = 1.0
_LONGEST_RETRY = 30.0
# Seconds after which the same error is logged as a warning again.
_LOG_AGAIN_AFTER = 30.0
# Limits of a hand-over, seconds: for the step in flight and the last commit; and for the claim of the next owner. Past
# the first the shard is dropped, which loses nothing that was acknowledged or published; past the second its clients
# look for the owner themselves.
_RETIRE_WITHIN = 5.0
_SUCCESSOR_WITHIN = 3.0


OpenShard: TypeAlias = Callable[[int, Callable[[BaseException], None]], Awaitable[Shard]]
"""Becomes the owner of a shard and reads it; the second argument is called if its journal breaks.

Raises OwnedElsewhere if another process owns it; JournalError or EtcdError if it can't be claimed now.
"""

ReleaseShard: TypeAlias = Callable[[int, int], Awaitable[None]]
"""Deletes an owner key of ours that has this create_revision. After an EtcdError it is unknown if it was deleted."""


@dataclass(slots=True)
class _Trouble:
    """Consecutive problems of a shard: failed claims, or declined offers."""

    times: int
    until: float
    cause: str = ""


class ShardManager:
    """The shards of one session. Runs each action it is given in a task, and notifies `changes` at the end of each."""

    def __init__(
        self,
        cluster: Cluster,
        me: Owner,
        *,
        open_shard: OpenShard,
        release: ReleaseShard,
        changes: Notifier,
        moves: MoveSettings,
        clock: Callable[[], float],
    ) -> None:
        """Serve nothing yet.

        Args:
            changes: Notified of every change of the served shards, and by the caller of changes of the cluster.
            moves: Speed of moving shards.
            clock: Monotonic seconds.
        """
        self._cluster = cluster
        self._me = me
        self._open_shard = open_shard
        self._release = release
        self._changes = changes
        self._moves = moves
        self._clock = clock
        self.serving: dict[int, Shard] = {}
        self._claiming: set[int] = set()
        # With the shard that must still be ended, if there is one.
        self._leaving: dict[int, Shard | None] = {}
        # Fencing tokens of served and claimed shards, as seen in etcd.
        self._fences: dict[int, int] = {}
        self._failed: dict[int, _Trouble] = {}
        self._broken_early: dict[int, BaseException] = {}
        self._declined: dict[int, _Trouble] = {}
        self._declined_by: float = cluster.live_since
        self._tasks: set[asyncio.Task[None]] = set()
        self._log_again_at: dict[str, float] = {}
        self._rebalance_log = RebalanceLog()
        self.draining = False
        # True if the runs here are over, so that no other replica is needed for their shards.
        self.finished = False
        self._over = False

    def state(self) -> ReplicaState:
        """Return the present state, for a decision."""
        if self._declined_by != self._cluster.live_since:
            # There are other replicas now, which may take shards that were declined before.
            self._declined_by = self._cluster.live_since
            self._declined.clear()
        return ReplicaState(
            name=self._me.replica,
            live=() if self.finished else self._cluster.live,
            live_since=self._cluster.live_since,
            free=self._cluster.free,
            owned=[
                shard
                for shard, owned in self._cluster.owned.items()
                if owned.owner.instance == self._me.instance
            ],
            serving=self.serving,
            claiming=self._claiming,
            leaving=self._leaving,
            not_before={shard: trouble.until for shard, trouble in self._failed.items()},
            declined={shard: trouble.until for shard, trouble in self._declined.items()},
            draining=self.draining,
        )

    def obstacle(self, number: int) -> str:
        """Return why a shard without an owner can't be claimed here, for people; empty: unknown."""
        trouble = self._failed.get(number)
        return trouble.cause if trouble is not None and number in self._cluster.free else ""

    @property
    def empty(self) -> bool:
        """True if nothing is served and no action is in flight."""
        return not self.serving and not self._claiming and not self._leaving

    def shards(self) -> list[Shard]:
        """Return all shards that have not ended, with those of which only streams are still open."""
        return [*self.serving.values(), *(shard for shard in self._leaving.values() if shard is not None)]

    def begin(self, action: Claim | HandOver | DeleteOwnerKey) -> None:
        """Begin an action."""
        match action:
            case Claim(shard):
                self._claiming.add(shard)
                self._fences.pop(shard, None)
                self._start(self._claim(action, self._cluster.free.get(shard, self._clock())))
            case HandOver(shard):
                leaving = self._leaving[shard] = self.serving.pop(shard)
                self._start(self._hand_over(action, leaving))
            case DeleteOwnerKey(shard):
                self._leaving[shard] = None
                self._start(self._delete_owner_key(shard))

    def drop_lost_shards(self) -> None:
        """Drop at once the shards whose owner keys are gone from etcd: call it after every change of the cluster.

        While the session is held, only an operator can take a shard, by deleting our owner key. From then on another
        replica may claim it. Our next commit would detect that; but reads are answered without a commit.
        """
        dropped = []
        for number in [*self.serving, *self._claiming]:
            owned = self._cluster.owned.get(number)
            if owned is not None and owned.owner.instance == self._me.instance:
                self._fences.setdefault(number, owned.fence)
            fence = self._fences.get(number)
            gone = fence is not None and (owned is None or owned.fence != fence)
            if gone and (shard := self.serving.pop(number, None)) is not None:
                shard.halt(NotOwner)
                dropped.append(number)
                self._leaving[number] = shard
                self._start(self._abandon(number, shard))
        if dropped:
            _log.warning("owner keys were deleted by another etcd client; shards dropped", shards=dropped)

    def flush_log(self) -> None:
        """Log moves that were held back because more might follow."""
        self._rebalance_log.end()

    def halt(self) -> None:
        """End everything at once: the session is lost, or over. Never raises; no action can begin any more."""
        self._over = True
        self._rebalance_log.end()
        for task in self._tasks:
            task.cancel()
        for shard in self.shards():
            shard.halt(NotOwner)

    async def ended(self) -> None:
        """Return when nothing runs any more, after `halt`."""
        serving, self.serving = self.serving, {}
        await asyncio.gather(*(shard.drop(NotOwner) for shard in serving.values()))
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._changes.notify()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.exception("a shard could not be moved", error=error)
        self._changes.notify()

    async def _claim(self, claim: Claim, free_since: float) -> None:
        number = claim.shard
        try:
            shard = await self._open_shard(number, partial(self._broke, number))
        except OwnedElsewhere:
            # Another replica was quicker; the watch will show which. If it does not, the claim is repeated.
            self._failed[number] = _Trouble(0, self._clock() + _RETRY)
        except (JournalError, EtcdError) as error:
            self._fail(number, error, "a shard can't be claimed")
        except Exception as error:  # a bug: it must not be retried again and again without a pause
            self._fail(number, error, "a shard can't be claimed")
            raise
        else:
            self.serving[number] = shard
            self.drop_lost_shards()
            _log.debug("shard claimed", shard=number, why=claim.why.value)
            before, seconds = self._cluster.before.get(number), self._clock() - free_since
            moved = ClaimedShards(before, claim.why)
            self._rebalance_log.add(moved, runs=shard.engine.run_count, seconds=seconds)
            if (early := self._broken_early.pop(number, None)) is not None:
                self._broke(number, early)
        finally:
            self._claiming.discard(number)
            self._broken_early.pop(number, None)

    def _broke(self, number: int, error: BaseException) -> None:
        """Give up a shard whose journal is broken: the replica that claims it next reads it again."""
        if number in self._claiming and number not in self.serving:
            self._broken_early[number] = error
        shard = self.serving.pop(number, None)
        if shard is None or self._over:
            return  # it is being handed over, or dropped with all others
        self._fail(number, error, "a shard's journal broke")
        self._leaving[number] = shard
        self._start(self._abandon(number, shard))

    async def _abandon(self, number: int, shard: Shard) -> None:
        try:
            await shard.drop(NotOwner)
        finally:
            del self._leaving[number]

    def _fail(self, number: int, error: BaseException, event: str) -> None:
        before = self._failed.get(number)
        # A successful claim does not reset this: the journal may break with the first write.
        in_a_row = before is not None and self._clock() <= before.until + _LONGEST_RETRY
        times = before.times + 1 if before is not None and in_a_row else 1
        delay = min(_RETRY * 2.0 ** min(times - 1, 16), _LONGEST_RETRY)
        self._failed[number] = _Trouble(times, self._clock() + delay, str(error))
        # An error of one shard mostly concerns them all, and lasts: it is a warning only now and then.
        log = _log.debug
        if self._log_again_at.get(event, -math.inf) <= self._clock():
            self._log_again_at[event] = self._clock() + _LOG_AGAIN_AFTER
            log = _log.warning
        log(event, shard=number, error=str(error), retry_after=delay)

    async def _hand_over(self, move: HandOver, shard: Shard) -> None:
        number = move.shard
        runs, began = shard.engine.run_count, self._clock()
        try:
            await self._retire(number, shard)
            owner = await self._successor(number) if move.to is not None else None
            shard.end_streams(_redirect_to(owner))
            _log.debug(
                "shard handed over", shard=number, to=owner.replica if owner else None, why=move.why.value
            )
            if not self.finished:
                declined = owner is None and move.to is not None and self._others()
                moved = ReleasedShards(owner, move.why, declined)
                self._rebalance_log.add(moved, runs=runs, seconds=self._clock() - began)
            if owner is None or owner.replica != move.to:
                times = self._declined[number].times + 1 if number in self._declined else 1
                self._declined[number] = _Trouble(times, declined_until(times, self._clock(), self._moves))
            else:
                self._declined.pop(number, None)
        except asyncio.CancelledError:
            await shard.drop(NotOwner)
            raise
        finally:
            del self._leaving[number]

    async def _retire(self, number: int, shard: Shard) -> None:
        try:
            async with asyncio.timeout(_RETIRE_WITHIN):
                await shard.retire(NotOwner)
        except (TimeoutError, JournalError, EtcdError) as error:
            _log.warning(
                "a shard ended without its last commit", shard=number, error=str(error) or "too slow"
            )
            await shard.drop(NotOwner)

    async def _successor(self, number: int) -> Owner | None:
        """Return the new owner of a released shard; None if none claims it in time, or no other replica is left."""

        def taken() -> bool:
            owned = self._cluster.owned.get(number)
            return owned is not None and owned.owner.instance != self._me.instance

        # At the end of a job its replicas leave together: the preferred one may be gone by now.
        await self._changes.until(lambda: taken() or not self._others(), _SUCCESSOR_WITHIN)
        return self._cluster.owned[number].owner if taken() else None

    def _others(self) -> bool:
        """True if there are other replicas that could claim a released shard."""
        return any(name != self._me.replica for name in self._cluster.live)

    async def _delete_owner_key(self, number: int) -> None:
        try:
            owned = self._cluster.owned.get(number)
            if owned is None or owned.owner.instance != self._me.instance:
                return  # it was deleted since the decision
            await self._release(number, owned.fence)

            # Until the watch reports the deletion, it would seem not yet done.
            def gone() -> bool:
                now = self._cluster.owned.get(number)
                return now is None or now.fence != owned.fence

            await self._changes.until(gone, _RETRY)
        except EtcdError as error:
            _log.debug("an owner key was not deleted", shard=number, error=str(error))
        finally:
            del self._leaving[number]


def _redirect_to(owner: Owner | None) -> Refusal:
    address = owner.address if owner is not None else None
    return lambda run_id: NotOwner(run_id, address)
