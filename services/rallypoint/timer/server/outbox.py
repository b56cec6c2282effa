"""What one subscriber is to be told, in bounded room, however slowly it reads."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from itertools import islice

from rallypoint.timer.core.progress import RunProgress, Stall, WorkerProgress
from rallypoint.timer.core.values import (
    MAX_NAME_BYTES,
    MAX_SCOPE_BYTES,
    Expiry,
    Learned,
    Refused,
    ScopeView,
    TimerState,
    TimerView,
)
from rallypoint.timer.durations import to_duration
from rallypoint.timer.v1 import timer_service_pb2 as pb

# Answers to requests that were not taken, kept for a subscriber that doesn't read. Older ones are dropped.
_MOST_REFUSALS = 1000
# Scopes whose latest is kept for it; older ones are dropped: the copy of a reader that slow is of little use.
_MOST_LEARNED = 10_000
# Of each kind told in one message, so that it stays below gRPC's 4 MiB.
_MOST_AT_ONCE = 1000


class Refusal:
    """An acquire of a subscriber that was not taken."""

    __slots__ = ("error", "scope", "sequence", "worker_id")

    def __init__(self, worker_id: str, scope: str, sequence: int, error: Refused) -> None:
        # A name that is too long is the very thing that is refused: a thousand of them must not fill the memory.
        self.worker_id = worker_id[:MAX_NAME_BYTES]
        self.scope = scope[:MAX_SCOPE_BYTES]
        self.sequence = sequence
        self.error = error


@dataclass(frozen=True, slots=True)
class OutboxBatch:
    """What there is to tell, in the order of its fields."""

    refusals: list[Refusal]
    learned: list[Learned]
    stall: Stall | None
    expiries: list[Expiry]


class Outbox:
    """What one subscriber is to be told. Bounded: what is told again takes the place of its first."""

    def __init__(self) -> None:
        self._expiries: dict[int, Expiry] = {}
        self._refusals: deque[Refusal] = deque(maxlen=_MOST_REFUSALS)
        # By scope, and whether it is to be forgotten: one that is learned anew has to be forgotten first.
        self._learned: dict[tuple[str, bool], Learned] = {}
        self._stall: Stall | None = None
        self._ended = False
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def offer(self, expiry: Expiry) -> None:
        """An expiry to tell."""
        self._expiries[expiry.expiry_id] = expiry
        self._changed.set()

    def refuse(self, refusal: Refusal) -> None:
        """A refusal to tell."""
        self._refusals.append(refusal)
        self._changed.set()

    def learn(self, learned: Learned) -> None:
        """What the run has learned of a scope, or, with a count of 0, that it is to be forgotten. Only the latest of
        each is told, and what was learned before it was forgotten is not."""
        forgotten = not learned.count
        if forgotten:
            self._learned.pop((learned.scope, False), None)
        self._learned[learned.scope, forgotten] = learned
        if len(self._learned) > _MOST_LEARNED:
            del self._learned[next(iter(self._learned))]
        self._changed.set()

    def stall(self, stall: Stall) -> None:
        """Whether the run stalls; only the latest is told."""
        self._stall = stall
        self._changed.set()

    def end(self, error: Exception | None = None) -> None:
        """Nothing more comes: the stream ends, with the error if there is one. The first call counts."""
        if not self._ended:
            self._ended, self._error = True, error
            self._changed.set()

    async def take(self) -> OutboxBatch | None:
        """Waits for what there is to tell; None at the end. Raises the error that `end` was given."""
        await self._changed.wait()
        if self._error is not None:
            raise self._error
        mail = OutboxBatch(
            list(self._refusals),
            [self._learned.pop(each) for each in list(islice(self._learned, _MOST_AT_ONCE))],
            self._stall,
            [self._expiries.pop(each) for each in list(islice(self._expiries, _MOST_AT_ONCE))],
        )
        self._refusals.clear()
        self._stall = None
        if self._ended and mail == _NOTHING:
            return None
        if not self._ended and not self._expiries and not self._learned:
            self._changed.clear()
        return mail


_NOTHING = OutboxBatch([], [], None, [])


# ---- What the watchdog has to tell, as messages of timer_service.proto.


STATES = {
    TimerState.COUNTING: pb.TIMER_STATE_COUNTING,
    TimerState.OFFERED: pb.TIMER_STATE_OFFERED,
    TimerState.UNCLAIMED: pb.TIMER_STATE_UNCLAIMED,
    TimerState.LEARNING: pb.TIMER_STATE_LEARNING,
}


def mail_response(mail: OutboxBatch) -> pb.SuperviseResponse:
    """All of the mail, in its order."""
    stall = [pb.SuperviseEvent(stalled=stalled(mail.stall))] if mail.stall is not None else []
    return pb.SuperviseResponse(
        events=[
            *(pb.SuperviseEvent(refused=refused(each)) for each in mail.refusals),
            *(pb.SuperviseEvent(learned=learned(each)) for each in mail.learned),
            *stall,
            *(pb.SuperviseEvent(expired=expired(each)) for each in mail.expiries),
        ]
    )


def refused(refusal: Refusal) -> pb.Refused:
    """An action that was not taken."""
    return pb.Refused(
        worker_id=refusal.worker_id,
        scope=refusal.scope,
        sequence=refusal.sequence,
        reason=refusal.error.reason,
        message=str(refusal.error),
    )


def learned(value: Learned) -> pb.Learned:
    """What a run has learned of a scope."""
    return pb.Learned(scope=value.scope, count=value.count, longest=to_duration(value.longest))


def expired(expiry: Expiry) -> pb.Expired:
    """A timer that ran out."""
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
    """A run that stalls, or does so no more."""
    return pb.Stalled(
        over=stall.over,
        idle=to_duration(stall.idle),
        first=worker_progress(stall.first),
        workers=stall.workers,
        at_same_step=stall.at_same_step,
    )


def worker_progress(worker: WorkerProgress) -> pb.WorkerProgress:
    """How far a worker has come."""
    return pb.WorkerProgress(
        node_id=worker.node_id,
        worker_id=worker.worker_id,
        rank=worker.rank,
        step=worker.step,
        idle=to_duration(worker.idle),
    )


def run_progress(progress: RunProgress) -> pb.GetProgressResponse:
    """How far a run has come."""
    return pb.GetProgressResponse(
        workers=progress.workers,
        lowest_step=progress.lowest_step,
        highest_step=progress.highest_step,
        idle=to_duration(progress.idle),
        stalled=stalled(progress.stall) if progress.stall is not None else None,
        slowest=map(worker_progress, progress.slowest),
        stall_after=to_duration(progress.stall_after) if progress.stall_after is not None else None,
    )


def timer(view: TimerView) -> pb.Timer:
    """A timer in a list."""
    return pb.Timer(
        **view.name._asdict(),
        after=to_duration(view.after) if view.after is not None else None,
        remaining=to_duration(view.remaining) if view.remaining is not None else None,
        state=STATES[view.state],
        offers=view.offers,
        learned_as=view.learned_as,
    )


def scope(view: ScopeView) -> pb.Scope:
    """A scope in a list."""
    return pb.Scope(
        run_id=view.run_id,
        scope=view.learned.scope,
        count=view.learned.count,
        longest=to_duration(view.learned.longest),
        after=to_duration(view.after) if view.after is not None else None,
        timers=view.timers,
    )
