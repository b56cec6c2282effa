"""A name that is not used for the time to live is due, and not earlier; the one used longest ago comes first."""

from __future__ import annotations

from rallypoint.rendezvous.state.core import LastUsed, SampledUse


def dropped(used: LastUsed, now: float) -> list[str]:
    names = []
    for name in used.due(now):
        names.append(name)
        used.discard(name)
    return names


def test_only_unused_names_are_due() -> None:
    used = LastUsed(10.0)
    assert used.next_deadline() is None
    for now, name in enumerate("abc"):
        used.touch(name, float(now))
    assert used.next_deadline() == 10.0
    used.touch("a", 5.0)
    assert used.next_deadline() == 11.0
    assert dropped(used, 10.9) == []
    assert dropped(used, 12.0) == ["b", "c"]
    assert dropped(used, 15.0) == ["a"]
    assert used.next_deadline() is None


def test_a_use_while_due_is_a_use() -> None:
    used = LastUsed(10.0)
    used.touch("a", 0.0)
    for name in used.due(20.0):
        used.touch(name, 20.0)
    assert used.next_deadline() == 30.0


def test_one_use_of_a_name_is_passed_on_in_each_period() -> None:
    """Each name has periods of its own, and none is kept for longer than one."""
    sampled = SampledUse(10.0)
    assert [sampled.pass_on("a", now) for now in (0.0, 1.0, 9.9, 10.0, 11.0, 25.0)] == [
        True,
        False,
        False,
        True,
        False,
        True,
    ]
    assert sampled.pass_on("b", 25.0)
    assert not sampled.pass_on("b", 26.0)
