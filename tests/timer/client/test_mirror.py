"""TimerMirror and TimerTable together, over a network that delays and breaks, with a service that restarts and a host
that is paused: a worker that releases in time is never killed, and any other always is."""

from __future__ import annotations

import random

import pytest

from rallypoint.rpc.durations import to_duration, to_seconds
from rallypoint.timer.client.mirror import MOST_SCOPES, TimerMirror
from rallypoint.timer.core.core import TimerTable
from rallypoint.timer.core.values import Expiry, Subscription
from rallypoint.timer.v1 import timer_service_pb2 as pb
from support.marks import slow

WORKERS = ["0@1", "1@1", "2@1"]
SCOPES = ["s", "t"]


def tell(table: TimerTable, subscription: Subscription, action: pb.SuperviseAction, now: float) -> None:
    match action.WhichOneof("action"):
        case "acquire":
            acquire = action.acquire
            table.register(
                subscription,
                acquire.worker_id,
                acquire.scope,
                to_seconds(acquire.after),
                now,
                sequence=acquire.sequence,
                elapsed=to_seconds(acquire.elapsed),
            )
        case "release":
            table.end(subscription, action.release.worker_id, action.release.scope)
        case "clear":
            table.clear(subscription, action.clear.worker_id)
        case "acknowledge":
            table.acknowledge(subscription, action.acknowledge.expiry_id)


def start(
    worker_id: str, scope: str, after: float, elapsed: float, sequence: int, *, learned_as: str = ""
) -> pb.SuperviseAction:
    acquire = pb.Acquire(worker_id=worker_id, scope=scope, elapsed=to_duration(elapsed), sequence=sequence)
    if learned_as:
        acquire.learned_as = learned_as
    else:
        acquire.after.CopyFrom(to_duration(after))
    return pb.SuperviseAction(acquire=acquire)


def end(worker_id: str, scope: str) -> pb.SuperviseAction:
    return pb.SuperviseAction(release=pb.Release(worker_id=worker_id, scope=scope))


def end_all(worker_id: str) -> pb.SuperviseAction:
    return pb.SuperviseAction(clear=pb.ClearWorker(worker_id=worker_id))


def completions(scope: str, count: int, longest: float) -> pb.SuperviseAction:
    return pb.SuperviseAction(observe=pb.Observe(scope=scope, count=count, longest=to_duration(longest)))


def learned(scope: str, count: int, longest: float) -> pb.SuperviseAction:
    return pb.SuperviseAction(learned=pb.Learned(scope=scope, count=count, longest=to_duration(longest)))


def reached(worker_id: str, rank: int, step: int, elapsed: float) -> pb.SuperviseAction:
    progress = pb.Progress(worker_id=worker_id, rank=rank, step=step, elapsed=to_duration(elapsed))
    return pb.SuperviseAction(progress=progress)


class History:
    """A random history of one agent and one service, with a network between them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 100.0
        # Seconds for which the agent's host, with all its workers, was paused.
        self.slept = 0.0
        self.ledger = TimerMirror()
        self.table = TimerTable(self.now)
        self.up: list[pb.SuperviseAction | None] = []
        self.down: list[Expiry] = []
        self.subscription: Subscription | None = None
        # (worker, scope) -> deadline, as the workers see it, by the clock of their host.
        self.deadlines: dict[tuple[str, str], float] = {}
        self.reaped = 0
        # Timers that expired only because of a pause.
        self.spared = 0
        self.connect()

    @property
    def host(self) -> float:
        """The clock of the agent's host, which leaves its pauses out."""
        return self.now - self.slept

    def connect(self) -> None:
        """In one batch, as the client does: subscribe, everything, registered; some may be lost with the stream."""
        self.up.clear()
        self.down.clear()
        self.ledger.restart()
        self.subscription = self.table.subscribe("run", "a", 0, self.now)
        self.up.extend([*self.ledger.take(self.host, 1000), None])

    def step(self) -> None:
        action = self.random.choices(
            [
                self.acquire,
                self.release,
                self.send,
                self.deliver,
                self.told,
                self.wait,
                self.trouble,
                self.pause,
            ],
            weights=[4, 3, 6, 6, 4, 4, 1, 1],
        )[0]
        action()

    def acquire(self) -> None:
        key = (self.random.choice(WORKERS), self.random.choice(SCOPES))
        after = self.random.randint(1, 30) / 4
        if self.host < self.deadlines.get(key, self.host + 1):
            self.deadlines[key] = self.host + after
            self.ledger.acquire(*key, after, self.host)

    def release(self) -> None:
        """Release in time: a worker that is late hangs."""
        key = (self.random.choice(WORKERS), self.random.choice(SCOPES))
        if self.host < self.deadlines.get(key, self.host):
            del self.deadlines[key]
            self.ledger.release(*key)

    def send(self) -> None:
        if self.subscription is not None:
            self.up.extend(self.ledger.take(self.host, self.random.randint(1, 3)))

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
        held = self.ledger.find(*key)
        assert held is not None
        if self.host + 1e-6 < held.since + held.after:
            self.spared += 1
            self.ledger.renumber(*key)
            self.ledger.acknowledge(expiry.expiry_id)
            return
        assert self.deadlines[key] <= self.host + 1e-6, "reaped a worker whose timer had not run out"
        self.reaped += 1
        self.ledger.settle(*key, expiry.sequence, expiry.expiry_id)
        for other in [other for other in self.deadlines if other[0] == key[0]]:
            del self.deadlines[other]
        self.ledger.clear(key[0])

    def wait(self, seconds: float | None = None) -> None:
        self.now += self.random.randint(1, 8) / 4 if seconds is None else seconds
        self.down.extend(self.table.advance(self.now, self.now).expiries)

    def pause(self) -> None:
        """The service goes on meanwhile, and so do the messages on the way to it."""
        before = self.now
        while self.up and self.random.random() < 0.5:
            self.deliver()
        self.wait(self.random.randint(4, 40) / 4)
        self.slept += self.now - before

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
        """Let the stream work: everything arrives, and time passes."""
        if self.subscription is None:
            self.connect()
        for _ in range(50):
            while self.up or self.ledger.pending or self.down:
                self.send()
                self.deliver()
                self.told()
            self.wait(0.5)


@pytest.mark.parametrize("first", [0, *(slow(first) for first in range(1250, 10_000, 1250))])
def test_only_hung_workers_are_reaped(first: int) -> None:
    """10,000 random histories; the seed is in the assertion's message."""
    reaped, spared = 0, 0
    for seed in range(first, first + 1250):
        history = History(seed)
        try:
            for _ in range(120):
                history.step()
            history.settle()
            assert all(deadline > history.host for deadline in history.deadlines.values()), (
                "one was not reaped"
            )
            assert len(history.table) == len(history.deadlines)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        reaped += history.reaped
        spared += history.spared
    assert reaped > 1250, "the histories hardly reap anybody: they show nothing"
    assert spared > 250, "the histories hardly spare anybody: they show nothing"


def test_a_timer_that_ends_before_it_was_sent_is_never_sent() -> None:
    """A timer that is acquired and released between two sends costs no message."""
    ledger = TimerMirror()
    for _ in range(1000):
        ledger.acquire("w", "s", 60.0, 0.0)
        ledger.release("w", "s")
    assert ledger.take(1.0, 10) == []
    assert not ledger.pending


def test_only_the_last_of_many_acquisitions_is_sent() -> None:
    """It is sent with the time that has passed since it was acquired."""
    ledger = TimerMirror()
    for number in range(5):
        ledger.acquire("w", "s", 60.0, float(number))
    assert ledger.take(10.0, 10) == [start("w", "s", 60.0, 6.0, 5)]
    ledger.acquire("w", "s", 60.0, 7.0)
    ledger.release("w", "s")
    assert ledger.take(10.0, 10) == [end("w", "s")]


def test_the_end_of_a_worker_is_sent_once() -> None:
    """It costs one message, however many timers it held; a later timer is sent after that."""
    ledger = TimerMirror()
    for number in range(100):
        ledger.acquire("w", f"s{number}", 60.0, 0.0)
    assert len(ledger.take(0.0, 1000)) == 100
    ledger.clear("w")
    ledger.acquire("w", "again", 60.0, 0.0)
    assert ledger.take(0.0, 1000) == [end_all("w"), start("w", "again", 60.0, 0.0, 101)]


def test_dealing_with_an_expiry_leaves_a_newer_timer_alone() -> None:
    """The worker acquired the scope again while its old timer was being examined."""
    ledger = TimerMirror()
    ledger.acquire("w", "s", 1.0, 0.0)
    ledger.take(0.0, 10)
    ledger.acquire("w", "s", 1.0, 5.0)
    ledger.settle("w", "s", 1, expiry_id=9)
    assert ledger.take(5.0, 10) == [
        pb.SuperviseAction(acknowledge=pb.Acknowledge(expiry_id=9)),
        start("w", "s", 1.0, 0.0, 2),
    ]


def test_completions_are_sent_at_most_once() -> None:
    """Those of many workers are sent as one sum; after a break only unsent ones, but the longest again."""
    ledger = TimerMirror()
    for longest in (1.0, 3.0, 2.0):
        ledger.observe("s", 2, longest)
    ledger.observe("t", 1, 0.5)
    assert ledger.take(0.0, 10) == [completions("s", 6, 3.0), completions("t", 1, 0.5)]
    assert not ledger.pending
    ledger.observe("s", 1, 1.0)
    ledger.restart()
    ledger.observe("s", 1, 1.0)
    assert ledger.take(0.0, 10) == [completions("s", 2, 3.0)]
    ledger.restart()
    assert ledger.take(0.0, 10) == []


def test_a_timer_that_learns_adds_a_completion_when_it_is_left() -> None:
    """It adds no completion when it is released otherwise, or ends with its worker."""
    ledger = TimerMirror()
    ledger.acquire("w", "s", 0.0, 10.0, "s")
    ledger.acquire("w", "s~2", 0.0, 11.0, "s")
    ledger.acquire("w", "t", 60.0, 10.0)
    assert ledger.take(12.0, 10) == [
        start("w", "s", 0.0, 2.0, 1, learned_as="s"),
        start("w", "s~2", 0.0, 1.0, 2, learned_as="s"),
        start("w", "t", 60.0, 2.0, 3),
    ]
    ledger.complete("w", "s~2", 14.0)
    ledger.complete("w", "t", 14.0)
    ledger.complete("w", "never", 14.0)
    ledger.release("w", "s")
    assert ledger.take(14.0, 10) == [end("w", "s~2"), end("w", "t"), end("w", "s"), completions("s", 1, 3.0)]


def test_learned_data_outlives_the_service() -> None:
    """It is sent again before all else; a service that has less data than its agents does not reduce theirs."""
    ledger = TimerMirror()
    ledger.learned("s", 100, 3.0)
    assert not ledger.pending
    ledger.acquire("w", "s", 0.0, 0.0, "s")
    ledger.restart()
    ledger.learned("s", 5, 9.0)
    ledger.learned("t", 1, 1.0)
    assert ledger.take(0.0, 10) == [learned("s", 100, 9.0), start("w", "s", 0.0, 0.0, 1, learned_as="s")]
    ledger.restart()
    assert ledger.take(0.0, 1) == [learned("s", 100, 9.0)]


def test_a_lost_longest_duration_is_sent_with_the_learned_data() -> None:
    """The message with it may have been on the way when the stream broke."""
    ledger = TimerMirror()
    ledger.learned("s", 100, 3.0)
    ledger.observe("s", 1, 8.0)
    assert ledger.take(0.0, 10) == [completions("s", 1, 8.0)]
    ledger.restart()
    assert ledger.take(0.0, 10) == [learned("s", 100, 8.0)]


def test_forgotten_data_does_not_come_back() -> None:
    """The service's data is dropped, and so are completions seen here, sent already or not."""
    ledger = TimerMirror()
    ledger.learned("s", 100, 3.0)
    ledger.observe("s", 7, 9.0)
    ledger.restart()
    ledger.forget("s")
    ledger.forget("unheard")
    ledger.observe("s", 1, 0.5)
    assert ledger.take(0.0, 1) == [learned("s", 0, 0.0)], (
        "the service waits for this before it believes what follows"
    )
    assert ledger.take(0.0, 10) == [learned("unheard", 0, 0.0), completions("s", 1, 0.5)]
    ledger.forget("s")
    assert ledger.pending
    ledger.restart()
    assert ledger.take(0.0, 10) == [], "another stream waits for nothing"


def test_scopes_that_learn_are_bounded() -> None:
    """A program that generates their names costs its agent no more than the limit."""
    ledger = TimerMirror()
    for number in range(MOST_SCOPES + 10):
        ledger.observe(f"s{number}", 1, 1.0)
        ledger.learned(f"s{number}", 1, 1.0)
    assert len(ledger.take(0.0, 10 * MOST_SCOPES)) == MOST_SCOPES
    ledger.restart()
    assert len(ledger.take(0.0, 10 * MOST_SCOPES)) == MOST_SCOPES


def test_only_the_latest_step_is_sent() -> None:
    """It is sent with the time since it was reached; again after a break; not after the worker has ended."""
    ledger = TimerMirror()
    for step in (7, 8):
        ledger.progress("w", 3, step, 10.0 + step)
    ledger.progress("w", 3, 8, 100.0)
    ledger.progress("v", 4, 1, 20.0)
    assert ledger.workers == ["w", "v"]
    assert ledger.take(20.0, 10) == [reached("w", 3, 8, 2.0), reached("v", 4, 1, 0.0)]
    ledger.progress("w", 3, 8, 100.0)
    assert not ledger.pending
    ledger.restart()
    assert ledger.take(30.0, 10) == [reached("w", 3, 8, 12.0), reached("v", 4, 1, 10.0)]
    ledger.progress("w", 3, 9, 40.0)
    ledger.clear("w")
    assert ledger.take(40.0, 10) == [end_all("w")]
    ledger.restart()
    assert ledger.take(40.0, 10) == [reached("v", 4, 1, 20.0)]


def test_a_renumbered_timer_is_sent_again() -> None:
    """It is sent unchanged, with the time that has passed."""
    ledger = TimerMirror()
    ledger.acquire("w", "s", 60.0, 0.0)
    ledger.acquire("w", "t", 0.0, 0.0, "learned")
    ledger.take(0.0, 10)
    ledger.renumber("w", "s")
    ledger.renumber("w", "t")
    assert ledger.take(5.0, 10) == [
        start("w", "s", 60.0, 5.0, 3),
        start("w", "t", 0.0, 5.0, 4, learned_as="learned"),
    ]


def test_the_progress_of_a_worker_can_be_read() -> None:
    """The mirror has its last change of step, and the time since it; None if it sent none or has ended."""
    ledger = TimerMirror()
    assert ledger.progress_of("w", 10.0) is None
    ledger.progress("w", 3, 7, 10.0)
    ledger.progress("w", 3, 7, 12.0)
    assert ledger.progress_of("w", 15.0) == (7, 5.0)
    ledger.take(15.0, 100)
    ledger.restart()
    assert ledger.progress_of("w", 15.0) == (7, 5.0)
    ledger.clear("w")
    assert ledger.progress_of("w", 15.0) is None


def test_a_step_past_the_messages_integers_is_reported_as_the_largest() -> None:
    """A worker's step has 64 bits without a sign; it must not end the stream of all workers of its host."""
    ledger = TimerMirror()
    ledger.progress("w", 3, 2**64 - 1, 0.0)
    (action,) = ledger.take(0.0, 10)
    assert action.progress.step == 2**63 - 1
