"""The referee of the watchdog: it checks every reaping, and every missing one, against the real events in workers.

**Never in vain.** A worker that is reaped holds a scope of that name and duration whose time is up: the time that
counts (see truth.py) is the whole duration, except for the difference of two clocks. So no worker is reaped that
released all its timers in time, or for a timer that it acquired again in time, even if messages were lost or late, or
processes paused or restarted. A learned duration is based on real completions, and on enough of them.

**Always in the end.** The worker of a scope whose time is up is reaped: within `PROMPT` of its deadline, or of the time
at which its agent has sent all timers on its stream, if nothing was paused or slow since it began; else within
`AT_LAST` after the end of all faults, without the pauses that a watch clock leaves out (twice: it may leave out twice
as much). Nothing is required for a process that its agent cannot know, or a scope with too few completions.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isclose
from typing import Any, Protocol

from rallypoint.agent.hangs.hung_worker import HungWorker
from rallypoint.timer.core.values import TimerSettings
from rallypoint.timer.v1 import timer_service_pb2 as pb
from rendezvous.core.ledger import Violation
from simulation.network import ATTEMPT, LONGEST_RECONNECT
from simulation.timers.truth import Completions, Span
from simulation.wire import ServerCall, Status

# The largest difference of the rate of a clock from the world's: that of a disciplined clock.
DRIFT = 5e-4
# Seconds from a deadline to the call of the reaper: polling, batching, two messages over the network.
PROMPT = 0.25
# Seconds for all delays after the end of the faults: a broken connection that is not noticed yet (15), the longest wait
# before the next attempt (5), an expiry that is sent again (5), and diagnostics of the worker's other scopes.
AT_LAST = 40.0
# Seconds for which a host may be without the service after a pause: an attempt to connect that began during it lasts
# until its timeout, and the next comes after a back-off.
_RECONNECTING = ATTEMPT + LONGEST_RECONNECT
# Status codes that our service must never return to these agents.
_NEVER = ("UNKNOWN", "INTERNAL", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")


class Reaper(Protocol):
    """A host whose reapings are checked."""

    name: str
    lease: int
    incarnation: str
    registered_at: float | None
    shaken_at: float

    @property
    def rivals(self) -> bool:
        """True if an agent of another incarnation of its run still runs."""

    def guards(self, span: Span, *, all_along: bool = False) -> bool:
        """Return True if it is alive and can know a scope; `all_along`: since the scope began."""


class Referee:
    """The checks of all events in a seed."""

    def __init__(
        self,
        settings: TimerSettings,
        note: Callable[..., None],
        at: Callable[..., object],
        now: Callable[[], float],
    ) -> None:
        """`settings`: of the service; `at`: schedules a call at a time."""
        self.note = note
        self.settings = settings
        self.completions = Completions()
        # By name: the newest agent of each host.
        self.hosts: dict[str, Reaper] = {}
        # Worker and scope of each reaping, for tests.
        self.reaped: list[tuple[str, str]] = []
        self._at = at
        self._now = now
        # By worker: the scopes that its processes are in.
        self._open: dict[str, dict[Span, None]] = {}
        # By worker: the scopes that its processes have left.
        self._overdue: dict[str, list[Span]] = {}
        self._asked: dict[str, Reaper] = {}
        self._broken: list[str] = []
        # By open call: its `subscribe` action.
        self._subscribed: dict[ServerCall, pb.Subscribe] = {}

    def check(self) -> None:
        """Raise the first violation, if there is one; called after each step.

        Raises:
            Violation: An invariant is broken.
        """
        if self._broken:
            raise Violation(self._broken[0])

    def unforeseen(self, what: str) -> None:
        """Report an exception that no code caught."""
        self._break(f"no exception is left uncaught: {what}")

    def _break(self, invariant: str) -> None:
        invariant = " ".join(invariant.split())
        self.note("VIOLATION", invariant)
        self._broken.append(invariant)

    # ---- actions of workers

    def entered(self, span: Span) -> None:
        """A process entered a scope."""
        self.note("enter", span.describe())
        self._open.setdefault(span.worker_id, {})[span] = None
        if span.after is not None:
            self._at(self._now() + span.after + PROMPT, self._expect, span)

    def left(self, span: Span, completed: bool) -> None:
        """A process left a scope, acquired it again, or died."""
        self.note("leave", span.describe())
        del self._open[span.worker_id][span]
        if span.after is None and completed:
            assert span.ended is not None, "what was left has ended"
            self.completions.add(span.scope, span.ended - span.since)
        self._overdue.setdefault(span.worker_id, []).append(span)

    def _expect(self, span: Span) -> None:
        """Check that the worker of a scope is being reaped by now, unless a fault delayed it."""
        now = self._now()
        host = self.hosts.get(span.worker_id.partition(".")[0])
        if span.ended is not None or host is None or not host.guards(span, all_along=True):
            return
        if host.registered_at is None or host.shaken_at > span.since - _RECONNECTING:
            return
        if now < host.registered_at + PROMPT:
            self._at(host.registered_at + PROMPT, self._expect, span)
        elif span.worker_id not in self._asked:
            self._break(f"who is late is reaped within {PROMPT} s: {span.describe()}")

    # ---- reapings

    def reap_asked(self, host: Reaper, hang: HungWorker) -> None:
        """An agent calls its reaper for a worker."""
        now = self._now()
        self.note("reap", hang)
        if hang.worker_id in self._asked:
            self._break(f"one verdict at a time: {hang}")
        self._asked[hang.worker_id] = host
        self.reaped.append((hang.worker_id, hang.scope))
        spans = [*self._open.get(hang.worker_id, ()), *self._overdue.get(hang.worker_id, ())]
        those = [span for span in spans if self._may_be(span, hang)]
        if not any(span.held(now) >= hang.after * (1 - 3 * DRIFT) - 0.002 for span in those):
            why = "acquired it anew" if any(span.replaced for span in those) else "released it"
            self._break(
                f"nobody is reaped for a timer in time: {hang}, who {why} or still has time: "
                f"{'; '.join(span.describe() for span in those[-3:])}"
            )
        if hang.learned_from:
            self._judge_learned(hang.scope, hang.after, hang.learned_from)

    def reap_over(self, host: Reaper, hang: HungWorker) -> None:
        """The reaping of a worker is over, with or without success."""
        self.note("reap over", hang.worker_id, hang.scope)
        self._asked.pop(hang.worker_id, None)

    def agent_died(self, host: Reaper) -> None:
        """An agent died: its reapings are over."""
        for worker_id in [worker_id for worker_id, reaper in self._asked.items() if reaper is host]:
            del self._asked[worker_id]

    def _may_be(self, span: Span, hang: HungWorker) -> bool:
        if span.scope != hang.scope or (span.after is None) != bool(hang.learned_from):
            return False
        return span.after is None or isclose(span.after, hang.after, abs_tol=1e-6)

    def _judge_learned(self, scope: str, after: float, count: int) -> None:
        settings = self.settings
        if count < settings.learn_warm_up:
            self._break(f"nobody is reaped before enough was seen: {scope} after {count}")
        self.saw_count(scope, count)
        if after < settings.learn_least - 1e-6:
            self._break(f"no learned duration is below the least: {scope} {after}")

    def saw_count(self, scope: str, count: int) -> None:
        """Check the number of completions that a service reports."""
        really = self.completions.counts[scope]
        if count > really:
            self._break(f"no completion is counted twice: {scope} has {really}, {count} are told")

    # ---- messages

    def heard(self, call: ServerCall, message: Any) -> None:
        """A service receives a message."""
        for action in message.actions:
            kind = action.WhichOneof("action")
            self.note("heard", call.subject, kind, getattr(action, kind))
            if kind == "subscribe":
                call.subject = action.subscribe.node_id
                self._subscribed[call] = action.subscribe
            elif kind == "registered" and not call.broken and (host := self._holder(call)) is not None:
                host.registered_at = self._now()

    def told(self, call: ServerCall, message: Any) -> None:
        """A service sends a message."""
        if isinstance(message, bytes):
            message = pb.SuperviseResponse.FromString(message)
        for event in message.events:
            kind = event.WhichOneof("event")
            self.note("told", call.subject, kind, getattr(event, kind))
            if kind == "learned":
                self.saw_count(event.learned.scope, event.learned.count)
            elif kind == "refused":
                self._break(f"no timer is refused: {event.refused}")
            elif kind == "expired" and event.expired.HasField("learned"):
                self._judge_expired(event.expired)

    def _judge_expired(self, expired: pb.Expired) -> None:
        after = expired.after.seconds + expired.after.nanos / 1e9
        longest = expired.learned.longest.seconds + expired.learned.longest.nanos / 1e9
        self._judge_learned(expired.learned.scope, after, expired.learned.count)
        if after < self.settings.learn_factor * longest - 1e-6:
            self._break(f"a learned duration is the factor times the longest: {expired}")

    def answered(self, call: ServerCall, status: Status) -> None:
        """A service ends a call."""
        code, details, _ = status
        self.note("answered", call.subject, code.name, details)
        if code.name in _NEVER:
            self._break(f"a service answers no {code.name}: {details}")
        if (
            code.name == "FAILED_PRECONDITION"
            and (host := self._holder(call)) is not None
            and not host.rivals
        ):
            self._break(f"who holds its lease is not refused: {host.name}: {details}")
        self._subscribed.pop(call, None)

    def _holder(self, call: ServerCall) -> Reaper | None:
        """Return the host whose agent made a call, if it is its node's newest and the call has its lease."""
        subscribe = self._subscribed.get(call)
        host = self.hosts.get(subscribe.node_id) if subscribe is not None else None
        if host is None or subscribe is None:
            return None
        held = (host.incarnation, host.lease)
        return host if (subscribe.incarnation, subscribe.lease) == held else None

    # ---- in the end

    def owed(self, ripe: Callable[[str], bool]) -> list[Span]:
        """Return the open scopes that must still be left, or whose worker must be reaped.

        Args:
            ripe: Returns True if a service has learned the timeout of a scope.
        """
        owed = []
        for spans in self._open.values():
            for span in spans:
                host = self.hosts.get(span.worker_id.partition(".")[0])
                if host is not None and host.guards(span) and (span.after is not None or ripe(span.scope)):
                    owed.append(span)
        return owed
