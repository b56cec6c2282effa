"""What the watchdog has to tell, as messages of timer_service.proto."""

from __future__ import annotations

from rallypoint.timer.durations import to_duration
from rallypoint.timer.mailbox import Mail, Refusal
from rallypoint.timer.run_progress import RunProgress, Stall, WorkerProgress
from rallypoint.timer.v1 import timer_service_pb2 as pb
from rallypoint.timer.values import Expiry, Learned, ScopeView, TimerState, TimerView

STATES = {
    TimerState.COUNTING: pb.TIMER_STATE_COUNTING,
    TimerState.OFFERED: pb.TIMER_STATE_OFFERED,
    TimerState.UNCLAIMED: pb.TIMER_STATE_UNCLAIMED,
    TimerState.LEARNING: pb.TIMER_STATE_LEARNING,
}


def mail_response(mail: Mail) -> pb.SuperviseResponse:
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
