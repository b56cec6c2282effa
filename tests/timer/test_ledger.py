"""Ledger and table together, over a network that delays and breaks and a service that restarts: a worker that
released in time is never reaped, and one that did not always is."""

from __future__ import annotations

import random

import pytest

from rallypoint.timer.core import TimerTable
from rallypoint.timer.ledger import Acknowledge, Change, End, EndAll, Ledger, Start
from rallypoint.timer.values import Expiry, Subscription

WORKERS = ["0@1", "1@1", "2@1"]
SCOPES = ["s", "t"]


def tell(table: TimerTable, subscription: Subscription, change: Change, now: float) -> None:
    match change:
        case Start():
            table.register(
                subscription,
                change.worker_id,
                change.scope,
                change.after,
                now,
                sequence=change.sequence,
                elapsed=change.elapsed,
            )
        case End():
            table.end(subscription, change.worker_id, change.scope)
        case EndAll():
            table.clear(subscription, change.worker_id)
        case Acknowledge():
            table.acknowledge(subscription, change.expiry_id)


class History:
    """One agent and one service, with a network between them, through a random history."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 100.0
        self.ledger = Ledger()
        self.table = TimerTable(self.now)
        self.up: list[Change | None] = []
        self.down: list[Expiry] = []
        self.subscription: Subscription | None = None
        # (worker, scope) -> deadline, as the workers see it.
        self.deadlines: dict[tuple[str, str], float] = {}
        self.reaped = 0
        self.connect()

    def connect(self) -> None:
        """In one go, as the client does: subscribe, everything, registered; some may be lost with the stream."""
        self.up.clear()
        self.down.clear()
        self.ledger.restart()
        self.subscription = self.table.subscribe("run", "a", 0, self.now)
        self.up.extend([*self.ledger.take(self.now, 1000), None])

    def step(self) -> None:
        action = self.random.choices(
            [self.acquire, self.release, self.send, self.deliver, self.told, self.wait, self.trouble],
            weights=[4, 3, 6, 6, 4, 4, 1],
        )[0]
        action()

    def acquire(self) -> None:
        key = (self.random.choice(WORKERS), self.random.choice(SCOPES))
        after = self.random.randint(1, 30) / 4
        if self.now < self.deadlines.get(key, self.now + 1):
            self.deadlines[key] = self.now + after
            self.ledger.acquire(*key, after, self.now)

    def release(self) -> None:
        """Always in time: who is late hangs."""
        key = (self.random.choice(WORKERS), self.random.choice(SCOPES))
        if self.now < self.deadlines.get(key, self.now):
            del self.deadlines[key]
            self.ledger.release(*key)

    def send(self) -> None:
        if self.subscription is not None:
            self.up.extend(self.ledger.take(self.now, self.random.randint(1, 3)))

    def deliver(self) -> None:
        if self.subscription is not None and self.up:
            change = self.up.pop(0)
            if change is None:
                self.table.registered(self.subscription)
            else:
                tell(self.table, self.subscription, change, self.now)

    def told(self) -> None:
        if not self.down:
            return
        expiry = self.down.pop(0)
        key = (expiry.name.worker_id, expiry.name.scope)
        if self.ledger.sequence_of(*key) != expiry.sequence:
            self.ledger.acknowledge(expiry.expiry_id)
            return
        assert self.deadlines[key] <= self.now + 1e-6, "reaped a worker whose timer had not run out"
        self.reaped += 1
        self.ledger.settle(*key, expiry.sequence, expiry.expiry_id)
        for other in [other for other in self.deadlines if other[0] == key[0]]:
            del self.deadlines[other]
        self.ledger.clear(key[0])

    def wait(self, seconds: float | None = None) -> None:
        self.now += self.random.randint(1, 8) / 4 if seconds is None else seconds
        self.down.extend(self.table.advance(self.now, self.now).expiries)

    def trouble(self) -> None:
        match self.random.randint(0, 2):
            case 0:
                if self.subscription is not None:
                    self.table.unsubscribe(self.subscription, self.now)
                self.subscription = None
                self.up.clear()
                self.down.clear()
            case 1:
                self.table = TimerTable(self.now)
                self.subscription = None
                self.down.clear()
            case 2:
                if self.subscription is None:
                    self.connect()

    def settle(self) -> None:
        """Peace: the stream is there, everything arrives, and time passes."""
        if self.subscription is None:
            self.connect()
        for _ in range(50):
            while self.up or self.ledger.pending or self.down:
                self.send()
                self.deliver()
                self.told()
            self.wait(0.5)


@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_only_who_hangs_is_reaped(first: int) -> None:
    """1,000 random histories; the seed is in the assertion's message."""
    reaped = 0
    for seed in range(first, first + 250):
        history = History(seed)
        try:
            for _ in range(120):
                history.step()
            history.settle()
            assert all(deadline > history.now for deadline in history.deadlines.values()), (
                "one was not reaped"
            )
            assert len(history.table) == len(history.deadlines)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        reaped += history.reaped
    assert reaped > 250, "the histories hardly reap anybody: they show nothing"


def test_what_ends_before_it_was_told_is_never_told() -> None:
    """A timer that is acquired and released between two looks costs no message."""
    ledger = Ledger()
    for _ in range(1000):
        ledger.acquire("w", "s", 60.0, 0.0)
        ledger.release("w", "s")
    assert ledger.take(1.0, 10) == []
    assert not ledger.pending


def test_only_the_last_of_many_acquisitions_is_told() -> None:
    """With the time that has passed since."""
    ledger = Ledger()
    for number in range(5):
        ledger.acquire("w", "s", 60.0, float(number))
    assert ledger.take(10.0, 10) == [Start("w", "s", 60.0, 6.0, 5)]
    ledger.acquire("w", "s", 60.0, 7.0)
    ledger.release("w", "s")
    assert ledger.take(10.0, 10) == [End("w", "s")]


def test_a_worker_that_is_gone_is_told_once() -> None:
    """One message, however many timers it held; what it acquires later is told after that."""
    ledger = Ledger()
    for number in range(100):
        ledger.acquire("w", f"s{number}", 60.0, 0.0)
    assert len(ledger.take(0.0, 1000)) == 100
    ledger.clear("w")
    ledger.acquire("w", "again", 60.0, 0.0)
    assert ledger.take(0.0, 1000) == [EndAll("w"), Start("w", "again", 60.0, 0.0, 101)]


def test_dealing_with_an_expiry_leaves_a_newer_timer_alone() -> None:
    """The worker acquired the scope anew while its old timer was being judged."""
    ledger = Ledger()
    ledger.acquire("w", "s", 1.0, 0.0)
    ledger.take(0.0, 10)
    ledger.acquire("w", "s", 1.0, 5.0)
    ledger.settle("w", "s", 1, expiry_id=9)
    assert ledger.take(5.0, 10) == [Acknowledge(9), Start("w", "s", 1.0, 0.0, 2)]
