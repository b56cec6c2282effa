"""The agent's end of the timer service: one stream that keeps the service up to date with a TimerMirror."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import grpc

from rallypoint.rpc.backoff import Backoff
from rallypoint.rpc.clock import LagSettings
from rallypoint.rpc.durations import checked_seconds, to_duration
from rallypoint.rpc.errors import decode
from rallypoint.rpc.logs import get_logger, is_end_of_stream
from rallypoint.rpc.loop import cancel_all
from rallypoint.timer.client.mirror import TimerMirror
from rallypoint.timer.client.pacing import Batching, Watch
from rallypoint.timer.core.values import InvalidField
from rallypoint.timer.v1 import timer_service_pb2 as pb
from rallypoint.timer.v1 import timer_service_pb2_grpc as pb_grpc

_seconds = partial(checked_seconds, refuse=InvalidField)

# ---- Settings and events of the client.


@dataclass(frozen=True, slots=True)
class ExpiredTimer:
    """An expired timer. Durations in seconds."""

    worker_id: str
    scope: str
    after: float
    # From its deadline until the service reported it.
    late_by: float
    # 0: acquired by a unary call to the service; this client does not know the timer.
    sequence: int
    # The number of completions `after` was learned from; 0: it was given.
    learned_from: int = 0


OnExpired = Callable[[ExpiredTimer], Awaitable[bool | None]]
"""Handles an expiry. False: it could not; the service will report it again. An exception counts as handled."""

OnForgotten = Callable[[str], None]
"""Called with a scope that the service has forgotten: observations so far must not be sent again."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Settings of the client. All in seconds."""

    # How long changes are batched before they are sent, at most; a new timer is sent within a tenth of its duration.
    # Default 0.2. Deadlines don't suffer: the elapsed time is sent along. The service pays per message: with 64
    # agents, 0.05 costs it half as much again. Higher makes lists show timers that have ended.
    linger: float = 0.2
    # The wait before the first attempt to reconnect, and the longest between two. Each is drawn between half of it and
    # all of it, then doubled. Defaults 0.1 and 5: a restarted service is found soon, and a thousand agents don't
    # reconnect at the same instant.
    back_off: float = 0.1
    back_off_most: float = 5.0
    # How long the service may be unreachable before it is logged. Default 5.
    attempt_timeout: float = 5.0
    # How pauses of this process are noticed and not counted against its workers: see LagSettings. Its tolerance is
    # 0.25 here, more than the service's: a worker is examined before it is killed, so only those pauses matter in
    # which it could not run either. Forgiving the short pauses of an agent on a busy host would only delay kills.
    lag: LagSettings = field(default_factory=lambda: LagSettings(tolerance=0.25))


log = get_logger(__name__)

# Most actions of one message; the service accepts twice as many.
_MOST_ACTIONS = 500
# Another agent acts for the node. It may be about to end, or this one about to get a newer lease, so the client tries
# again; without back-off, two agents would replace each other for ever.
_SUPERSEDED = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED)
# Seconds by which a timer may be short of its end and still count as expired: clocks of two hosts drift apart.
_SHORT = 0.001


class NodeTimers:
    """The timers of one node's workers. Belongs to one event loop; no method but `close` waits for the service.

    It retries after every error until it is closed.

    Attributes:
        trouble: Why no watchdog guards the node's workers, one line for people; empty: one does, or it has been away
            for less than the `attempt_timeout` of the settings.
        on_trouble: Called with `trouble` when that changes, and with "" when a watchdog guards them for the first
            time.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        run_id: str,
        node_id: str,
        lease: int = 0,
        incarnation: str = "",
        token: bytes = b"",
        stall_after: float | None = None,
        settings: ClientSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """Create a client that accepts timers at once, and sends them after `start`.

        Args:
            channel: to the timer service; the caller owns and closes it.
            run_id: the run.
            node_id: the node.
            lease: the node's lease from the rendezvous service; 0 if there is none.
            incarnation: the incarnation of the run that granted the lease; empty: unknown.
            token: the secret for this lease, which single calls about the node then need; empty: none.
            stall_after: seconds without progress of any worker until the run is reported as stalled; 0: never;
                None: the service's setting.
            settings: see ClientSettings.
            clock: monotonic seconds; `since` is by this clock.
            jitter: returns numbers from 0 to 1.
        """
        self.trouble = ""
        self.on_trouble: Callable[[str], None] | None = None
        self._stub = pb_grpc.TimerServiceStub(channel)
        self._run_id, self._node_id = run_id, node_id
        self._lease, self._incarnation, self._leased_at = lease, incarnation, clock()
        self._token = token
        self._clock = clock
        self._stall_after = stall_after
        self._settings = settings or ClientSettings()
        self._jitter = jitter
        self._watch = Watch(clock, self._settings.lag, self._paused)
        self._log = log.bind(run_id=run_id, node_id=node_id)
        # A restarted agent must not reuse the numbers that its predecessor gave to other timers.
        self._mirror = TimerMirror(first_sequence=1 + int(jitter() * 2**52))
        self._batching = Batching(self._settings.linger)
        self._closing = False
        self._subscribed = False
        self._renewing = False
        # Set by a new lease; ends the wait before the next attempt.
        self._renewed = asyncio.Event()
        # Runs while no watchdog guards the workers and `trouble` does not show it yet.
        self._alarm: asyncio.TimerHandle | None = None
        self._call: grpc.aio.StreamStreamCall[pb.SuperviseRequest, pb.SuperviseResponse] | None = None
        self._task: asyncio.Task[None] | None = None
        self._last_trouble = ""
        # Expiries being handled, and the id to acknowledge on this stream; None: it came on an earlier stream.
        self._handling: dict[tuple[str, str, int], int | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Pairs of worker and reason for which refused timers were logged on this stream.
        self._refusals: set[tuple[str, str]] = set()

    def start(self, on_expired: OnExpired, on_forgotten: OnForgotten | None = None) -> None:
        """Connect to the service. Each expiry is handled in a task of its own, once at a time."""
        self._on_expired = on_expired
        self._on_forgotten = on_forgotten
        self._watch.start()
        self._count_down()
        self._task = asyncio.create_task(self._run())

    async def close(self, grace: float = 1.0) -> None:
        """End all timers, then the stream; wait at most `grace` seconds for the service to receive that."""
        self._closing = True
        self._watch.stop()
        self._stop_alarm()
        for worker_id in self._mirror.workers:
            self.clear(worker_id)
        self._batching.hurry()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=grace if self._subscribed else 0)
            await cancel_all([self._task, *self._tasks])

    def renew(self, lease: int, incarnation: str = "", token: bytes = b"") -> None:
        """Use a new lease of the node: subscribe again with all timers, at once."""
        self._lease, self._incarnation, self._leased_at = lease, incarnation, self._clock()
        self._token = token
        self._renewed.set()
        if self._call is not None:
            self._renewing = True
            self._call.cancel()

    def acquire(
        self, worker_id: str, scope: str, after: float, since: float | None = None, learned_as: str = ""
    ) -> None:
        """Start a worker's timer, in place of the one of that name.

        Args:
            worker_id: 1 to 256 bytes of UTF-8.
            scope: 1 to 512 bytes of UTF-8.
            after: timeout in seconds, more than 0 and at most ten years; ignored if it is learned.
            since: when it started, by the client's clock and not after now; None: now.
            learned_as: the name under which the service learns the timeout; empty: `after` is given.
        """
        began = self._watch.now() if since is None else self._watch.at(since)
        self._mirror.acquire(worker_id, scope, after, began, learned_as)
        self._batching.note(math.inf if learned_as else after)

    def release(self, worker_id: str, scope: str) -> None:
        """End a worker's timer; harmless if there is none."""
        self._mirror.release(worker_id, scope)
        self._batching.note()

    def complete(self, worker_id: str, scope: str) -> None:
        """End a worker's timer because the worker left the scope; if it learns, its duration is learned from."""
        self._mirror.complete(worker_id, scope, self._watch.now())
        self._batching.note()

    def observe(self, scope: str, count: int, longest: float) -> None:
        """Report completions of which this client saw no timers.

        Args:
            scope: the name under which the service learns.
            count: completions since the last call, at least 1.
            longest: the longest of them, in seconds; earlier ones may be included.
        """
        self._mirror.observe(scope, count, longest)
        self._batching.note()

    def progress(self, worker_id: str, rank: int, step: int, since: float) -> None:
        """Report the step that a worker has reached.

        Args:
            worker_id: as for `acquire`.
            rank: its global rank.
            step: the step; the same one again is ignored.
            since: when the worker reached it, as for `acquire`.
        """
        self._mirror.progress(worker_id, rank, step, self._watch.at(since))
        self._batching.note()

    def progress_of(self, worker_id: str) -> tuple[int, float] | None:
        """Return the last step that a worker reported and the seconds since it reached it, or None."""
        return self._mirror.progress_of(worker_id, self._watch.now())

    def clear(self, worker_id: str) -> None:
        """End all timers of a worker that is gone, and forget its progress."""
        self._mirror.clear(worker_id)
        self._batching.note()

    def holds(self, expired: ExpiredTimer) -> bool:
        """Return True if the worker still holds the expired timer: it neither released it nor acquired it again."""
        return not expired.sequence or expired.sequence == self._mirror.sequence_of(
            expired.worker_id, expired.scope
        )

    async def _run(self) -> None:
        backoff = Backoff(self._jitter, first=self._settings.back_off, longest=self._settings.back_off_most)
        while not self._closing:
            trouble, superseded = "the service ended the stream", False
            try:
                await self._run_stream()
            except grpc.aio.AioRpcError as error:
                refusal = decode(error)
                trouble = f"{refusal.code.name}: {refusal.message}"
                superseded = refusal.code in _SUPERSEDED
            except asyncio.CancelledError:
                # Either this task was cancelled, or the call was: by `renew`, or by the service (see its contract).
                if cast("asyncio.Task[None]", asyncio.current_task()).cancelling():
                    raise
                trouble = "the call was cancelled"
                if self._renewing and not self._closing:
                    self._subscribed = False
                    self._count_down()
                    continue
            except Exception as error:
                # Retry after any error: without a stream no worker on this host is guarded.
                trouble = f"unexpected error on the stream: {error!r}"
            if self._closing:
                return
            if self._subscribed and not superseded:
                backoff.reset()
            self._subscribed = False
            self._report(trouble)
            if superseded:
                self._give_alarm()
            else:
                self._count_down()
            if await self._rest(backoff.next()):
                backoff.reset()

    async def _rest(self, seconds: float) -> bool:
        """Wait before the next attempt, at most until there is a new lease; return True if there is one."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._renewed.wait(), seconds)
        return self._renewed.is_set()

    # The state of the watchdog.

    def _count_down(self) -> None:
        """Report that no watchdog guards the workers, unless one is back soon, as after a restart of the service."""
        if self._alarm is None and not self.trouble:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(self._settings.attempt_timeout, self._give_alarm)

    def _give_alarm(self) -> None:
        self._stop_alarm()
        if not self._last_trouble:
            self._report("the timer service does not answer")
        if self.trouble != self._last_trouble:
            self.trouble = self._last_trouble
            self._log.error("no watchdog guards the workers of this node", reason=self.trouble)
            self._report_trouble()

    def _stop_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _guarded(self) -> None:
        self._stop_alarm()
        self._subscribed = True
        self._last_trouble = self.trouble = ""
        self._log.info("the timer service watches this node's workers")
        self._report_trouble()

    def _report_trouble(self) -> None:
        if self.on_trouble is not None:
            self.on_trouble(self.trouble)

    # One stream.

    async def _run_stream(self) -> None:
        self._mirror.restart()
        self._handling = dict.fromkeys(self._handling)
        self._refusals.clear()
        self._call = call = self._stub.Supervise(wait_for_ready=True)
        self._renewing = False
        self._renewed.clear()
        writing = asyncio.create_task(self._write(call))
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                for event in cast(pb.SuperviseResponse, response).events:
                    self._take(event)
        finally:
            self._call = None
            call.cancel()
            await cancel_all([writing])

    async def _write(self, call: grpc.aio.StreamStreamCall[pb.SuperviseRequest, Any]) -> None:
        try:
            await self._send(call)
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError | grpc.aio.AioRpcError):
                self._log.exception("could not send timers to the timer service")
            # Nothing more is sent on this stream: the reader must not wait for effects of it.
            call.cancel()
            raise

    async def _send(self, call: grpc.aio.StreamStreamCall[pb.SuperviseRequest, Any]) -> None:
        # Wait first: elapsed times must be those at the time of sending.
        await call.wait_for_connection()
        subscribe = pb.Subscribe(run_id=self._run_id, node_id=self._node_id, lease=self._lease)
        subscribe.token = self._token
        if self._incarnation:
            subscribe.incarnation = self._incarnation
            subscribe.lease_age.CopyFrom(to_duration(max(0.0, self._clock() - self._leased_at)))
        if self._stall_after is not None:
            subscribe.stall_after.CopyFrom(to_duration(self._stall_after))
        await call.write(pb.SuperviseRequest(actions=[pb.SuperviseAction(subscribe=subscribe)]))
        actions = self._changes()
        while self._mirror.pending:
            await call.write(pb.SuperviseRequest(actions=actions))
            actions = self._changes()
        actions.append(pb.SuperviseAction(registered=pb.Registered()))
        await call.write(pb.SuperviseRequest(actions=actions))
        while self._mirror.pending or not self._closing:
            await self._batching.gathered()
            while actions := self._changes():
                await call.write(pb.SuperviseRequest(actions=actions))
        try:
            await call.done_writing()
        except grpc.aio.InternalError as error:
            # Unlike a write, which fails with the status of the call: the service ended the stream, or its connection
            # broke, while we closed our side. The stream was to end anyway, so this is no error to log.
            if not is_end_of_stream(error):
                raise

    def _changes(self) -> list[pb.SuperviseAction]:
        return self._mirror.take(self._watch.now(), _MOST_ACTIONS)

    def _take(self, event: pb.SuperviseEvent) -> None:
        match event.WhichOneof("event"):
            case "subscribed":
                self._guarded()
            case "expired":
                self._expired(event.expired)
            case "refused":
                self._refused(event.refused)
            case "learned":
                self._learned(event.learned)
            case "stalled":
                self._stalled(event.stalled)
            case "draining":
                self._log.info("the timer service is draining")
            case None:
                # An event of a newer service, which this client does not need.
                return

    def _expired(self, event: pb.Expired) -> None:
        key = (event.worker_id, event.scope, event.sequence)
        expired = ExpiredTimer(
            event.worker_id,
            event.scope,
            _seconds(event.after, "after"),
            _seconds(event.late_by, "late_by"),
            event.sequence,
            event.learned.count if event.HasField("learned") else 0,
        )
        if key in self._handling:
            self._handling[key] = event.expiry_id
        elif not self.holds(expired):
            # It crossed the worker's release on the way.
            self._acknowledge(event.expiry_id)
        elif self._ran_out(expired):
            self._handling[key] = event.expiry_id
            task = asyncio.create_task(self._handle(expired))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._mirror.renumber(expired.worker_id, expired.scope)
            self._batching.note(expired.after)
            self._acknowledge(event.expiry_id)

    def _refused(self, event: pb.Refused) -> None:
        # A worker may have thousands of timers refused per second.
        if (key := (event.worker_id, event.reason)) not in self._refusals:
            self._refusals.add(key)
            self._log.warning(
                "the service refused timers of a worker; they do not guard it",
                worker_id=event.worker_id,
                first=event.scope,
                reason=event.message,
            )

    def _ran_out(self, expired: ExpiredTimer) -> bool:
        """Return True if the timer has expired on our own watch, too: this host may have been paused alone."""
        held = self._mirror.find(expired.worker_id, expired.scope)
        if held is None or not expired.sequence:
            return True
        return self._watch.now() - held.since + _SHORT >= (held.after or expired.after)

    def _acknowledge(self, expiry_id: int) -> None:
        self._mirror.acknowledge(expiry_id)
        self._batching.note()

    def _learned(self, event: pb.Learned) -> None:
        if event.count:
            self._mirror.learned(event.scope, event.count, _seconds(event.longest, "longest"))
            return
        self._log.info("a scope was forgotten; learning starts again", scope=event.scope)
        # The counting side must drop its old observations before this client forgets the scope.
        if self._on_forgotten is not None:
            self._on_forgotten(event.scope)
        self._mirror.forget(event.scope)
        self._batching.note()

    def _stalled(self, event: pb.Stalled) -> None:
        idle = round(_seconds(event.idle, "idle"), 1)
        if event.over:
            # A warning, like the message it takes back: no log level may hide only one of them.
            self._log.warning("workers of the run advance again", idle=idle)
            return
        first = event.first
        self._log.warning(
            "no worker of the run advances",
            idle=idle,
            first_node=first.node_id,
            first_rank=first.rank,
            first_step=first.step,
            first_idle=round(_seconds(first.idle, "idle"), 1),
            at_same_step=event.at_same_step,
            workers=event.workers,
        )

    def _paused(self, slept: float, forgiven: float) -> None:
        self._log.warning(
            "this agent was paused; its workers' deadlines moved",
            slept=round(slept, 3),
            moved_by=round(forgiven, 3),
        )

    async def _handle(self, expired: ExpiredTimer) -> None:
        done: bool | None = None
        try:
            done = await self._on_expired(expired)
        except Exception:
            self._log.exception("could not handle an expired timer", scope=expired.scope)
        finally:
            key = (expired.worker_id, expired.scope, expired.sequence)
            expiry_id = self._handling.pop(key)
        if done is not False:
            self._mirror.settle(*key, expiry_id)
            self._batching.note()

    def _report(self, trouble: str) -> None:
        # Log a reason once, not with every attempt.
        if trouble != self._last_trouble:
            self._last_trouble = trouble
            self._log.warning(
                "no connection to the timer service; this agent keeps the timers", reason=trouble
            )
