"""A watcher is woken once for all changes while it was busy, and never misses a change."""

from __future__ import annotations

from rallypoint.rpc.loop import Notifier


async def test_many_changes_are_one_wake_up() -> None:
    """Nothing queues up for a watcher that does not look."""
    changes = Notifier()
    with changes.watch() as changed:
        for _ in range(1000):
            changes.notify()
        await changed.wait()
        changed.clear()
        assert not changed.is_set()
        changes.notify()
        assert changed.is_set()


async def test_each_watcher_is_notified_separately() -> None:
    """Each has its own flag; one that has gone is not notified."""
    changes = Notifier()
    with changes.watch() as first:
        with changes.watch() as second:
            changes.notify()
            first.clear()
            assert second.is_set()
            second.clear()
        changes.notify()
        assert first.is_set()
        assert not second.is_set()
