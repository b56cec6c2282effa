"""What a ledger has to tell, as the messages of the timer service."""

from __future__ import annotations

from rallypoint.timer.durations import to_duration
from rallypoint.timer.ledger import Acknowledge, Change, Completions, End, EndAll, Lesson, Start, Step
from rallypoint.timer.v1 import timer_service_pb2 as pb

_MOST_COUNT = 2**32 - 1  # of a uint32


def action_of(change: Change) -> pb.SuperviseAction:
    """The action that tells a change."""
    match change:
        case Start():
            return pb.SuperviseAction(acquire=_acquire(change))
        case End():
            return pb.SuperviseAction(release=pb.Release(worker_id=change.worker_id, scope=change.scope))
        case EndAll():
            return pb.SuperviseAction(clear=pb.Clear(worker_id=change.worker_id))
        case Acknowledge():
            return pb.SuperviseAction(acknowledge=pb.Acknowledge(expiry_id=change.expiry_id))
        case Completions():
            count, longest = min(change.count, _MOST_COUNT), to_duration(change.longest)
            return pb.SuperviseAction(observe=pb.Observe(scope=change.scope, count=count, longest=longest))
        case Lesson():
            longest = to_duration(change.longest)
            learned = pb.Learned(scope=change.scope, count=change.count, longest=longest)
            return pb.SuperviseAction(learned=learned)
        case Step():
            elapsed = to_duration(change.elapsed)
            return pb.SuperviseAction(
                progress=pb.Progress(
                    worker_id=change.worker_id, rank=change.rank, step=change.step, elapsed=elapsed
                )
            )


def _acquire(start: Start) -> pb.Acquire:
    acquire = pb.Acquire(
        worker_id=start.worker_id,
        scope=start.scope,
        elapsed=to_duration(start.elapsed),
        sequence=start.sequence,
    )
    if start.learned_as:
        acquire.learned_as = start.learned_as
    else:
        acquire.after.CopyFrom(to_duration(start.after))
    return acquire
