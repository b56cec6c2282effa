"""The shard of a run, and the preferred replicas of a shard."""

from __future__ import annotations

from collections import Counter

import pytest

from rallypoint.rendezvous.cluster.ownership import by_preference, shard_of

NAMES = ["a-29400", "b-29400", "c-29400"]


@pytest.mark.parametrize(
    ("run_id", "shards", "shard"),
    [("job", 64, 36), ("job", 1, 0), ("", 64, 52), ("größe/1", 64, 21), ("job", 4096, 3876)],
)
def test_the_shard_of_a_run_is_the_same_for_ever(run_id: str, shards: int, shard: int) -> None:
    """Every version must find the runs that another version wrote: these numbers never change."""
    assert shard_of(run_id, shards) == shard


def test_the_preferences_of_a_shard_are_the_same_on_all_replicas() -> None:
    """All replicas, of all versions, agree without messages, in any order of the names."""
    assert [by_preference(shard, NAMES)[0][0] for shard in range(16)] == list("cbcaacccbcacbbbc")
    assert all(by_preference(shard, NAMES) == by_preference(shard, NAMES[::-1]) for shard in range(64))


def test_a_replica_that_goes_moves_its_own_shards_only() -> None:
    """Every other shard keeps its owner, and those that move go to the next in their order."""
    for shard in range(256):
        before = by_preference(shard, NAMES)
        after = by_preference(shard, NAMES[1:])
        assert after == [name for name in before if name != NAMES[0]]


def test_shards_and_runs_are_spread_evenly() -> None:
    """No replica and no shard gets much more than its part."""
    owners = Counter(by_preference(shard, NAMES)[0] for shard in range(3000))
    assert all(900 < count < 1100 for count in owners.values())
    shards = Counter(shard_of(f"run-{number}", 64) for number in range(64_000))
    assert len(shards) == 64
    assert all(850 < count < 1150 for count in shards.values())
