"""A model of the timer table in plain dictionaries, as simple as possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rallypoint.rpc.clock import LagSettings
from rallypoint.timer.core.values import Learned, Subscription, TimerName, TimerSettings, TimerState

SETTINGS = TimerSettings(
    reoffer_interval=5.0,
    retention=60.0,
    learn_warm_up=3,
    learn_factor=2.0,
    learn_least=1.0,
    learned_retention=200.0,
    max_scopes_per_run=2,
    lag=LagSettings(tolerance=0.125, pulse=0.5, settle=1.0),
)
# Deadlines up to this many seconds in the future count as reached, as in the core.
ROUNDING = 1e-6

Place = tuple[str, str]


@dataclass
class Held:
    """A timer of the model. Times are on the watch clock."""

    start: float
    after: float
    learned_as: str
    sequence: int
    stream: int
    expired: bool = False
    # Once expired: time of the next report, or of the drop.
    again: float = 0.0
    expiry_id: int = 0


@dataclass
class Known:
    """A node of the model."""

    lease: int = 0
    subscriber: Subscription | None = None
    # Time at which it is forgotten, on the watch clock.
    until: float | None = None


@dataclass
class Model:
    """All timers, nodes and scopes."""

    now: float
    # Seconds by which the watch clock is behind.
    forgiven: float = 0.0
    held: dict[TimerName, Held] = field(default_factory=dict)
    nodes: dict[Place, Known] = field(default_factory=dict)
    # By run and scope.
    learned: dict[tuple[str, str], Learned] = field(default_factory=dict)
    # By run with learned scopes but without a node: the time since which it has none.
    idle: dict[str, float] = field(default_factory=dict)

    @property
    def watch(self) -> float:
        return self.now - self.forgiven

    def in_force(self, subscription: Subscription) -> bool:
        node = self.nodes.get((subscription.run_id, subscription.node_id))
        return node is not None and node.subscriber == subscription and subscription.lease >= node.lease

    def on(self, place: Place) -> dict[TimerName, Held]:
        return {name: timer for name, timer in self.held.items() if name[:2] == place}

    def after_of(self, name: TimerName) -> float | None:
        timer = self.held[name]
        if timer.expired or not timer.learned_as:
            return timer.after
        return self.after_learned(name.run_id, timer.learned_as)

    def after_learned(self, run: str, scope: str) -> float | None:
        learned = self.learned.get((run, scope))
        if learned is None or learned.count < SETTINGS.learn_warm_up:
            return None
        return max(SETTINGS.learn_least, SETTINGS.learn_factor * learned.longest)

    def scopes_of(self, run: str) -> set[str]:
        used = {timer.learned_as for name, timer in self.held.items() if name.run_id == run}
        return {scope for of, scope in self.learned if of == run} | used - {""}

    def has_room(self, run: str, scope: str) -> bool:
        known = self.scopes_of(run)
        return scope in known or len(known) < SETTINGS.max_scopes_per_run

    def claim(self, place: Place, lease: int) -> Known:
        node = self.nodes.setdefault(place, Known())
        node.lease = max(node.lease, lease)
        self.idle.pop(place[0], None)
        return node

    def forget_if_idle(self, place: Place) -> None:
        node = self.nodes[place]
        if node.subscriber or self.on(place):
            node.until = None
        elif node.lease:
            node.until = self.watch + SETTINGS.retention
        else:
            self.remove(place)

    def remove(self, place: Place) -> None:
        del self.nodes[place]
        run = place[0]
        if not any(other[0] == run for other in self.nodes) and any(of == run for of, _ in self.learned):
            self.idle[run] = self.now

    def merge(self, run: str, scope: str, count: Callable[[Learned], int], longest: float) -> None:
        old = self.learned.get((run, scope), Learned(scope, 0, 0.0))
        self.learned[run, scope] = Learned(scope, count(old), max(old.longest, longest))

    def forget_runs(self) -> set[tuple[str, str]]:
        """Forget the scopes of runs that have had no node for too long; return these scopes."""
        forgotten: set[tuple[str, str]] = set()
        for run, since in list(self.idle.items()):
            if since + SETTINGS.learned_retention <= self.now:
                del self.idle[run]
                gone = [place for place in self.learned if place[0] == run]
                for place in gone:
                    del self.learned[place]
                forgotten.update(gone)
        return forgotten

    def judge(self) -> tuple[dict[TimerName, int], int, int]:
        """Return the expiries to report, and how many timers expire, or are dropped, for lack of a subscriber."""
        now = self.watch + ROUNDING
        expected: dict[TimerName, int] = {}
        unclaimed = 0
        dropped: list[TimerName] = []
        for name, timer in self.held.items():
            after = self.after_of(name)
            if after is None or (timer.again if timer.expired else timer.start + after) > now:
                continue
            if self.nodes[name[:2]].subscriber:
                expected[name] = timer.sequence
                timer.again = self.watch + SETTINGS.reoffer_interval
            elif timer.expired:
                dropped.append(name)
            else:
                unclaimed += 1
                timer.again = self.watch + SETTINGS.retention
            timer.after, timer.expired = after, True
        for name in dropped:
            del self.held[name]
            self.forget_if_idle(name[:2])
        for place in [place for place, node in self.nodes.items() if node.until and node.until <= now]:
            self.remove(place)
        return expected, unclaimed, len(dropped)

    def state_of(self, name: TimerName) -> TimerState:
        if self.held[name].expired:
            return TimerState.OFFERED if self.nodes[name[:2]].subscriber else TimerState.UNCLAIMED
        return TimerState.LEARNING if self.after_of(name) is None else TimerState.COUNTING
