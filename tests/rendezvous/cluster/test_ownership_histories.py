"""Replicas start, stop, die and fail at random: every shard gets an owner, and moves no more than it must."""

from __future__ import annotations

import pytest

from rallypoint.rendezvous.cluster.ownership import MoveSettings, by_preference
from rendezvous.cluster.scripted_replicas import LEASE, Scripted, World

MOVES = MoveSettings()
SHARDS = 32


def _serves_all(world: World) -> bool:
    return (
        all(shard in owner.serving for shard, owner in world.owners.items()) and len(world.owners) == SHARDS
    )


@pytest.mark.parametrize("seed", range(60))
def test_every_shard_ends_with_the_replica_that_is_preferred(seed: int) -> None:
    """After any history all agree on the same owners, and no replica serves a shard that it doesn't own."""
    world = World(seed, SHARDS, MOVES)
    for name in "abc":
        world.start(name)
    for _ in range(12):
        world.run(world.random.choice([0.05, 1.0, 4.0, 20.0]))
        present = [replica for replica in world.replicas if replica.alive and not replica.draining]
        if len(present) > 1 and world.random.random() < 0.5:
            world.random.choice([world.kill, world.drain])(world.random.choice(present))
        else:
            taken = {replica.name for replica in present} | set(world.registered)
            free = [name for name in "abcd" if name not in taken]
            if free:
                world.start(world.random.choice(free))
    world.run(300.0)
    assert _serves_all(world)
    for shard, owner in world.owners.items():
        assert owner.name == by_preference(shard, world.registered)[0]
    for replica in world.replicas:
        assert not (replica.alive and replica.draining and replica.serving)


@pytest.mark.parametrize("seed", range(20))
def test_a_replica_that_cannot_serve_keeps_no_shard_from_being_served(seed: int) -> None:
    """It is alive, and preferred for a third of them; the others claim them, and stop offering it declined shards."""
    world = World(seed, SHARDS, MOVES)
    world.start("a")
    world.start("b", unable=True)
    world.start("c")
    world.run(60.0)
    served = sum(shard in owner.serving for shard, owner in world.owners.items())
    assert served >= SHARDS * 3 // 4  # the others are being offered just now
    before = world.moved.total()
    world.run(3600.0)
    # A third of the shards, offered in vain at most every half minute, then every minute, and so on.
    assert world.moved.total() - before <= SHARDS * 8
    world.replicas[1].unable = False
    world.kill(world.replicas[1])
    world.run(60.0)
    assert _serves_all(world)


@pytest.mark.parametrize("seed", range(20))
def test_a_dead_replicas_shards_are_claimed_at_once_when_its_lease_ends(seed: int) -> None:
    """The time without an owner is that of one message and one claim."""
    world = World(seed, SHARDS, MOVES)
    for name in "abc":
        world.start(name)
    world.run(60.0)
    world.longest_free = 0.0
    world.kill(world.replicas[0])
    world.run(LEASE + 30.0)
    assert _serves_all(world)
    # The claims of a dozen shards, one message, one claim each (exponential; means of 0.05 and 0.1 s).
    assert world.longest_free < 2.5


@pytest.mark.parametrize("seed", range(20))
def test_a_rolling_restart_moves_each_shard_no_more_than_there_are_restarts(seed: int) -> None:
    """Away from each replica that stops and back after the settle time: shards don't follow every restart."""
    world = World(seed, SHARDS, MOVES)
    replicas: dict[str, Scripted] = {name: world.start(name) for name in "abc"}
    world.run(120.0)
    assert _serves_all(world)
    world.moved.clear()
    for name in "abc":
        world.drain(replicas[name])
        world.run(6.0)
        assert not replicas[name].serving
        replicas[name].alive = False
        replicas[name] = world.start(name)
        world.run(4.0)
    world.run(120.0)
    assert _serves_all(world)
    assert all(owner.name == by_preference(shard, "abc")[0] for shard, owner in world.owners.items())
    assert max(world.moved.values()) <= 4


@pytest.mark.parametrize("seed", range(20))
def test_a_replica_that_dies_again_and_again_is_given_nothing(seed: int) -> None:
    """Its shards would have no owner until its lease ends, each time: first it must have stayed for a while."""
    world = World(seed, SHARDS, MOVES)
    world.start("a")
    world.start("b")
    world.run(120.0)
    assert _serves_all(world)
    world.moved.clear()
    for _ in range(6):
        unhappy = world.start("c")
        world.run(world.random.uniform(1.0, 4.0))
        world.kill(unhappy)
        world.run(LEASE + 1.0)
    assert not world.moved
    world.start("c")
    world.run(120.0)
    assert _serves_all(world)
    assert all(owner.name == by_preference(shard, "abc")[0] for shard, owner in world.owners.items())
