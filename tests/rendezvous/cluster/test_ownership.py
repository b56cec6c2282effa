"""The decisions of a replica about shards, case by case."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rallypoint.rendezvous.cluster.ownership import (
    Claim,
    DeleteOwnerKey,
    HandOver,
    MoveReason,
    MoveSettings,
    ReplicaState,
    by_preference,
    decide,
    declined_until,
)

NAMES = ("a", "b", "c")
MOVES = MoveSettings(settle=10, claim_interval=3, claims=4, balancing=2, draining=3)
# A shard that a prefers, then b, then c; and one that b prefers.
OF_A = next(shard for shard in range(999) if by_preference(shard, NAMES) == ["a", "b", "c"])
OF_B = next(shard for shard in range(999) if by_preference(shard, NAMES)[0] == "b")


def _standing(name: str, **known: object) -> ReplicaState:
    return replace(ReplicaState(name=name, live=NAMES, live_since=0.0), **known)  # type: ignore[arg-type]


def test_a_free_shard_is_claimed_at_once_by_the_preferred_replica() -> None:
    """If the preferred replica is live, it does not wait."""
    decision = decide(_standing("a", free={OF_A: 100.0}), 100.0, MOVES)
    assert decision.actions == [Claim(OF_A, MoveReason.PREFERRED)]
    assert decision.decide_again_at is None


@pytest.mark.parametrize(("name", "wait"), [("b", 3.0), ("c", 6.0)])
def test_a_shard_that_the_preferred_replica_does_not_claim_goes_to_the_next(name: str, wait: float) -> None:
    """A replica that is alive but unable to claim must not keep a shard unserved; each one gets its turn."""
    standing = _standing(name, free={OF_A: 100.0})
    waiting = decide(standing, 100.0 + wait - 0.1, MOVES)
    assert waiting.actions == []
    assert waiting.decide_again_at == 100.0 + wait
    assert decide(standing, 100.0 + wait, MOVES).actions == [Claim(OF_A, MoveReason.NOT_CLAIMED)]


def test_a_turn_counts_from_when_the_order_last_changed() -> None:
    """A shard may have been free for long when a preferred replica comes: that one gets its full time."""
    standing = _standing("b", free={OF_A: 0.0}, live_since=100.0)
    assert decide(standing, 102.9, MOVES).actions == []
    assert decide(standing, 103.0, MOVES).actions == [Claim(OF_A, MoveReason.NOT_CLAIMED)]


def test_a_replica_that_is_not_registered_claims_nothing() -> None:
    """The others do not count it: they would claim the same shards."""
    assert decide(_standing("a", live=("b", "c"), free={OF_A: 0.0}), 100.0, MOVES).actions == []


def test_claims_are_bounded_and_none_is_made_twice() -> None:
    """Each claim reads a whole shard; a pending one is not repeated."""
    free = dict.fromkeys(range(20), 0.0)
    standing = _standing("a", live=("a",), free=free, claiming=(0, 1, 2))
    assert decide(standing, 100.0, MOVES).actions == [Claim(3, MoveReason.PREFERRED)]


def test_after_a_failed_claim_the_next_try_waits() -> None:
    """A shard that can't be opened must not be retried all the time."""
    standing = _standing("a", free={OF_A: 0.0}, not_before={OF_A: 50.0})
    assert decide(standing, 49.0, MOVES).actions == []
    assert decide(standing, 49.0, MOVES).decide_again_at == 50.0
    assert decide(standing, 50.0, MOVES).actions == [Claim(OF_A, MoveReason.PREFERRED)]


def test_a_shard_moves_for_balance_only_when_the_live_replicas_are_stable() -> None:
    """In a rolling restart replicas come and go: shards must not follow each of them to and fro."""
    standing = _standing("a", owned=(OF_B,), serving=(OF_B,), live_since=100.0)
    waiting = decide(standing, 109.9, MOVES)
    assert waiting.actions == []
    assert waiting.decide_again_at == 110.0
    assert decide(standing, 110.0, MOVES).actions == [HandOver(OF_B, "b", MoveReason.BALANCE)]


def test_shards_move_few_at_a_time() -> None:
    """Each is unavailable for a short time while it moves."""
    of_b = [shard for shard in range(999) if by_preference(shard, NAMES)[0] == "b"][:5]
    standing = _standing("a", owned=of_b, serving=of_b)
    assert len(decide(standing, 100.0, MOVES).actions) == 2
    assert len(decide(replace(standing, leaving=of_b[:1]), 100.0, MOVES).actions) == 1
    assert decide(replace(standing, leaving=of_b[:2]), 100.0, MOVES).actions == []


def test_a_shard_that_was_declined_stays_for_a_while() -> None:
    """Otherwise a preferred replica that can't claim would make a shard move to and fro for ever."""
    standing = _standing("a", owned=(OF_B,), serving=(OF_B,), declined={OF_B: 500.0})
    assert decide(standing, 499.0, MOVES).actions == []
    assert decide(standing, 500.0, MOVES).actions == [HandOver(OF_B, "b", MoveReason.BALANCE)]
    assert [declined_until(times, 0.0, MOVES) for times in (1, 2, 3, 9999)] == [30.0, 60.0, 120.0, 3600.0]


def test_a_draining_replica_hands_everything_over_and_claims_nothing() -> None:
    """At most three at a time, each to the preferred one of the others, without waiting for the settle time."""
    standing = _standing(
        "a",
        live=("b", "c"),
        live_since=100.0,
        free={OF_A: 0.0},
        owned=range(5),
        serving=range(5),
        draining=True,
    )
    assert decide(standing, 100.0, MOVES).actions == [
        HandOver(shard, by_preference(shard, ("b", "c"))[0], MoveReason.DRAIN) for shard in range(3)
    ]


def test_the_last_replica_lets_go_of_its_shards_when_it_drains() -> None:
    """It does not wait for a successor."""
    standing = _standing("a", live=(), owned=(OF_A,), serving=(OF_A,), draining=True)
    assert decide(standing, 0.0, MOVES).actions == [HandOver(OF_A, None, MoveReason.DRAIN)]


@pytest.mark.parametrize("draining", [False, True])
def test_an_owner_key_without_a_shard_is_let_go_of(draining: bool) -> None:
    """While it exists no other replica can claim, and a replica that lost the shard's journal can't serve it."""
    standing = _standing("a", owned=(1, 2, 3), claiming=(2,), leaving=(3,), draining=draining)
    assert decide(standing, 0.0, MOVES).actions == [DeleteOwnerKey(1)]
