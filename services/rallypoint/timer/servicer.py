"""TimerService on the wire: requests in, events out. All decisions are the table's."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import grpc

from rallypoint.timer.durations import to_duration, to_seconds
from rallypoint.timer.refusals import Draining, InvalidField, TooMany
from rallypoint.timer.v1 import timer_service_pb2 as pb
from rallypoint.timer.v1 import timer_service_pb2_grpc as pb_grpc
from rallypoint.timer.values import Expiry, Subscription, TimerName, TimerState, TimerView
from rallypoint.timer.watchdog import Mailbox, Refusal, Watchdog

MAX_ACTIONS = 1000
"""Of one SuperviseRequest. Taking them holds up the event loop, so their number is bounded: some 5 ms."""

_MAX_PAGE = 1000
_STATES = {
    TimerState.COUNTING: pb.TIMER_STATE_COUNTING,
    TimerState.OFFERED: pb.TIMER_STATE_OFFERED,
    TimerState.UNCLAIMED: pb.TIMER_STATE_UNCLAIMED,
}

_Context = grpc.aio.ServicerContext[Any, Any]


class TimerServicer(pb_grpc.TimerServiceServicer):
    """Serves a watchdog."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._table = watchdog.table

    async def Supervise(
        self, request_iterator: AsyncIterator[pb.SuperviseRequest], context: _Context
    ) -> AsyncIterator[pb.SuperviseResponse]:
        """See timer_service.proto."""
        first = await anext(request_iterator, None)
        if first is None:
            return
        if not first.actions or first.actions[0].WhichOneof("action") != "subscribe":
            raise InvalidField("actions", "the first action of a stream must be subscribe")
        self._refuse_if_draining()
        wanted = first.actions[0].subscribe
        subscription, mailbox = self._watchdog.subscribe(wanted.run_id, wanted.node_id, wanted.lease)
        reading = asyncio.create_task(self._read(subscription, mailbox, first, request_iterator))
        try:
            interval = to_duration(self._table.settings.reoffer_interval)
            yield _response([pb.SuperviseEvent(subscribed=pb.Subscribed(reoffer_interval=interval))])
            while (news := await mailbox.take()) is not None:
                expiries, refusals = news
                yield _response([*map(_refused, refusals), *map(_expired, expiries)])
            if self._watchdog.draining:
                yield _response([pb.SuperviseEvent(draining=pb.Draining())])
        finally:
            reading.cancel()
            self._watchdog.unsubscribe(subscription)
            await asyncio.wait({reading})

    async def _read(
        self,
        subscription: Subscription,
        mailbox: Mailbox,
        first: pb.SuperviseRequest,
        requests: AsyncIterator[pb.SuperviseRequest],
    ) -> None:
        try:
            self._take(subscription, mailbox, first.actions, start=1)
            async for request in requests:
                self._take(subscription, mailbox, request.actions)
            mailbox.end()
        except Exception as error:
            mailbox.end(error)

    def _take(
        self,
        subscription: Subscription,
        mailbox: Mailbox,
        actions: Sequence[pb.SuperviseAction],
        start: int = 0,
    ) -> None:
        if len(actions) > MAX_ACTIONS:
            raise InvalidField("actions", f"at most {MAX_ACTIONS} in one message")
        try:
            for action in islice(actions, start, None):
                self._act(subscription, mailbox, action)
        finally:
            self._watchdog.arm()

    def _act(self, subscription: Subscription, mailbox: Mailbox, action: pb.SuperviseAction) -> None:
        match action.WhichOneof("action"):
            case "acquire":
                self._register(subscription, mailbox, action.acquire)
            case "release":
                self._table.end(subscription, action.release.worker_id, action.release.scope)
            case "clear":
                self._table.clear(subscription, action.clear.worker_id)
            case "acknowledge":
                self._table.acknowledge(subscription, action.acknowledge.expiry_id)
            case "registered":
                self._table.registered(subscription)
            case "subscribe":
                raise InvalidField("actions", "subscribe may only be the first action of a stream")
            case None:
                # An action of a newer client: what it is for doesn't exist here.
                return

    def _register(self, subscription: Subscription, mailbox: Mailbox, acquire: pb.Acquire) -> None:
        try:
            self._table.register(
                subscription,
                acquire.worker_id,
                acquire.scope,
                to_seconds(acquire.after, "after"),
                self._watchdog.now(),
                sequence=acquire.sequence,
                elapsed=to_seconds(acquire.elapsed, "elapsed"),
            )
        except (InvalidField, TooMany) as error:
            mailbox.refuse(Refusal(acquire.worker_id, acquire.scope, acquire.sequence, error))

    async def AcquireTimer(
        self, request: pb.AcquireTimerRequest, context: _Context
    ) -> pb.AcquireTimerResponse:
        """See timer_service.proto."""
        self._refuse_if_draining()
        after = to_seconds(request.after, "after")
        try:
            self._table.acquire(_name(request), after, self._watchdog.now(), lease=_lease(request))
        finally:
            self._watchdog.arm()
        return pb.AcquireTimerResponse()

    async def ReleaseTimer(
        self, request: pb.ReleaseTimerRequest, context: _Context
    ) -> pb.ReleaseTimerResponse:
        """See timer_service.proto."""
        released = self._table.release(_name(request), self._watchdog.now(), lease=_lease(request))
        self._watchdog.arm()
        return pb.ReleaseTimerResponse(released=released)

    async def ListTimers(self, request: pb.ListTimersRequest, context: _Context) -> pb.ListTimersResponse:
        """See timer_service.proto."""
        if request.page_size < 0:
            raise InvalidField("page_size", "must not be negative")
        size = min(request.page_size or _MAX_PAGE, _MAX_PAGE)
        beyond = _decode_page_token(request.page_token) if request.page_token else None
        found = self._table.timers(self._watchdog.now(), request.run_id, request.node_id, beyond)
        page = list(islice(found, size + 1))
        more = _encode_page_token(page[size - 1].name) if len(page) > size else ""
        return pb.ListTimersResponse(timers=map(_timer, page[:size]), next_page_token=more)

    def _refuse_if_draining(self) -> None:
        if self._watchdog.draining:
            raise Draining


def _name(request: pb.AcquireTimerRequest | pb.ReleaseTimerRequest) -> TimerName:
    return TimerName(request.run_id, request.node_id, request.worker_id, request.scope)


def _lease(request: pb.AcquireTimerRequest | pb.ReleaseTimerRequest) -> int | None:
    return request.lease if request.HasField("lease") else None


def _response(events: Sequence[pb.SuperviseEvent]) -> pb.SuperviseResponse:
    return pb.SuperviseResponse(events=events)


def _expired(expiry: Expiry) -> pb.SuperviseEvent:
    return pb.SuperviseEvent(
        expired=pb.Expired(
            expiry_id=expiry.expiry_id,
            worker_id=expiry.name.worker_id,
            scope=expiry.name.scope,
            after=to_duration(expiry.after),
            late_by=to_duration(expiry.late_by),
            sequence=expiry.sequence,
        )
    )


def _refused(refusal: Refusal) -> pb.SuperviseEvent:
    return pb.SuperviseEvent(
        refused=pb.Refused(
            worker_id=refusal.worker_id,
            scope=refusal.scope,
            sequence=refusal.sequence,
            reason=refusal.error.reason,
            message=str(refusal.error),
        )
    )


def _timer(view: TimerView) -> pb.Timer:
    return pb.Timer(
        **view.name._asdict(),
        after=to_duration(view.after),
        remaining=to_duration(view.remaining),
        state=_STATES[view.state],
        offers=view.offers,
    )


def _encode_page_token(name: TimerName) -> str:
    return base64.urlsafe_b64encode(json.dumps(name).encode()).decode()


def _decode_page_token(token: str) -> TimerName:
    with suppress(ValueError, RecursionError):
        match json.loads(base64.urlsafe_b64decode(token)):
            case [str(run_id), str(node_id), str(worker_id), str(scope)]:
                return TimerName(run_id, node_id, worker_id, scope)
    raise InvalidField("page_token", "is none that this service gave out")
