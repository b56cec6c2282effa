"""The agent's end of the timer service: one stream, over which the service learns what the workers hold.

The client, not the service, holds the truth. It keeps what each worker holds, keeps what the service was told,
and sends the difference. So a timer that is acquired and released within a few milliseconds costs no message,
nothing ever queues up, and after any break the difference is simply everything.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import grpc

from rallypoint.serving.errors import ServiceError, decode
from rallypoint.serving.logs import get_logger
from rallypoint.timer.durations import to_duration, to_seconds
from rallypoint.timer.v1 import timer_service_pb2 as pb
from rallypoint.timer.v1 import timer_service_pb2_grpc as pb_grpc

log = get_logger(__name__)

# Of one message; the service takes twice as many.
_MOST_ACTIONS = 500
# The service tells us, by these, that another agent has taken our place.
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
    """How the client talks. Seconds."""

    # How long changes are gathered before they are sent. Default 0.01. It delays no deadline that is further off
    # than this; higher saves messages of workers with many short scopes.
    linger: float = 0.01
    # Wait before the first attempt to reconnect, and the most between two. Each wait is drawn between half of it
    # and all of it, then doubled. Defaults 0.1 and 5: a restarted service is found soon, and a thousand agents
    # don't come back in the same instant.
    back_off: float = 0.1
    back_off_most: float = 5.0
    # How long the service may be out of reach before the log says so. Default 5.
    patience: float = 5.0


@dataclass(frozen=True, slots=True)
class _Held:
    sequence: int
    since: float
    after: float


_Key = tuple[str, str]


class TimerClient:
    """Timers of one node's workers. Belongs to one event loop; nothing in it waits for the service.

    `refusal` is set, and the client stopped, when the service says that the node's lease or stream was
    superseded: another agent has taken over.
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
        """Makes a client that gathers timers, and tells them once started.

        Args:
            channel: to the timer service; stays the caller's.
            run_id: the run.
            node_id: the node.
            lease: the node's lease from the rendezvous service; 0 if there is none.
            settings: see ClientSettings.
            clock: monotonic seconds.
            jitter: numbers from 0 to 1.
        """
        self.refusal: ServiceError | None = None
        self._stub: pb_grpc.TimerServiceAsyncStub = pb_grpc.TimerServiceStub(channel)  # type: ignore[assignment]
        self._run_id, self._node_id, self._lease = run_id, node_id, lease
        self._settings = settings or ClientSettings()
        self._clock, self._jitter = clock, jitter
        self._sequence = 0
        # What the workers hold: worker -> scope -> timer.
        self._held: dict[str, dict[str, _Held]] = {}
        # What the service was told on this stream, and where that may differ from what is held.
        self._told: dict[_Key, int] = {}
        self._changed: set[_Key] = set()
        self._cleared: dict[str, None] = {}
        self._acknowledged: list[int] = []
        self._news = asyncio.Event()
        self._in_step = asyncio.Event()
        # Expiries being dealt with, with the id to acknowledge on this stream; None: of an earlier stream.
        self._dealing: dict[tuple[str, str, int], int | None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._talking: asyncio.Task[None] | None = None
        self._call: grpc.aio.StreamStreamCall[pb.SuperviseRequest, pb.SuperviseResponse] | None = None

    def start(self, on_expired: OnExpired) -> None:
        """Begins to talk to the service, for as long as it takes. Calls `on_expired` once per expiry."""
        self._on_expired = on_expired
        self._talking = asyncio.create_task(self._talk())

    async def close(self, grace: float = 1.0) -> None:
        """Ends all timers of the node and stops. Waits at most `grace` seconds for the service to be told."""
        for worker_id in list(self._held):
            self.clear(worker_id)
        if self._talking is not None and not self._talking.done():
            if self._call is not None and self._told_anything():
                await asyncio.wait({asyncio.create_task(self._in_step.wait())}, timeout=grace)
            self._talking.cancel()
        await _ended([*self._tasks, *([self._talking] if self._talking else [])])

    def renew(self, lease: int) -> None:
        """The node has a new lease: subscribes anew, with all timers."""
        self._lease = lease
        if self._call is not None:
            self._call.cancel()
