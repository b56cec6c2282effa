"""The agent's end of the timer service: one stream that keeps the service in step with a ledger."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import grpc

from rallypoint.serving.errors import ServiceError, decode
from rallypoint.serving.logs import get_logger
from rallypoint.timer.durations import to_duration, to_seconds
from rallypoint.timer.ledger import Acknowledge, Change, End, EndAll, Ledger, Start
from rallypoint.timer.v1 import timer_service_pb2 as pb
from rallypoint.timer.v1 import timer_service_pb2_grpc as pb_grpc

__all__ = ["ClientSettings", "ExpiredTimer", "OnExpired", "TimerClient"]

log = get_logger(__name__)

# Of one message; the service takes twice as many.
_MOST_ACTIONS = 500
# By these the service says that another agent has taken our place: coming back would be a fight over it.
_FINAL = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED)


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


OnExpired = Callable[[ExpiredTimer], Awaitable[bool | None]]
"""Deals with an expiry. False: it could not; the service will tell it again. An exception counts as done."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How the client talks. All in seconds."""

    # How long changes are gathered before they are sent. Default 0.01. Deadlines don't suffer: the time that has
    # passed is sent along. Higher saves messages of workers with many short scopes; a timer that is shorter than
    # this expires late by up to as much.
    linger: float = 0.01
    # The wait before the first attempt to reconnect, and the longest between two. Each is drawn between half of
    # it and all of it, then doubled. Defaults 0.1 and 5: a restarted service is found soon, and a thousand agents
    # don't come back in one instant.
    back_off: float = 0.1
    back_off_most: float = 5.0
    # How long the service may be out of reach before the log says so. Default 5.
    patience: float = 5.0


class TimerClient:
    """Timers of one node's workers. Belongs to one event loop; nothing but `close` waits for the service.

    `refusal` is set, and the client ends, when the service says that another agent has taken the node's place.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        run_id: str,
        node_id: str,
        lease: int = 0,
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
            settings: see ClientSettings.
            clock: monotonic seconds; `since` is by this clock.
            jitter: gives numbers from 0 to 1.
        """
        self.refusal: ServiceError | None = None
        self._stub = pb_grpc.TimerServiceStub(channel)
        self._run_id, self._node_id, self._lease = run_id, node_id, lease
        self._settings = settings or ClientSettings()
        self._clock, self._jitter = clock, jitter
        self._log = log.bind(run_id=run_id, node_id=node_id)
        # A restarted agent must not come with the numbers that the one before used for other timers.
        self._ledger = Ledger(first_sequence=1 + int(jitter() * 2**52))
        self._news = asyncio.Event()
        self._closing = False
        self._subscribed = False
        self._renewing = False
        self._call: grpc.aio.StreamStreamCall[pb.SuperviseRequest, pb.SuperviseResponse] | None = None
        self._talking: asyncio.Task[None] | None = None
        self._last_trouble = ""
        # Expiries being dealt with, and the id to acknowledge on this stream; None: it was told on an earlier one.
        self._dealing: dict[tuple[str, str, int], int | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, on_expired: OnExpired) -> None:
        """Begins to talk with the service. Each expiry is dealt with in a task of its own, once at a time."""
        self._on_expired = on_expired
        self._talking = asyncio.create_task(self._talk())

    async def close(self, grace: float = 1.0) -> None:
        """Ends: the node has no workers any more. Waits at most `grace` seconds for the service to be told."""
        self._closing = True
        for worker_id in self._ledger.workers:
            self.clear(worker_id)
        self._news.set()
        if self._talking is not None:
            await asyncio.wait({self._talking}, timeout=grace if self._subscribed else 0)
            await _end([self._talking, *self._tasks])

    def renew(self, lease: int) -> None:
        """The node has a new lease: the client subscribes anew with all timers."""
        self._lease = lease
        if self._call is not None:
            self._renewing = True
            self._call.cancel()

    def acquire(self, worker_id: str, scope: str, after: float, since: float | None = None) -> None:
        """Starts a worker's timer, in place of the one of that name.

        Args:
            worker_id: 1 to 256 bytes of UTF-8.
            scope: 1 to 512 bytes of UTF-8.
            after: seconds, more than 0 and at most ten years.
            since: when it started, by the client's clock; None: now.
        """
        self._ledger.acquire(worker_id, scope, after, self._clock() if since is None else since)
        self._news.set()

    def release(self, worker_id: str, scope: str) -> None:
        """Ends a worker's timer; harmless if there is none."""
        self._ledger.release(worker_id, scope)
        self._news.set()

    def clear(self, worker_id: str) -> None:
        """Ends all timers of a worker that is gone."""
        self._ledger.clear(worker_id)
        self._news.set()

    def holds(self, expired: ExpiredTimer) -> bool:
        """Whether the worker still holds the timer that ran out: it was neither released nor acquired anew."""
        return not expired.sequence or expired.sequence == self._ledger.sequence_of(
            expired.worker_id, expired.scope
        )

    async def _talk(self) -> None:
        delay = self._settings.back_off
        while not self._closing:
            trouble = "the service ended the stream"
            try:
                await self._converse()
            except grpc.aio.AioRpcError as error:
                refusal = decode(error)
                trouble = f"{refusal.code.name}: {refusal.message}"
                if refusal.code in _FINAL:
                    self.refusal = refusal
                    self._log.error("another agent took over the timers of this node", reason=str(refusal))
                    return
            except asyncio.CancelledError:
                # Either we are cancelled, or the call was: by `renew`, or by the service (see its contract).
                if cast("asyncio.Task[None]", asyncio.current_task()).cancelling():
                    raise
                trouble = "the call was cancelled"
                if self._renewing and not self._closing:
                    self._subscribed = False
                    continue
            if self._closing:
                return
            if self._subscribed:
                delay = self._settings.back_off
            self._subscribed = False
            self._report(trouble)
            await asyncio.sleep(delay * (1 + self._jitter()) / 2)
            delay = min(delay * 2, self._settings.back_off_most)

    async def _converse(self) -> None:
        self._ledger.restart()
        self._dealing = dict.fromkeys(self._dealing)
        self._call = call = self._stub.Supervise(wait_for_ready=True)
        self._renewing = False
        alarm = asyncio.get_running_loop().call_later(
            self._settings.patience, self._report, "it does not answer"
        )
        writing = asyncio.create_task(self._write(call))
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                alarm.cancel()
                for event in cast(pb.SuperviseResponse, response).events:
                    self._take(event)
        finally:
            alarm.cancel()
            self._call = None
            call.cancel()
            await _end([writing])

    async def _write(self, call: grpc.aio.StreamStreamCall[pb.SuperviseRequest, Any]) -> None:
        try:
            await self._tell(call)
        except BaseException:
            # Nothing more is told on this stream: the reader must not wait for what comes of it.
            call.cancel()
            raise

    async def _tell(self, call: grpc.aio.StreamStreamCall[pb.SuperviseRequest, Any]) -> None:
        subscribe = pb.Subscribe(run_id=self._run_id, node_id=self._node_id, lease=self._lease)
        actions = [pb.SuperviseAction(subscribe=subscribe), *self._changes()]
        while self._ledger.pending:
            await call.write(pb.SuperviseRequest(actions=actions))
            actions = self._changes()
        actions.append(pb.SuperviseAction(registered=pb.Registered()))
        await call.write(pb.SuperviseRequest(actions=actions))
        while self._ledger.pending or not self._closing:
            self._news.clear()
            if not self._ledger.pending:
                await self._news.wait()
            if not self._closing:
                await asyncio.sleep(self._settings.linger)
            while actions := self._changes():
                await call.write(pb.SuperviseRequest(actions=actions))
        await call.done_writing()

    def _changes(self) -> list[pb.SuperviseAction]:
        return [_action(change) for change in self._ledger.take(self._clock(), _MOST_ACTIONS)]

    def _take(self, event: pb.SuperviseEvent) -> None:
        match event.WhichOneof("event"):
            case "subscribed":
                self._subscribed = True
                self._last_trouble = ""
                self._log.info("the timer service watches this node's workers")
            case "expired":
                self._expired(event.expired)
            case "refused":
                refused = event.refused
                self._log.warning(
                    "a timer was refused: its worker is not guarded by it",
                    worker_id=refused.worker_id,
                    scope=refused.scope,
                    reason=refused.message,
                )
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
        )
        if key in self._dealing:
            self._dealing[key] = event.expiry_id
        elif self.holds(expired):
            self._dealing[key] = event.expiry_id
            task = asyncio.create_task(self._deal(expired))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            # It crossed the worker's release on the way.
            self._ledger.acknowledge(event.expiry_id)
            self._news.set()

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
            self._ledger.settle(*key, expiry_id)
            self._news.set()

    def _report(self, trouble: str) -> None:
        # Said once, not with every attempt.
        if trouble != self._last_trouble:
            self._last_trouble = trouble
            self._log.warning("no connection to the timer service; timers are kept here", reason=trouble)


def _action(change: Change) -> pb.SuperviseAction:
    match change:
        case Start():
            return pb.SuperviseAction(
                acquire=pb.Acquire(
                    worker_id=change.worker_id,
                    scope=change.scope,
                    after=to_duration(change.after),
                    elapsed=to_duration(change.elapsed),
                    sequence=change.sequence,
                )
            )
        case End():
            return pb.SuperviseAction(release=pb.Release(worker_id=change.worker_id, scope=change.scope))
        case EndAll():
            return pb.SuperviseAction(clear=pb.Clear(worker_id=change.worker_id))
        case Acknowledge():
            return pb.SuperviseAction(acknowledge=pb.Acknowledge(expiry_id=change.expiry_id))


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
