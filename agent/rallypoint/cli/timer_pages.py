"""A timer service's answers that come a page at a time, put together."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.timer.v1 import timer_service_pb2 as timer_pb
from rallypoint.timer.v1 import timer_service_pb2_grpc as timer_grpc

_PAGE = 1_000  # the most that a page may have

RAN_OUT = (timer_pb.TIMER_STATE_UNCLAIMED, timer_pb.TIMER_STATE_OFFERED)
_RUNNING = (timer_pb.TIMER_STATE_COUNTING, timer_pb.TIMER_STATE_LEARNING)


async def most_urgent(
    run_id: str, node_id: str, most: int, *, expired_only: bool, stub: timer_grpc.TimerServiceAsyncStub
) -> tuple[list[timer_pb.Timer], bool]:
    """Timers of a run and a node ("": of all), the most urgent first, and whether there are more.

    First those that ran out, the longest ago first, then those that will, the soonest first, then those that
    can't yet. If there are more than `most`, some that will are left out: those whose names come last.
    """
    timers: list[timer_pb.Timer] = []
    # In this order: one that runs out in between is in both answers, rather than in none.
    if not expired_only:
        timers += await _listed(run_id, node_id, most, _RUNNING, stub)
    ran_out = await _listed(run_id, node_id, most, RAN_OUT, stub)
    gone = {_name(timer) for timer in ran_out}
    found = ran_out + [timer for timer in timers if _name(timer) not in gone]
    left_out = len(found) > most
    return sorted(found[:most], key=_urgency), left_out


async def _listed(
    run_id: str,
    node_id: str,
    most: int,
    states: Sequence[timer_pb.TimerState.ValueType],
    stub: timer_grpc.TimerServiceAsyncStub,
) -> list[timer_pb.Timer]:
    """Timers in those states; one more than `most` tells that there are more."""
    timers: list[timer_pb.Timer] = []
    token = ""
    while len(timers) <= most:
        request = timer_pb.ListTimersRequest(
            run_id=run_id,
            node_id=node_id,
            states=states,
            page_size=min(_PAGE, most + 1 - len(timers)),
            page_token=token,
        )
        page = await stub.ListTimers(request)
        timers += page.timers
        token = page.next_page_token
        if not token:
            break
    return timers


def _name(timer: timer_pb.Timer) -> tuple[str, str, str, str]:
    return timer.run_id, timer.node_id, timer.worker_id, timer.scope


def _urgency(timer: timer_pb.Timer) -> tuple[bool, bool, int]:
    learning = timer.state == timer_pb.TIMER_STATE_LEARNING
    return timer.state not in RAN_OUT, learning, timer.remaining.ToNanoseconds()


async def all_scopes(run_id: str, stub: timer_grpc.TimerServiceAsyncStub) -> timer_pb.ListScopesResponse:
    """Every scope of a run ("": of all)."""
    whole = page = await stub.ListScopes(timer_pb.ListScopesRequest(run_id=run_id))
    while page.next_page_token:
        page = await stub.ListScopes(
            timer_pb.ListScopesRequest(run_id=run_id, page_token=page.next_page_token)
        )
        whole.scopes.extend(page.scopes)
    whole.next_page_token = ""
    return whole
