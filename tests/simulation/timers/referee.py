"""The referee of the watchdog: holds every verdict, and every silence, against what workers really did.

**Never in vain.** Whoever is to be reaped holds a scope, of that name and duration, for which its time is up: what
counts of it (see truth.py) is the whole duration, but for what two clocks may differ in it. So no worker is reaped that
released all its timers in time, nor one for a timer that it acquired anew in time, whatever was lost, late, paused or
restarted. A duration that was learned rests on completions that really happened, and on enough of them.

**Always in the end.** A scope whose time is up has its worker reaped: within `PROMPT` of its deadline, or of the moment
at which its agent's stream has told all timers, if nothing was paused or slow since it began; else within `AT_LAST`
after all trouble is over, pauses that a watch clock forgives not counted (twice: it forgives up to twice as much).
Nothing is asked for a process that its agent cannot know of, or of which not enough was learned.
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

# How much faster or slower than the world's a clock may go: as much as one that is disciplined does.
DRIFT = 5e-4
# Seconds from a deadline to the reaper's being asked: looks, gathering, two ways through the network.
PROMPT = 0.25
# Seconds for all that may follow the end of trouble: a broken connection that nobody noticed (15), the longest wait
# before the next attempt (5), an expiry that is told again (5), and evidence of the worker's other scopes.
AT_LAST = 40.0
# Seconds for which a host may be without the service after something stood still: an attempt to connect that began
# meanwhile lasts as long as one may, and the next comes after a pause.
_RECONNECTING = ATTEMPT + LONGEST_RECONNECT
# What a service of ours never answers, or not to such agents.
_NEVER = ("UNKNOWN", "INTERNAL", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")


class Reaper(Protocol):
    """A host, as its verdicts are judged."""

    name: str
    lease: int
    incarnation: str
    registered_at: float | None
    shaken_at: float

    @property
    def rivals(self) -> bool:
        """Whether an agent of another incarnation of its run is still there."""

    def guards(self, span: Span, *, all_along: bool = False) -> bool:
        """Whether it lives and can know of a scope, and has been able to since it began."""


class Referee:
    """Looks at all that happens in a seed."""

    def __init__(
        self,
        settings: TimerSettings,
        note: Callable[..., None],
        at: Callable[..., object],
        now: Callable[[], float],
    ) -> None:
        """`settings`: the service's; `at`: has something called later."""
        self.note = note
        self.settings = settings
        self.completions = Completions()
        # Hosts that live, by name: the newest life of each.
        self.hosts: dict[str, Reaper] = {}
        # What was reaped, and why; for the tests' sake.
        self.reaped: list[tuple[str, str]] = []
        self._at = at
        self._now = now
        # Scopes that processes are in, by worker.
        self._open: dict[str, dict[Span, None]] = {}
        # And those that they left too late.
        self._overdue: dict[str, list[Span]] = {}
        self._asked: dict[str, Reaper] = {}
        self._broken: list[str] = []
        # With what calls began that are not over yet.
        self._subscribed: dict[ServerCall, pb.Subscribe] = {}

    def check(self) -> None:
        """Called after each step.

        Raises:
            Violation: something was wrong.
        """
        if self._broken:
            raise Violation(self._broken[0])

    def unforeseen(self, what: str) -> None:
        """Something went wrong that nobody caught."""
        self._break(f"no exception is left uncaught: {what}")

    def _break(self, invariant: str) -> None:
        invariant = " ".join(invariant.split())
        self.note("VIOLATION", invariant)
        self._broken.append(invariant)

    # ---- what workers do

    def entered(self, span: Span) -> None:
        """A process entered a scope."""
        self.note("enter", span.describe())
        self._open.setdefault(span.worker_id, {})[span] = None
        if span.after is not None:
            self._at(self._now() + span.after + PROMPT, self._expect, span)

    def left(self, span: Span, completed: bool) -> None:
        """It left it, acquired it anew, or is gone."""
        self.note("leave", span.describe())
        del self._open[span.worker_id][span]
        if span.after is None and completed:
            assert span.ended is not None, "what was left has ended"
            self.completions.add(span.scope, span.ended - span.since)
        self._overdue.setdefault(span.worker_id, []).append(span)

    def _expect(self, span: Span) -> None:
        """By now its worker is being reaped, if nothing stood in the way."""
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

    # ---- what is decided

    def reap_asked(self, host: Reaper, hang: HungWorker) -> None:
        """A worker is to be reaped."""
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
        """It was, or could not be."""
        self.note("reap over", hang.worker_id, hang.scope)
        self._asked.pop(hang.worker_id, None)

    def agent_died(self, host: Reaper) -> None:
        """What it was about to do, it does no more."""
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
        """A service says that it has seen so many completions."""
        really = self.completions.counts[scope]
        if count > really:
            self._break(f"no completion is counted twice: {scope} has {really}, {count} are told")

    # ---- what goes over the wire

    def heard(self, call: ServerCall, message: Any) -> None:
        """A service reads a message."""
        for action in message.actions:
            kind = action.WhichOneof("action")
            self.note("heard", call.subject, kind, getattr(action, kind))
            if kind == "subscribe":
                call.subject = action.subscribe.node_id
                self._subscribed[call] = action.subscribe
            elif kind == "registered" and not call.broken and (host := self._holder(call)) is not None:
                host.registered_at = self._now()

    def told(self, call: ServerCall, message: Any) -> None:
        """A service says something."""
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
        """The host that is its node's agent now, if the call is made by it and with its lease."""
        subscribe = self._subscribed.get(call)
        host = self.hosts.get(subscribe.node_id) if subscribe is not None else None
        if host is None or subscribe is None:
            return None
        held = (host.incarnation, host.lease)
        return host if (subscribe.incarnation, subscribe.lease) == held else None

    # ---- in the end

    def owed(self, ripe: Callable[[str], bool]) -> list[Span]:
        """Scopes whose worker is to be reaped some time, or that are still to be left.

        Args:
            ripe: whether a service knows how long a scope may take.
        """
        owed = []
        for spans in self._open.values():
            for span in spans:
                host = self.hosts.get(span.worker_id.partition(".")[0])
                if host is not None and host.guards(span) and (span.after is not None or ripe(span.scope)):
                    owed.append(span)
        return owed
