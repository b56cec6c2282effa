"""TimerService on the wire: converts requests and replies. The watchdog makes all decisions."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from functools import partial
from itertools import islice

from google.protobuf.message import Message

from rallypoint.rpc.durations import checked_seconds, to_duration
from rallypoint.rpc.text import clip
from rallypoint.serving.access import caller_of
from rallypoint.serving.flow import FIRST_MESSAGE_TIMEOUT, Context, ServerDraining, UnopenedStreams
from rallypoint.serving.requests import (
    EveryField,
    count,
    items_before,
    page_position,
    page_size,
    page_token,
    seconds,
    token,
)
from rallypoint.timer.core.values import (
    MAX_AFTER,
    MAX_NAME_BYTES,
    MAX_SCOPE_BYTES,
    InvalidField,
    Subscription,
    TimerName,
    TimerState,
    TooMany,
    check_name,
)
from rallypoint.timer.server import outbox
from rallypoint.timer.server.outbox import Outbox, Refusal
from rallypoint.timer.server.watchdog import Watchdog
from rallypoint.timer.v1 import timer_service_pb2 as pb
from rallypoint.timer.v1 import timer_service_pb2_grpc as pb_grpc

_seconds = partial(checked_seconds, refuse=InvalidField)

# ---- One Supervise stream: the agent's actions, processed in order.


MAX_ACTIONS = 1000
"""Most actions of one message. Processing them blocks the event loop, so their number is bounded: some 5 ms."""


class Supervision:
    """The receiving half of a Supervise stream, created from its first message."""

    def __init__(self, watchdog: Watchdog, first: pb.SuperviseRequest, identity: str) -> None:
        """Subscribe as the first action requests. `read` processes the other actions of that message.

        `identity`: the name in the caller's certificate or token; empty: it has none.

        Raises:
            TimerRefused: The first action is not a subscription, or the subscription is rejected.
        """
        check_number(len(first.actions))
        if not first.actions or first.actions[0].WhichOneof("action") != "subscribe":
            raise InvalidField("actions", "the first action of a stream must be subscribe")
        wanted = first.actions[0].subscribe
        with EveryField() as check:
            _check_fields(
                check, wanted, "run_id", "node_id", "token", *["incarnation"] * bool(wanted.incarnation)
            )
            check(count, "lease", wanted.lease, 0)
            stall_after = check(seconds, "stall_after", wanted.stall_after, MAX_AFTER)
            lease_age = check(seconds, "lease_age", wanted.lease_age, MAX_AFTER) or 0.0
        self._watchdog = watchdog
        self._table = watchdog.table
        self._first = first
        self._registered = False
        self.subscription: Subscription
        self.outbox: Outbox
        self.subscription, self.outbox = watchdog.subscribe(
            wanted.run_id,
            wanted.node_id,
            wanted.lease,
            stall_after if wanted.HasField("stall_after") else None,
            incarnation=wanted.incarnation,
            lease_age=lease_age,
            token=wanted.token,
            identity=identity,
        )

    async def read(self, requests: AsyncIterator[pb.SuperviseRequest]) -> None:
        """Process messages until the stream ends. An error ends the outbox, which raises it to the sender."""
        try:
            self._take(islice(self._first.actions, 1, None))
            async for request in requests:
                check_number(len(request.actions))
                self._take(request.actions)
            self.outbox.end()
        except Exception as error:
            self.outbox.end(error)

    def _take(self, actions: Iterable[pb.SuperviseAction]) -> None:
        try:
            for action in actions:
                self._act(action)
        finally:
            self._watchdog.arm()

    def _act(self, action: pb.SuperviseAction) -> None:
        subscription = self.subscription
        match action.WhichOneof("action"):
            case "acquire" | "release" | "clear":
                self._change(action)
            case "observe":
                observe = action.observe
                longest = _seconds(observe.longest, "longest")
                self._watchdog.observe(subscription, observe.scope, observe.count, longest)
            case "progress":
                self._report_progress(action.progress)
            case "acknowledge":
                self._table.acknowledge(subscription, action.acknowledge.expiry_id)
            case "learned":
                self._learn(action.learned)
            case "registered":
                self._registered = True
                self._watchdog.registered(subscription)
            case "subscribe":
                raise InvalidField("actions", "subscribe may only be the first action of a stream")
            case None:
                # An action of a newer client: this version has no such feature.
                return

    def _change(self, action: pb.SuperviseAction) -> None:
        """Start or end timers. A refusal does not end the stream, which guards all workers of the node."""
        try:
            match action.WhichOneof("action"):
                case "acquire":
                    self._register(action.acquire)
                case "release":
                    check_name("worker_id", action.release.worker_id)
                    check_name("scope", action.release.scope, MAX_SCOPE_BYTES)
                    self._table.end(self.subscription, action.release.worker_id, action.release.scope)
                case _:
                    check_name("worker_id", action.clear.worker_id)
                    self._watchdog.clear(self.subscription, action.clear.worker_id)
        except (InvalidField, TooMany) as error:
            self.outbox.refuse(_refusal(action, error))

    def _register(self, acquire: pb.Acquire) -> None:
        self._table.register(
            self.subscription,
            acquire.worker_id,
            acquire.scope,
            _seconds(acquire.after, "after"),
            self._watchdog.now(),
            sequence=acquire.sequence,
            elapsed=_seconds(acquire.elapsed, "elapsed"),
            learned_as=acquire.learned_as,
        )

    def _report_progress(self, progress: pb.Progress) -> None:
        self._watchdog.report_progress(
            self.subscription,
            progress.worker_id,
            progress.rank,
            progress.step,
            _seconds(progress.elapsed, "elapsed"),
        )

    def _learn(self, learned: pb.Learned) -> None:
        if not learned.count:
            self._watchdog.has_forgotten(self.subscription, learned.scope)
            return
        if self._registered:
            raise InvalidField("actions", "after registered, learned may only be sent with a count of 0")
        longest = _seconds(learned.longest, "longest")
        self._watchdog.learn(self.subscription, learned.scope, learned.count, longest)


def _refusal(action: pb.SuperviseAction | pb.TimerAction, error: InvalidField | TooMany) -> Refusal:
    """Return the refusal of an action that has one of the three set; the fields of the others are empty."""
    acquire, release = action.acquire, action.release
    worker_id = acquire.worker_id or release.worker_id or action.clear.worker_id
    return Refusal(worker_id, acquire.scope or release.scope, acquire.sequence, error)


def check_number(actions: int) -> None:
    """Check that a message has at most MAX_ACTIONS actions."""
    if actions > MAX_ACTIONS:
        raise InvalidField("actions", f"at most {MAX_ACTIONS:,} in one message")


MAX_PAGE = 1000
_MAX_WORKERS = 1000
_DEFAULT_WORKERS = 10
_STATES: dict[int, TimerState] = {number: state for state, number in outbox.STATES.items()}


class TimerServicer(pb_grpc.TimerServiceServicer):
    """Serves a watchdog."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._table = watchdog.table
        self._unopened = UnopenedStreams(FIRST_MESSAGE_TIMEOUT)

    async def drain(self) -> None:
        """Drain: end every stream."""
        self._unopened.end()
        self._watchdog.drain()

    async def Supervise(
        self, request_iterator: AsyncIterator[pb.SuperviseRequest], context: Context
    ) -> AsyncIterator[pb.SuperviseResponse]:
        """See timer_service.proto."""
        try:
            first = await self._unopened.first(request_iterator)
        except StopAsyncIteration:
            return
        self._refuse_if_draining()
        supervision = Supervision(self._watchdog, first, caller_of(context).name)
        reading = asyncio.create_task(supervision.read(request_iterator))
        try:
            interval = to_duration(self._table.settings.reoffer_interval)
            yield _event(pb.SuperviseEvent(subscribed=pb.Subscribed(reoffer_interval=interval)))
            while (batch := await supervision.outbox.take()) is not None:
                yield outbox.batch_response(batch)
            if self._watchdog.draining:
                yield _event(pb.SuperviseEvent(draining=pb.Draining()))
                raise ServerDraining  # clients take OK for the end of the subscription
        finally:
            reading.cancel()
            self._watchdog.unsubscribe(supervision.subscription)
            await asyncio.wait({reading})

    async def BatchUpdateTimers(
        self, request: pb.BatchUpdateTimersRequest, context: Context
    ) -> pb.BatchUpdateTimersResponse:
        """See timer_service.proto."""
        self._refuse_if_draining()
        with EveryField() as check:
            check(check_number, len(request.actions))
            _check_fields(check, request, "run_id", "node_id", "token")
            check(count, "lease", request.lease, 0)
        for index, action in enumerate(request.actions):
            if action.WhichOneof("action") is None:
                raise InvalidField(f"actions[{index}]", "must be one of acquire, release and clear")
        try:
            refusals = [refusal for each in request.actions if (refusal := self._act(request, each))]
        finally:
            self._watchdog.arm()
        return pb.BatchUpdateTimersResponse(
            refused=map(outbox.refused, refusals), subscribed=self._is_subscribed(request)
        )

    def _act(self, request: pb.BatchUpdateTimersRequest, action: pb.TimerAction) -> Refusal | None:
        run_id, node_id, lease = request.run_id, request.node_id, _lease(request)
        acquire, release, now = action.acquire, action.release, self._watchdog.now()
        try:
            match action.WhichOneof("action"):
                case "acquire":
                    _refuse_agent_requests(acquire)
                    _check_worker_id(acquire.worker_id)
                    name = TimerName(run_id, node_id, acquire.worker_id, acquire.scope)
                    after, elapsed = _seconds(acquire.after, "after"), _seconds(acquire.elapsed, "elapsed")
                    self._table.acquire(name, after, now, elapsed=elapsed, lease=lease, token=request.token)
                case "release":
                    name = TimerName(run_id, node_id, release.worker_id, release.scope)
                    self._table.release(name, now, lease=lease, token=request.token)
                case _:
                    self._watchdog.clear_worker(run_id, node_id, action.clear.worker_id, lease, request.token)
        except (InvalidField, TooMany) as error:
            return _refusal(action, error)
        return None

    async def AcquireTimer(
        self, request: pb.AcquireTimerRequest, context: Context
    ) -> pb.AcquireTimerResponse:
        """See timer_service.proto."""
        self._refuse_if_draining()
        with EveryField() as check:
            _check_fields(check, request, "run_id", "node_id")
            check(_check_worker_id, request.worker_id)
            _check_fields(check, request, "scope", "token")
            after = check(_seconds, request.after, "after") or 0.0
        try:
            self._table.acquire(
                _name(request), after, self._watchdog.now(), lease=_lease(request), token=request.token
            )
        finally:
            self._watchdog.arm()
        return pb.AcquireTimerResponse(subscribed=self._is_subscribed(request))

    async def ReleaseTimer(
        self, request: pb.ReleaseTimerRequest, context: Context
    ) -> pb.ReleaseTimerResponse:
        """See timer_service.proto."""
        with EveryField() as check:
            _check_fields(check, request, "run_id", "node_id", "worker_id", "scope", "token")
        released = self._table.release(
            _name(request), self._watchdog.now(), lease=_lease(request), token=request.token
        )
        self._watchdog.arm()
        return pb.ReleaseTimerResponse(released=released)

    async def ClearTimers(self, request: pb.ClearTimersRequest, context: Context) -> pb.ClearTimersResponse:
        """See timer_service.proto."""
        with EveryField() as check:
            _check_fields(check, request, "run_id", "node_id", "worker_id", "token")
        cleared = self._watchdog.clear_worker(
            request.run_id, request.node_id, request.worker_id, _lease(request), request.token
        )
        self._watchdog.arm()
        return pb.ClearTimersResponse(cleared=cleared)

    async def ListTimers(self, request: pb.ListTimersRequest, context: Context) -> pb.ListTimersResponse:
        """See timer_service.proto."""
        size, beyond = page_size(request.page_size, MAX_PAGE, MAX_PAGE), None
        if request.page_token:
            beyond = TimerName(*page_position(request, str, str, str, str))
        found = self._table.timers(
            self._watchdog.now(), request.run_id, request.node_id, beyond, states=_states(request.states)
        )
        page = list(islice(found, size + 1))
        more = page_token(request, *page[-2].name) if len(page) > size else ""
        return pb.ListTimersResponse(timers=map(outbox.timer, page[:size]), next_page_token=more)

    async def ListScopes(self, request: pb.ListScopesRequest, context: Context) -> pb.ListScopesResponse:
        """See timer_service.proto."""
        size, beyond = page_size(request.page_size, MAX_PAGE, MAX_PAGE), None
        if request.page_token:
            run_id, scope = page_position(request, str, str)
            beyond = (run_id, scope)
        page = list(islice(self._table.scopes(request.run_id, beyond), size + 1))
        more = page_token(request, page[-2].run_id, page[-2].learned.scope) if len(page) > size else ""
        settings = self._table.settings
        return pb.ListScopesResponse(
            scopes=map(outbox.scope, page[:size]),
            next_page_token=more,
            warm_up=settings.learn_warm_up,
            factor=settings.learn_factor,
            least=to_duration(settings.learn_least),
        )

    async def ForgetScopes(
        self, request: pb.ForgetScopesRequest, context: Context
    ) -> pb.ForgetScopesResponse:
        """See timer_service.proto."""
        with EveryField() as check:
            _check_fields(check, request, "run_id", *["scope"] * bool(request.scope))
        forgotten = self._watchdog.forget_scopes(request.run_id, request.scope)
        self._watchdog.arm()
        return pb.ForgetScopesResponse(forgotten=forgotten)

    async def GetProgress(self, request: pb.GetProgressRequest, context: Context) -> pb.GetProgressResponse:
        """See timer_service.proto."""
        check_name("run_id", request.run_id)
        size = page_size(request.page_size, _DEFAULT_WORKERS, _MAX_WORKERS)
        first = items_before(request)
        progress = self._watchdog.progress_of(request.run_id, size, first)
        end = first + size
        return outbox.run_progress(progress, page_token(request, end) if end < progress.workers else "")

    def _is_subscribed(self, request: pb.AcquireTimerRequest | pb.BatchUpdateTimersRequest) -> bool:
        return self._table.is_subscribed(request.run_id, request.node_id)

    def _refuse_if_draining(self) -> None:
        if self._watchdog.draining:
            raise ServerDraining


def _event(event: pb.SuperviseEvent) -> pb.SuperviseResponse:
    return pb.SuperviseResponse(events=[event])


# The names that agents give to workers: LOCAL_RANK@ROUND.
_WORKER_ID = re.compile(r"[0-9]{1,9}@[0-9]{1,10}")


def _check_worker_id(worker_id: str) -> None:
    """Refuse a name that no agent gives to a worker: its timer would expire, and nothing would be reaped."""
    check_name("worker_id", worker_id)
    if not _WORKER_ID.fullmatch(worker_id):
        raise InvalidField("worker_id", f"must be LOCAL_RANK@ROUND, as in 0@3, not {clip(worker_id, 64)!r}")


def _check_fields(check: EveryField, request: Message, *fields: str) -> None:
    for field in fields:
        value = getattr(request, field)
        if field == "token":
            check(token, field, value)
        else:
            check(check_name, field, value, MAX_SCOPE_BYTES if field == "scope" else MAX_NAME_BYTES)


def _name(request: pb.AcquireTimerRequest | pb.ReleaseTimerRequest) -> TimerName:
    return TimerName(request.run_id, request.node_id, request.worker_id, request.scope)


def _lease(
    request: pb.AcquireTimerRequest
    | pb.ReleaseTimerRequest
    | pb.ClearTimersRequest
    | pb.BatchUpdateTimersRequest,
) -> int | None:
    return request.lease if request.HasField("lease") else None


def _refuse_agent_requests(acquire: pb.Acquire) -> None:
    if acquire.sequence:
        raise InvalidField("sequence", "is for agents only and must not be set here")
    if acquire.learned_as:
        raise InvalidField("learned_as", "is for agents only and must not be set here")


def _states(wanted: Sequence[int]) -> frozenset[TimerState]:
    if len(wanted) > len(_STATES) or not set(wanted) <= _STATES.keys():
        raise InvalidField("states", "must be some of COUNTING, OFFERED, UNCLAIMED and LEARNING, once each")
    return frozenset(_STATES[number] for number in wanted)
