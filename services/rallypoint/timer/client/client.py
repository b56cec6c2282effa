"""The agent's end of the timer service: one stream that keeps the service in step with a ledger."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import grpc

from rallypoint.rpc.backoff import Backoff
from rallypoint.rpc.clock import LagSettings
from rallypoint.rpc.errors import decode
from rallypoint.rpc.logs import get_logger, is_end_of_stream
from rallypoint.timer.client.mirror import TimerMirror, action_of
from rallypoint.timer.client.pacing import Batching, Watch
from rallypoint.timer.durations import to_duration, to_seconds
from rallypoint.timer.v1 import timer_service_pb2 as pb
from rallypoint.timer.v1 import timer_service_pb2_grpc as pb_grpc

# ---- What goes into and comes out of the agent's end of the timer service.


@dataclass(frozen=True, slots=True)
class ExpiredTimer:
    """A timer that ran out. Durations in seconds."""

    worker_id: str
    scope: str
    after: float
    # From its deadline to when the service told.
    late_by: float
    # 0: acquired by a single call to the service; this client knows nothing of it.
    sequence: int
    # How many completions `after` was learned from; 0: it was given.
    learned_from: int = 0


OnExpired = Callable[[ExpiredTimer], Awaitable[bool | None]]
"""Deals with an expiry. False: it could not; the service will tell it again. An exception counts as done."""

OnForgotten = Callable[[str], None]
"""Told a scope of which the service is to learn anew: what was seen of it so far must not come back."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How the client talks. All in seconds."""

    # How long changes are gathered before they are sent, at most; a timer that begins is told of within a tenth of
    # its duration. Default 0.2. Deadlines don't suffer: the time that has passed is sent along. It is the number of
    # messages that costs the service: with 64 agents, 0.05 costs it half as much again. Higher shows people timers
    # that have ended.
    linger: float = 0.2
    # The wait before the first attempt to reconnect, and the longest between two. Each is drawn between half of
    # it and all of it, then doubled. Defaults 0.1 and 5: a restarted service is found soon, and a thousand agents
    # don't come back in one instant.
    back_off: float = 0.1
    back_off_most: float = 5.0
    # How long the service may be out of reach before the log says so. Default 5.
    attempt_timeout: float = 5.0
    # How pauses of this process are noticed and forgiven its workers: see LagSettings. Its tolerance is 0.25 here,
    # more than the service's: a worker is looked at before it is judged, so only those pauses count in which it
    # could not run either. Those of an agent on a busy host would only make reaping late.
    lag: LagSettings = field(default_factory=lambda: LagSettings(tolerance=0.25))


__all__ = ["ClientSettings", "ExpiredTimer", "NodeTimers", "OnExpired", "OnForgotten"]

log = get_logger(__name__)

# Of one message; the service takes twice as many.
_MOST_ACTIONS = 500
# Another agent acts for the node. It may be about to end, or this one about to get a newer lease, so the client tries
# again; without back-off, two of them would push each other out for ever.
_SUPERSEDED = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED)
# Seconds by which a timer may be short of its end and still be obeyed: clocks of two hosts run apart.
_SHORT = 0.001


class NodeTimers:
    """Timers of one node's workers. Belongs to one event loop; nothing but `close` waits for the service.

    It never gives up: whatever the service answers, it tries again until it is closed.

    Attributes:
        trouble: Why no watchdog guards the node's workers, one line for people; empty: one does, or it has been
            away for less than the `patience` of the settings.
        on_trouble: Called with `trouble` when that changes, and with "" once a watchdog guards them at first.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        run_id: str,
        node_id: str,
        lease: int = 0,
        incarnation: str = "",
        stall_after: float | None = None,
        settings: ClientSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """Makes a client that takes timers at once, and tells them once started.

        Args:
            channel: to the timer service; stays the caller's.
            run_id: the run.
            node_id: the node.
            lease: the node's lease from the rendezvous service; 0 if there is none.
            incarnation: of the run, whose lease it is; empty: not known.
            stall_after: have the run reported when none of its workers advances for so many seconds; 0: never;
                None: as the service sees fit.
            settings: see ClientSettings.
            clock: monotonic seconds; `since` is by this clock.
            jitter: gives numbers from 0 to 1.
        """
        self.trouble = ""
        self.on_trouble: Callable[[str], None] | None = None
        self._stub = pb_grpc.TimerServiceStub(channel)
        self._run_id, self._node_id = run_id, node_id
        self._lease, self._incarnation, self._leased_at = lease, incarnation, clock()
        self._clock = clock
        self._stall_after = stall_after
        self._settings = settings or ClientSettings()
        self._jitter = jitter
        self._watch = Watch(clock, self._settings.lag, self._paused)
        self._log = log.bind(run_id=run_id, node_id=node_id)
        # A restarted agent must not come with the numbers that the one before used for other timers.
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
        self._talking: asyncio.Task[None] | None = None
        self._last_trouble = ""
        # Expiries being dealt with, and the id to acknowledge on this stream; None: it was told on an earlier one.
        self._dealing: dict[tuple[str, str, int], int | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # Workers of which it was logged that timers are refused, and why; on this stream.
        self._refusals: set[tuple[str, str]] = set()

    def start(self, on_expired: OnExpired, on_forgotten: OnForgotten | None = None) -> None:
        """Begins to talk with the service. Each expiry is dealt with in a task of its own, once at a time."""
        self._on_expired = on_expired
        self._on_forgotten = on_forgotten
        self._watch.start()
        self._count_down()
        self._talking = asyncio.create_task(self._talk())

    async def close(self, grace: float = 1.0) -> None:
        """Ends: the node has no workers any more. Waits at most `grace` seconds for the service to be told."""
        self._closing = True
        self._watch.stop()
        self._stop_alarm()
        for worker_id in self._mirror.workers:
            self.clear(worker_id)
        self._batching.hurry()
        if self._talking is not None:
            await asyncio.wait({self._talking}, timeout=grace if self._subscribed else 0)
            await _end([self._talking, *self._tasks])

    def renew(self, lease: int, incarnation: str = "") -> None:
        """The node has a new lease: the client subscribes anew with all timers, at once."""
        self._lease, self._incarnation, self._leased_at = lease, incarnation, self._clock()
        self._renewed.set()
        if self._call is not None:
            self._renewing = True
            self._call.cancel()

    def acquire(
        self,
        worker_id: str,
        scope: str,
        after: float,
        since: float | None = None,
        learned_as: str = "",
    ) -> None:
        """Starts a worker's timer, in place of the one of that name.

        Args:
            worker_id: 1 to 256 bytes of UTF-8.
            scope: 1 to 512 bytes of UTF-8.
            after: seconds, more than 0 and at most ten years; any if it is learned.
            since: when it started, by the client's clock and not after now; None: now.
            learned_as: the name under which the service learns how long it may take; empty: it does not.
        """
        began = self._watch.now() if since is None else self._watch.at(since)
        self._mirror.acquire(worker_id, scope, after, began, learned_as)
        self._batching.note(math.inf if learned_as else after)

    def release(self, worker_id: str, scope: str) -> None:
        """Ends a worker's timer; harmless if there is none."""
        self._mirror.release(worker_id, scope)
        self._batching.note()

    def complete(self, worker_id: str, scope: str) -> None:
        """Ends a worker's timer because the worker left the scope; how long that took is learned from."""
        self._mirror.complete(worker_id, scope, self._watch.now())
        self._batching.note()

    def observe(self, scope: str, count: int, longest: float) -> None:
        """Has the service learn from completions of which this client saw no timers.

        Args:
            scope: the name under which it learns.
            count: how many there were since the last call, at least 1.
            longest: the longest of them, in seconds; earlier ones may be included.
        """
        self._mirror.observe(scope, count, longest)
        self._batching.note()

    def progress(self, worker_id: str, rank: int, step: int, since: float) -> None:
        """Tells which step a worker has come to.

        Args:
            worker_id: as for `acquire`.
            rank: its global rank.
            step: another one than before, or nothing happens.
            since: when it came to it, as for `acquire`.
        """
        self._mirror.progress(worker_id, rank, step, self._watch.at(since))
        self._batching.note()

    def progress_of(self, worker_id: str) -> tuple[int, float] | None:
        """The last step of which a worker told, and the seconds since it came to that; None if it told none."""
        return self._mirror.progress_of(worker_id, self._watch.now())

    def clear(self, worker_id: str) -> None:
        """Ends all timers of a worker that is gone, and forgets how far it came."""
        self._mirror.clear(worker_id)
        self._batching.note()

    def holds(self, expired: ExpiredTimer) -> bool:
        """Whether the worker still holds the timer that ran out: it was neither released nor acquired anew."""
        return not expired.sequence or expired.sequence == self._mirror.sequence_of(
            expired.worker_id, expired.scope
        )

    async def _talk(self) -> None:
        backoff = Backoff(self._jitter, first=self._settings.back_off, longest=self._settings.back_off_most)
        while not self._closing:
            trouble, superseded = "the service ended the stream", False
            try:
                await self._converse()
            except grpc.aio.AioRpcError as error:
                refusal = decode(error)
                trouble = f"{refusal.code.name}: {refusal.message}"
                superseded = refusal.code in _SUPERSEDED
            except asyncio.CancelledError:
                # Either we are cancelled, or the call was: by `renew`, or by the service (see its contract).
                if cast("asyncio.Task[None]", asyncio.current_task()).cancelling():
                    raise
                trouble = "the call was cancelled"
                if self._renewing and not self._closing:
                    self._subscribed = False
                    self._count_down()
                    continue
            except Exception as error:
                # Whatever it is: without a stream nobody on this host is guarded.
                trouble = f"what it said can't be dealt with: {error!r}"
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
        """Wait before the next attempt, and no longer than until there is a new lease; whether there is one."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._renewed.wait(), seconds)
        return self._renewed.is_set()

    # Whether there is a watchdog.

    def _count_down(self) -> None:
        """Show that no watchdog guards the workers, unless one is back soon, as after a restart of the service."""
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

    async def _converse(self) -> None:
        self._mirror.restart()
        self._dealing = dict.fromkeys(self._dealing)
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
            await _end([writing])

    async def _write(self, call: grpc.aio.StreamStreamCall[pb.SuperviseRequest, Any]) -> None:
        try:
            await self._send(call)
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError | grpc.aio.AioRpcError):
                self._log.exception("could not tell the timer service what workers hold")
            # Nothing more is told on this stream: the reader must not wait for what comes of it.
            call.cancel()
            raise

    async def _send(self, call: grpc.aio.StreamStreamCall[pb.SuperviseRequest, Any]) -> None:
        # The time that has passed is to be that of its coming about.
        await call.wait_for_connection()
        subscribe = pb.Subscribe(run_id=self._run_id, node_id=self._node_id, lease=self._lease)
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
            # broke, while we did. That is what we wanted, and is no error to be logged.
            if not is_end_of_stream(error):
                raise

    def _changes(self) -> list[pb.SuperviseAction]:
        return [action_of(change) for change in self._mirror.take(self._watch.now(), _MOST_ACTIONS)]

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
                self._log.info("the timer service is going away")
            case None:
                # An event of a newer service, which we cannot need.
                return

    def _expired(self, event: pb.Expired) -> None:
        key = (event.worker_id, event.scope, event.sequence)
        expired = ExpiredTimer(
            event.worker_id,
            event.scope,
            to_seconds(event.after, "after"),
            to_seconds(event.late_by, "late_by"),
            event.sequence,
            event.learned.count if event.HasField("learned") else 0,
        )
        if key in self._dealing:
            self._dealing[key] = event.expiry_id
        elif not self.holds(expired):
            # It crossed the worker's release on the way.
            self._acknowledge(event.expiry_id)
        elif self._ran_out(expired):
            self._dealing[key] = event.expiry_id
            task = asyncio.create_task(self._deal(expired))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._mirror.renumber(expired.worker_id, expired.scope)
            self._batching.note(expired.after)
            self._acknowledge(event.expiry_id)

    def _refused(self, event: pb.Refused) -> None:
        # A worker may be refused thousands a second.
        if (key := (event.worker_id, event.reason)) not in self._refusals:
            self._refusals.add(key)
            self._log.warning(
                "timers of a worker are refused, and don't guard it",
                worker_id=event.worker_id,
                first=event.scope,
                reason=event.message,
            )

    def _ran_out(self, expired: ExpiredTimer) -> bool:
        """Whether it did by our own watch, too: this host may have been paused, and the service not."""
        held = self._mirror.find(expired.worker_id, expired.scope)
        if held is None or not expired.sequence:
            return True
        return self._watch.now() - held.since + _SHORT >= (held.after or expired.after)

    def _acknowledge(self, expiry_id: int) -> None:
        self._mirror.acknowledge(expiry_id)
        self._batching.note()

    def _learned(self, event: pb.Learned) -> None:
        if event.count:
            self._mirror.learned(event.scope, event.count, to_seconds(event.longest, "longest"))
            return
        self._log.info("a scope is learned anew", scope=event.scope)
        # What was seen before has to be let go of where it is counted, before it is here.
        if self._on_forgotten is not None:
            self._on_forgotten(event.scope)
        self._mirror.forget(event.scope)
        self._batching.note()

    def _stalled(self, event: pb.Stalled) -> None:
        idle = round(to_seconds(event.idle, "idle"), 1)
        if event.over:
            # A warning, as what it takes back: who sees the one must see the other.
            self._log.warning("workers of the run advance again", idle=idle)
            return
        first = event.first
        self._log.warning(
            "no worker of the run advances",
            idle=idle,
            first_node=first.node_id,
            first_rank=first.rank,
            first_step=first.step,
            first_idle=round(to_seconds(first.idle, "idle"), 1),
            at_same_step=event.at_same_step,
            workers=event.workers,
        )

    def _paused(self, slept: float, forgiven: float) -> None:
        self._log.warning(
            "this agent was not running; its workers' deadlines moved",
            slept=round(slept, 3),
            moved_by=round(forgiven, 3),
        )

    async def _deal(self, expired: ExpiredTimer) -> None:
        done: bool | None = None
        try:
            done = await self._on_expired(expired)
        except Exception:
            self._log.exception("could not deal with an expired timer", scope=expired.scope)
        finally:
            key = (expired.worker_id, expired.scope, expired.sequence)
            expiry_id = self._dealing.pop(key)
        if done is not False:
            self._mirror.settle(*key, expiry_id)
            self._batching.note()

    def _report(self, trouble: str) -> None:
        # Said once, not with every attempt.
        if trouble != self._last_trouble:
            self._last_trouble = trouble
            self._log.warning("no connection to the timer service; timers are kept here", reason=trouble)


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
