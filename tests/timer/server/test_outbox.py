"""Messages for a subscriber that doesn't read wait in bounded slots, the latest of each kind."""

from __future__ import annotations

import pytest

from rallypoint.timer.core.progress import Stall, WorkerProgress
from rallypoint.timer.core.values import Expiry, InvalidField, Learned, TimerName
from rallypoint.timer.server.outbox import Outbox, OutboxBatch, Refusal

NAME = TimerName("run", "a", "0@1", "s")


def expiry(number: int, offers: int = 1) -> Expiry:
    return Expiry(number, NAME, 1.0, 0.0, number, offers)


def stall(over: bool) -> Stall:
    return Stall("run", over, 60.0, WorkerProgress("a", "0@1", 0, 7, 60.0), 1, 1)


async def taken(mailbox: Outbox) -> OutboxBatch:
    batch = await mailbox.take()
    assert batch is not None
    return batch


async def test_a_repeated_expiry_replaces_the_first_one() -> None:
    """A subscriber that doesn't read has one slot per timer."""
    mailbox = Outbox()
    for offers in range(1, 100):
        mailbox.offer(expiry(1, offers))
    assert await mailbox.take() == OutboxBatch([], [], None, [expiry(1, 99)])


async def test_only_the_latest_of_a_scope_and_of_a_stall_is_sent() -> None:
    """Earlier ones are useless."""
    mailbox = Outbox()
    for count in range(1, 100):
        mailbox.learn(Learned("s", count, 1.0))
        mailbox.stall(stall(over=count % 2 == 0))
    assert await mailbox.take() == OutboxBatch([], [Learned("s", 99, 1.0)], stall(over=False), [])


async def test_newly_learned_data_does_not_hide_that_a_scope_was_forgotten() -> None:
    """A subscriber that was busy meanwhile would keep the old longest, and send it back."""
    mailbox = Outbox()
    for longest in (9.0, 1.0):
        mailbox.learn(Learned("s", 5, longest))
        mailbox.learn(Learned("s", 0, 0.0))
    mailbox.learn(Learned("s", 3, 0.5))
    assert (await taken(mailbox)).learned == [Learned("s", 0, 0.0), Learned("s", 3, 0.5)]


async def test_refusals_are_bounded() -> None:
    """For a subscriber that sends invalid actions and doesn't read, the last are kept, and only their first bytes."""
    mailbox = Outbox()
    for number in range(5000):
        mailbox.refuse(Refusal("w" * 5000, "s" * 5000, number, InvalidField("after", "no")))
    refusals = (await taken(mailbox)).refusals
    assert [refusal.sequence for refusal in refusals] == list(range(4000, 5000))
    assert {(len(refusal.worker_id), len(refusal.scope)) for refusal in refusals} == {(256, 512)}


async def test_learned_data_is_bounded() -> None:
    """A run can forget and learn scopes of other names for ever; the latest of them are kept."""
    mailbox = Outbox()
    for number in range(12_000):
        mailbox.learn(Learned(f"s{number}", 1, 1.0))
    kept = [learned.scope for _ in range(10) for learned in (await taken(mailbox)).learned]
    assert kept == [f"s{number}" for number in range(2000, 12_000)]


async def test_many_messages_are_taken_in_portions() -> None:
    """Each is far below the size of a message; the end comes after the last."""
    mailbox = Outbox()
    for number in range(2500):
        mailbox.offer(expiry(number))
        mailbox.learn(Learned(f"s{number}", 1, 1.0))
    mailbox.end()
    sizes = []
    while (batch := await mailbox.take()) is not None:
        sizes.append((len(batch.expiries), len(batch.learned)))
    assert sizes == [(1000, 1000), (1000, 1000), (500, 500)]


async def test_an_error_ends_at_once() -> None:
    """The first end counts."""
    mailbox = Outbox()
    mailbox.offer(expiry(1))
    mailbox.end(ValueError("first"))
    mailbox.end(ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        await mailbox.take()
