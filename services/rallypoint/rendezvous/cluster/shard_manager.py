"""The shards that a replica serves in one session with etcd: claimed, handed over, let go of, or dropped."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Protocol

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
from rallypoint.rendezvous.cluster.rebalance_log import RebalanceLog
from rallypoint.rendezvous.cluster.view import ChangeNotifier, Cluster
from rallypoint.rendezvous.journal.etcd.keys import OwnedElsewhere, Owner
from rallypoint.rendezvous.journal.journal import JournalError
from rallypoint.rendezvous.shard.shard import Shard
from rallypoint.rpc.logs import get_logger

_log = get_logger(__name__)

# After a claim that failed, seconds: the first, twice as long each time, up to the second.
_RETRY = 1.0
_LONGEST_RETRY = 30.0
# After so long the same trouble is worth another line in the log, seconds.
_SAY_AGAIN = 30.0
# What a hand-over may take, seconds: the step under way and the last commit; and the claim of whoever comes next. Past
# the first the shard is dropped, which loses nothing that anybody was told; past the second its clients look for the
# owner themselves.
_RETIRE_WITHIN = 5.0
_SUCCESSOR_WITHIN = 3.0


class OpenShard(Protocol):
    """Becomes the owner of a shard."""

    def __call__(self, shard: int, on_failure: Callable[[BaseException], None], /) -> Awaitable[Shard]:
        """Claim a shard and read it; `on_failure` is told once its journal breaks.

        Raises:
            OwnedElsewhere: Somebody has it.
            JournalError, EtcdError: It can't be had now.
        """


class ReleaseShard(Protocol):
    """Deletes an owner key of ours."""

    def __call__(self, shard: int, fence: int, /) -> Awaitable[None]:
        """Delete it if it is still the one with this create_revision.

        Raises:
            EtcdError: Whether it was deleted is unknown, or it was refused.
        """


@dataclass(slots=True)
class _Trouble:
    """What a shard has been through in a row: failed claims, or offers that were declined."""

    times: int
    until: float
    cause: str = ""


class ShardManager:
    """The shards of one session. What it is told to begin it carries out on its own, and tells `news` of each end."""

    def __init__(
        self,
        cluster: Cluster,
        me: Owner,
        *,
        open_shard: OpenShard,
        release: ReleaseShard,
        news: ChangeNotifier,
        moves: MoveSettings,
        clock: Callable[[], float],
    ) -> None:
        """Serve nothing yet.

        Args:
            cluster: What is known of all replicas.
            me: This replica.
            open_shard: How a shard is claimed.
            release: How an owner key is deleted.
            news: Told of every change of what is served; whoever changes the cluster tells it too.
            moves: How fast shards move.
            clock: Monotonic seconds.
        """
        self._cluster = cluster
        self._me = me
        self._open_shard = open_shard
        self._release = release
        self._changes = news
        self._moves = moves
        self._clock = clock
        self.serving: dict[int, Shard] = {}
        self._claiming: set[int] = set()
        # With the shard that still has to be ended, if there is one.
        self._leaving: dict[int, Shard | None] = {}
        # Of what is served or claimed, the fencing token that etcd was seen to have given us.
        self._fences: dict[int, int] = {}
        self._failed: dict[int, _Trouble] = {}
        self._broken_early: dict[int, BaseException] = {}
        self._declined: dict[int, _Trouble] = {}
        self._declined_by: float = cluster.live_since
        self._tasks: set[asyncio.Task[None]] = set()
        self._log_again_at: dict[str, float] = {}
        self._rebalance_log = RebalanceLog()
        self.draining = False
        # Whether the runs here are over, so that no other replica is needed for their shards.
        self.finished = False
        self._over = False

    def state(self) -> ReplicaState:
        """What is known now, for a decision."""
        if self._declined_by != self._cluster.live_since:
            # Others are there now, who may take what was declined before.
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
        """Why a shard that nobody owns can't be claimed here, for people; empty: nothing is known of that."""
        trouble = self._failed.get(number)
        return trouble.cause if trouble is not None and number in self._cluster.free else ""

    @property
    def empty(self) -> bool:
        """Whether nothing is served, and nothing under way."""
        return not self.serving and not self._claiming and not self._leaving

    def shards(self) -> list[Shard]:
        """All that have not ended, those included whose streams only are open still."""
        return [*self.serving.values(), *(shard for shard in self._leaving.values() if shard is not None)]

    def begin(self, action: Claim | HandOver | DeleteOwnerKey) -> None:
        """Begin what was decided."""
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
                self._start(self._let_go(shard))

    def drop_lost_shards(self) -> None:
        """Drop at once what somebody took from us in etcd: to be called whenever the cluster has changed.

        While the session is held, nobody can but an operator who deletes our owner keys. From then on another replica
        may claim the shard. Our next commit would find out; but what is only read is answered without one.
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
            _log.warning("somebody deleted owner keys in etcd; their shards were dropped", shards=dropped)

    def flush_log(self) -> None:
        """Log what moved and was not told yet, since more might follow."""
        self._rebalance_log.end()

    def halt(self) -> None:
        """End everything at once: the session is lost, or over. Never raises; nothing can be begun any more."""
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
            # Somebody was quicker; the watch will tell who. Should it not, the claim is repeated.
            self._failed[number] = _Trouble(0, self._clock() + _RETRY)
        except (JournalError, EtcdError) as error:
            self._fail(number, error, "a shard can't be claimed")
        except Exception as error:  # a bug: it must not be tried again and again without a pause
            self._fail(number, error, "a shard can't be claimed")
            raise
        else:
            self.serving[number] = shard
            self.drop_lost_shards()
            _log.debug("shard claimed", shard=number, why=claim.why.value)
            before, seconds = self._cluster.before.get(number), self._clock() - free_since
            self._rebalance_log.claimed(before, claim.why, shard.engine.run_count, seconds)
            if (early := self._broken_early.pop(number, None)) is not None:
                self._broke(number, early)
        finally:
            self._claiming.discard(number)
            self._broken_early.pop(number, None)

    def _broke(self, number: int, error: BaseException) -> None:
        """A shard's journal takes no more: what it held is read anew, by whoever claims it next."""
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
        # A claim that succeeds is no cure: the journal may break with the first thing that is written.
        in_a_row = before is not None and self._clock() <= before.until + _LONGEST_RETRY
        times = before.times + 1 if before is not None and in_a_row else 1
        delay = min(_RETRY * 2.0 ** min(times - 1, 16), _LONGEST_RETRY)
        self._failed[number] = _Trouble(times, self._clock() + delay, str(error))
        # What stops one shard mostly stops them all, and goes on doing so: it is said now and then.
        say = _log.debug
        if self._log_again_at.get(event, -math.inf) <= self._clock():
            self._log_again_at[event] = self._clock() + _SAY_AGAIN
            say = _log.warning
        say(event, shard=number, error=str(error), retry_after=delay)

    async def _hand_over(self, move: HandOver, shard: Shard) -> None:
        number = move.shard
        runs, began = shard.engine.run_count, self._clock()
        try:
            await self._retire(number, shard)
            owner = await self._successor(number) if move.to is not None else None
            shard.end_streams(_gone_to(owner))
            _log.debug(
                "shard handed over", shard=number, to=owner.replica if owner else None, why=move.why.value
            )
            if not self.finished:
                declined = owner is None and move.to is not None and self._others()
                self._rebalance_log.released(owner, move.why, runs, self._clock() - began, declined=declined)
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
        """Who owns a shard that we gave up; None if nobody does in time, or nobody is left who could."""

        def taken() -> bool:
            owned = self._cluster.owned.get(number)
            return owned is not None and owned.owner.instance != self._me.instance

        # At the end of a job its replicas leave together: the one that was to have the shard may have gone meanwhile.
        await self._changes.until(lambda: taken() or not self._others(), _SUCCESSOR_WITHIN)
        return self._cluster.owned[number].owner if taken() else None

    def _others(self) -> bool:
        """Whether other replicas are there that could claim what we give up."""
        return any(name != self._me.replica for name in self._cluster.live)

    async def _let_go(self, number: int) -> None:
        try:
            owned = self._cluster.owned.get(number)
            if owned is None or owned.owner.instance != self._me.instance:
                return  # it went between the decision and this
            await self._release(number, owned.fence)

            # Until the watch tells of it, it would look as if it were still to be done.
            def gone() -> bool:
                now = self._cluster.owned.get(number)
                return now is None or now.fence != owned.fence

            await self._changes.until(gone, _RETRY)
        except EtcdError as error:
            _log.debug("an owner key was not deleted", shard=number, error=str(error))
        finally:
            del self._leaving[number]


def _gone_to(owner: Owner | None) -> Refusal:
    address = owner.address if owner is not None else None
    return lambda run_id: NotOwner(run_id, address)
