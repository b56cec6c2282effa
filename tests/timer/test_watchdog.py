"""The watchdog wakes when it must, whatever happens to it, and what it has to tell waits in bounded slots."""

from __future__ import annotations

import asyncio

import pytest

from rallypoint.timer.refusals import InvalidField
from rallypoint.timer.values import Expiry, TimerName
from rallypoint.timer.watchdog import Mailbox, Refusal, Watchdog

from .conftest import Clock, eventually

NAME = TimerName("run", "a", "0@1", "s")


def expiry(number: int, offers: int = 1) -> Expiry:
    return Expiry(number, NAME, 1.0, 0.0, number, offers)


async def test_an_expiry_told_again_takes_the_place_of_its_first() -> None:
    """A subscriber that doesn't read has one slot per timer."""
    mailbox = Mailbox()
    for offers in range(1, 100):
        mailbox.offer(expiry(1, offers))
    assert await mailbox.take() == ([expiry(1, 99)], [])


async def test_refusals_are_bounded() -> None:
    """A subscriber that sends nonsense and doesn't read keeps the last of them."""
    mailbox = Mailbox()
    for number in range(5000):
        mailbox.refuse(Refusal("w", "s", number, InvalidField("after", "no")))
    taken = await mailbox.take()
    assert taken is not None
    assert [refusal.sequence for refusal in taken[1]] == list(range(4000, 5000))


async def test_much_is_told_in_portions() -> None:
    """Each far below the size of a message; the end comes after the last."""
    mailbox = Mailbox()
    for number in range(2500):
        mailbox.offer(expiry(number))
    mailbox.end()
    sizes = []
    while (taken := await mailbox.take()) is not None:
        sizes.append(len(taken[0]))
    assert sizes == [1000, 1000, 500]


async def test_an_error_ends_at_once() -> None:
    """And the first end counts."""
    mailbox = Mailbox()
    mailbox.offer(expiry(1))
    mailbox.end(ValueError("first"))
    mailbox.end(ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        await mailbox.take()


async def test_it_wakes_by_itself_at_the_deadline_and_not_before() -> None:
    """By the event loop's clock."""
    watchdog = Watchdog()
    _, mailbox = watchdog.subscribe("run", "a", 0)
    began = watchdog.now()
    watchdog.table.acquire(NAME, 0.05, began)
    watchdog.arm()
    taken = await mailbox.take()
    assert taken is not None
    assert taken[0][0].name == NAME
    assert watchdog.now() - began >= 0.05 - 1e-6
    watchdog.drain()


async def test_an_earlier_deadline_moves_the_alarm() -> None:
    """A timer of a minute doesn't have one of a moment wait for it, with the pulse out of the way."""
    watchdog = Watchdog()
    _, mailbox = watchdog.subscribe("run", "a", 0)
    watchdog.table.acquire(NAME, 60, watchdog.now())
    watchdog.arm()
    late = watchdog._due
    watchdog.table.acquire(NAME._replace(scope="soon"), 0.001, watchdog.now())
    watchdog.arm()
    assert watchdog._due < late
    taken = await mailbox.take()
    assert taken is not None
    assert taken[0][0].name.scope == "soon"
    watchdog.drain()


async def test_a_pause_is_noticed_and_accuses_nobody(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """The alarm rings 20 s late, with a release in the socket: all deadlines move, and the log says so."""
    watchdog = Watchdog(clock=clock)
    subscription, mailbox = watchdog.subscribe("run", "a", 0)
    watchdog.table.register(subscription, "0@1", "s", 5.0, clock(), sequence=1)
    watchdog.arm()
    clock.now += 20
    watchdog.ring()
    watchdog.table.end(subscription, "0@1", "s")
    assert "deadlines moved" in caplog.text
    clock.now += 0.25
    watchdog.ring()
    assert not mailbox._expiries
    watchdog.drain()


async def test_a_failure_does_not_stop_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug that strikes once costs one wake-up, not the watchdog."""
    watchdog = Watchdog()
    _, mailbox = watchdog.subscribe("run", "a", 0)
    advance = watchdog.table.advance
    failed: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))

    def fail_once(now: float, due: float) -> object:
        if not failed:
            raise RuntimeError("bug")
        return advance(now, due)

    monkeypatch.setattr(watchdog.table, "advance", fail_once)
    watchdog.table.acquire(NAME, 0.001, watchdog.now())
    watchdog.arm()
    assert await mailbox.take() is not None
    assert len(failed) == 1
    watchdog.drain()


async def test_a_watchdog_without_timers_sleeps() -> None:
    """No alarm, no pulse."""
    watchdog = Watchdog()
    subscription, _ = watchdog.subscribe("run", "a", 0)
    watchdog.arm()
    assert watchdog._alarm is None
    watchdog.table.register(subscription, "0@1", "s", 60, watchdog.now(), sequence=1)
    watchdog.arm()
    assert watchdog._alarm is not None
    watchdog.table.end(subscription, "0@1", "s")
    await eventually(lambda: watchdog._alarm is None)
