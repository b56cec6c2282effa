"""The outgoing events of one subscriber, in bounded memory however slowly it reads."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from itertools import islice

from rallypoint.rpc.durations import to_duration
from rallypoint.timer.core.progress import RunProgress, Stall, WorkerProgress
from rallypoint.timer.core.values import (
    MAX_NAME_BYTES,
    MAX_SCOPE_BYTES,
    Expiry,
    Learned,
    ScopeView,
    TimerRefused,
    TimerState,
    TimerView,
)
from rallypoint.timer.v1 import timer_service_pb2 as pb

# Refusals kept for a subscriber that does not read. Older ones are dropped.
_MOST_REFUSALS = 1000
MOST_LEARNED = 10_000
"""Scopes whose latest data is kept for it; older ones are dropped: a reader that slow has little use for its copy."""
# Most events of one kind in one message, so that it stays below gRPC's 4 MiB.
_MOST_AT_ONCE = 1000


class Refusal:
    """A rejected acquire of a subscriber."""

    __slots__ = ("error", "scope", "sequence", "worker_id")

    def __init__(self, worker_id: str, scope: str, sequence: int, error: TimerRefused) -> None:
        # A name that is too long may be the cause of the refusal: a thousand of them must not fill the memory.
        self.worker_id = worker_id[:MAX_NAME_BYTES]
        self.scope = scope[:MAX_SCOPE_BYTES]
        self.sequence = sequence
        self.error = error


@dataclass(frozen=True, slots=True)
class OutboxBatch:
    """The events to send in one message, in the order of the fields."""

    refusals: list[Refusal]
    learned: list[Learned]
    stall: Stall | None
    expiries: list[Expiry]


class Outbox:
    """The events to send to one subscriber. Bounded: a newer event replaces an older one of the same subject."""

    def __init__(self) -> None:
        self._expiries: dict[int, Expiry] = {}
        self._refusals: deque[Refusal] = deque(maxlen=_MOST_REFUSALS)
        # By scope, and whether it is to be forgotten: a scope that is learned again must be forgotten first.
        self._learned: dict[tuple[str, bool], Learned] = {}
        self._stall: Stall | None = None
        self._ended = False
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def offer(self, expiry: Expiry) -> None:
        """Add an expiry."""
        self._expiries[expiry.expiry_id] = expiry
        self._changed.set()

    def refuse(self, refusal: Refusal) -> None:
        """Add a refusal."""
        self._refusals.append(refusal)
        self._changed.set()

    def learn(self, learned: Learned) -> None:
        """Add the learned data of a scope; a count of 0 asks the subscriber to forget it.

        Only the latest of each is sent; data learned before the scope was forgotten is not.
        """
        forgotten = not learned.count
        if forgotten:
            self._learned.pop((learned.scope, False), None)
        self._learned[learned.scope, forgotten] = learned
        if len(self._learned) > MOST_LEARNED:
            del self._learned[next(iter(self._learned))]
        self._changed.set()

    def stall(self, stall: Stall) -> None:
        """Add the start or end of a stall; only the latest is sent."""
        self._stall = stall
        self._changed.set()

    def end(self, error: Exception | None = None) -> None:
        """End the stream, with the error if there is one. Only the first call counts."""
        if not self._ended:
            self._ended, self._error = True, error
            self._changed.set()

    async def take(self) -> OutboxBatch | None:
        """Wait for events and return them; None at the end. Raises the error that was passed to `end`."""
        await self._changed.wait()
        if self._error is not None:
            raise self._error
        batch = OutboxBatch(
            list(self._refusals),
            [self._learned.pop(each) for each in list(islice(self._learned, _MOST_AT_ONCE))],
            self._stall,
            [self._expiries.pop(each) for each in list(islice(self._expiries, _MOST_AT_ONCE))],
        )
        self._refusals.clear()
        self._stall = None
        if self._ended and batch == _NOTHING:
            return None
        if not self._ended and not self._expiries and not self._learned:
            self._changed.clear()
        return batch


_NOTHING = OutboxBatch([], [], None, [])


# ---- Conversion to the messages of timer_service.proto.


STATES = {
    TimerState.COUNTING: pb.TIMER_STATE_COUNTING,
    TimerState.OFFERED: pb.TIMER_STATE_OFFERED,
    TimerState.UNCLAIMED: pb.TIMER_STATE_UNCLAIMED,
    TimerState.LEARNING: pb.TIMER_STATE_LEARNING,
}


def batch_response(batch: OutboxBatch) -> pb.SuperviseResponse:
    """Return all events of the batch, in its order."""
    stall = [pb.SuperviseEvent(stalled=stalled(batch.stall))] if batch.stall is not None else []
    return pb.SuperviseResponse(
        events=[
            *(pb.SuperviseEvent(refused=refused(each)) for each in batch.refusals),
            *(pb.SuperviseEvent(learned=learned(each)) for each in batch.learned),
            *stall,
            *(pb.SuperviseEvent(expired=expired(each)) for each in batch.expiries),
        ]
    )


def refused(refusal: Refusal) -> pb.Refused:
    """Convert a rejected action."""
    return pb.Refused(
        worker_id=refusal.worker_id,
        scope=refusal.scope,
        sequence=refusal.sequence,
        reason=refusal.error.reason,
        message=str(refusal.error),
    )


def learned(value: Learned) -> pb.Learned:
    """Convert a learned scope."""
    return pb.Learned(scope=value.scope, count=value.count, longest=to_duration(value.longest))


def expired(expiry: Expiry) -> pb.Expired:
    """Convert an expired timer."""
    return pb.Expired(
        expiry_id=expiry.expiry_id,
        worker_id=expiry.name.worker_id,
        scope=expiry.name.scope,
        after=to_duration(expiry.after),
        late_by=to_duration(expiry.late_by),
        sequence=expiry.sequence,
        learned=learned(expiry.learned) if expiry.learned is not None else None,
    )


def stalled(stall: Stall) -> pb.Stalled:
    """Convert the start or end of a stall."""
    return pb.Stalled(
        over=stall.over,
        idle=to_duration(stall.idle),
        first=worker_progress(stall.first),
        workers=stall.workers,
        at_same_step=stall.at_same_step,
    )


def worker_progress(worker: WorkerProgress) -> pb.WorkerProgress:
    """Convert the progress of a worker."""
    return pb.WorkerProgress(
        node_id=worker.node_id,
        worker_id=worker.worker_id,
        rank=worker.rank,
        step=worker.step,
        idle=to_duration(worker.idle),
    )


def run_progress(progress: RunProgress, next_page_token: str) -> pb.GetProgressResponse:
    """Convert the progress of a run."""
    return pb.GetProgressResponse(
        workers=progress.workers,
        lowest_step=progress.lowest_step,
        highest_step=progress.highest_step,
        idle=to_duration(progress.idle),
        stalled=stalled(progress.stall) if progress.stall is not None else None,
        slowest=map(worker_progress, progress.slowest),
        stall_after=to_duration(progress.stall_after) if progress.stall_after is not None else None,
        next_page_token=next_page_token,
    )


def timer(view: TimerView) -> pb.Timer:
    """Convert a timer of a list."""
    return pb.Timer(
        **view.name._asdict(),
        after=to_duration(view.after) if view.after is not None else None,
        remaining=to_duration(view.remaining) if view.remaining is not None else None,
        state=STATES[view.state],
        offers=view.offers,
        learned_as=view.learned_as,
    )


def scope(view: ScopeView) -> pb.Scope:
    """Convert a scope of a list."""
    return pb.Scope(
        run_id=view.run_id,
        scope=view.learned.scope,
        count=view.learned.count,
        longest=to_duration(view.learned.longest),
        after=to_duration(view.after) if view.after is not None else None,
        timers=view.timers,
    )
