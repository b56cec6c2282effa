"""One Supervise stream: each action that an agent tells on it, taken in order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from itertools import islice

from rallypoint.timer.core import MAX_AFTER
from rallypoint.timer.durations import to_seconds
from rallypoint.timer.mailbox import Mailbox, Refusal
from rallypoint.timer.refusals import InvalidField, TooMany
from rallypoint.timer.v1 import timer_service_pb2 as pb
from rallypoint.timer.values import Subscription
from rallypoint.timer.watchdog import Watchdog

MAX_ACTIONS = 1000
"""Of one message. Taking them holds up the event loop, so their number is bounded: some 5 ms."""


class Supervision:
    """The half of a stream that brings actions. It begins with the first message of the stream."""

    def __init__(self, watchdog: Watchdog, first: pb.SuperviseRequest) -> None:
        """Subscribes, as the first action says. The others of that message are taken by `read`.

        Raises:
            Refused: it is no subscription, or is refused.
        """
        check_number(len(first.actions))
        if not first.actions or first.actions[0].WhichOneof("action") != "subscribe":
            raise InvalidField("actions", "the first action of a stream must be subscribe")
        wanted = first.actions[0].subscribe
        self._watchdog = watchdog
        self._table = watchdog.table
        self._first = first
        self._registered = False
        self.subscription: Subscription
        self.mailbox: Mailbox
        self.subscription, self.mailbox = watchdog.subscribe(
            wanted.run_id,
            wanted.node_id,
            wanted.lease,
            _stall_after(wanted),
            incarnation=wanted.incarnation,
            lease_age=to_seconds(wanted.lease_age, "lease_age"),
        )

    async def read(self, requests: AsyncIterator[pb.SuperviseRequest]) -> None:
        """Takes what comes, up to the end of the stream. What breaks it ends the mailbox, which says so."""
        try:
            self._take(islice(self._first.actions, 1, None))
            async for request in requests:
                check_number(len(request.actions))
                self._take(request.actions)
            self.mailbox.end()
        except Exception as error:
            self.mailbox.end(error)

    def _take(self, actions: Iterable[pb.SuperviseAction]) -> None:
        try:
            for action in actions:
                self._act(action)
        finally:
            self._watchdog.arm()

    def _act(self, action: pb.SuperviseAction) -> None:
        subscription = self.subscription
        match action.WhichOneof("action"):
            case "acquire":
                self._register(action.acquire)
            case "release":
                self._table.end(subscription, action.release.worker_id, action.release.scope)
            case "observe":
                observe = action.observe
                longest = to_seconds(observe.longest, "longest")
                self._watchdog.observe(subscription, observe.scope, observe.count, longest)
            case "progress":
                self._tell_progress(action.progress)
            case "acknowledge":
                self._table.acknowledge(subscription, action.acknowledge.expiry_id)
            case "clear":
                self._watchdog.clear(subscription, action.clear.worker_id)
            case "learned":
                self._learn(action.learned)
            case "registered":
                self._registered = True
                self._watchdog.registered(subscription)
            case "subscribe":
                raise InvalidField("actions", "subscribe may only be the first action of a stream")
            case None:
                # An action of a newer client: what it is for doesn't exist here.
                return

    def _register(self, acquire: pb.Acquire) -> None:
        try:
            self._table.register(
                self.subscription,
                acquire.worker_id,
                acquire.scope,
                to_seconds(acquire.after, "after"),
                self._watchdog.now(),
                sequence=acquire.sequence,
                elapsed=to_seconds(acquire.elapsed, "elapsed"),
                learned_as=acquire.learned_as,
            )
        except (InvalidField, TooMany) as error:
            self.mailbox.refuse(Refusal(acquire.worker_id, acquire.scope, acquire.sequence, error))

    def _tell_progress(self, progress: pb.Progress) -> None:
        self._watchdog.tell_progress(
            self.subscription,
            progress.worker_id,
            progress.rank,
            progress.step,
            to_seconds(progress.elapsed, "elapsed"),
        )

    def _learn(self, learned: pb.Learned) -> None:
        if not learned.count:
            self._watchdog.has_forgotten(self.subscription, learned.scope)
            return
        if self._registered:
            raise InvalidField("actions", "learned may only be sent before registered, but for a count of 0")
        longest = to_seconds(learned.longest, "longest")
        self._watchdog.learn(self.subscription, learned.scope, learned.count, longest)


def check_number(actions: int) -> None:
    """Refuses more actions than one message may have."""
    if actions > MAX_ACTIONS:
        raise InvalidField("actions", f"at most {MAX_ACTIONS:,} in one message")


def _stall_after(wanted: pb.Subscribe) -> float | None:
    if not wanted.HasField("stall_after"):
        return None
    seconds = to_seconds(wanted.stall_after, "stall_after")
    if not 0 <= seconds <= MAX_AFTER:
        raise InvalidField("stall_after", "must be at least zero and at most ten years")
    return seconds
