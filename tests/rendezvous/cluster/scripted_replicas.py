"""Replicas that decide as the real ones do; etcd is a dictionary, and the clock is simulated."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from rallypoint.rendezvous.cluster.ownership import (
    Claim,
    DeleteOwnerKey,
    HandOver,
    MoveSettings,
    ReplicaState,
    decide,
    declined_until,
)

LEASE = 5.0


@dataclass(eq=False)
class Scripted:
    """One replica: its view, which may be old, and its pending actions."""

    name: str
    number: int
    alive: bool = True
    unable: bool = False  # its claims fail
    draining: bool = False
    instances: dict[str, int] = field(default_factory=dict)
    live_since: float = 0.0
    owners: dict[int, int] = field(default_factory=dict)
    free: dict[int, float] = field(default_factory=dict)
    serving: set[int] = field(default_factory=set)
    claiming: set[int] = field(default_factory=set)
    leaving: set[int] = field(default_factory=set)
    not_before: dict[int, float] = field(default_factory=dict)
    declined: dict[int, tuple[int, float]] = field(default_factory=dict)
    next_look: float = float("inf")


class World:
    """The replicas and their etcd. `owners` is the truth; each replica receives it a little later, in order."""

    def __init__(self, seed: int, shards: int, moves: MoveSettings) -> None:
        self.random = Random(seed)
        self.shards = shards
        self.moves = moves
        self.now = 0.0
        self.owners: dict[int, Scripted] = {}
        self.free_since = dict.fromkeys(range(shards), 0.0)
        self.registered: dict[str, Scripted] = {}
        self.replicas: list[Scripted] = []
        self.moved: Counter[int] = Counter()
        self.longest_free = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._arrives_at: dict[Scripted, float] = {}

    def start(self, name: str, *, unable: bool = False) -> Scripted:
        """Start a replica."""
        replica = Scripted(name, len(self.replicas), unable=unable)
        self.replicas.append(replica)
        self.registered[name] = replica
        self._arrives_at[replica] = self.now
        replica.owners = {shard: owner.number for shard, owner in self.owners.items()}
        replica.free = {shard: self.now for shard in range(self.shards) if shard not in self.owners}
        self._send_state()
        return replica

    def kill(self, replica: Scripted) -> None:
        """Stop it without clean-up; its keys are deleted when its lease ends."""
        replica.alive = False
        self.at(LEASE, lambda: self._expire(replica))

    def _expire(self, replica: Scripted) -> None:
        if self.registered.get(replica.name) is replica:
            del self.registered[replica.name]
        for shard in [shard for shard, owner in self.owners.items() if owner is replica]:
            self._free(shard)
        self._send_state()

    def drain(self, replica: Scripted) -> None:
        """Stop it gracefully."""
        replica.draining = True
        self.registered.pop(replica.name, None)
        self._send_state()
        self._look(replica)

    def at(self, delay: float, event: Callable[[], None]) -> None:
        """Schedule an event."""
        self._serial += 1
        heapq.heappush(self._events, (self.now + delay, self._serial, event))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until = self.now + seconds
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = until

    def _free(self, shard: int) -> None:
        del self.owners[shard]
        self.free_since[shard] = self.now

    def _send_state(self) -> None:
        """Send the present state to each replica with its own delay, but never an older state after a newer one."""
        instances = {name: replica.number for name, replica in self.registered.items()}
        owners = {shard: owner.number for shard, owner in self.owners.items()}
        for replica in self.replicas:
            if not replica.alive:
                continue
            heard = max(self._arrives_at[replica], self.now + self.random.expovariate(20))
            self._arrives_at[replica] = heard
            self.at(heard - self.now, lambda replica=replica: self._recv(replica, instances, owners))  # type: ignore[misc]

    def _recv(self, replica: Scripted, instances: dict[str, int], owners: dict[int, int]) -> None:
        if not replica.alive:
            return
        if replica.instances != instances:
            replica.instances, replica.live_since = instances, self.now
        replica.owners = owners
        replica.free = {
            shard: replica.free.get(shard, self.now) for shard in range(self.shards) if shard not in owners
        }
        self._look(replica)

    def _look(self, replica: Scripted) -> None:
        if not replica.alive:
            return
        standing = ReplicaState(
            name=replica.name,
            live=replica.instances,
            live_since=replica.live_since,
            free=replica.free,
            owned=[shard for shard, number in replica.owners.items() if number == replica.number],
            serving=replica.serving,
            claiming=replica.claiming,
            leaving=replica.leaving,
            not_before=replica.not_before,
            declined={shard: until for shard, (_, until) in replica.declined.items()},
            draining=replica.draining,
        )
        decision = decide(standing, self.now, self.moves)
        for action in decision.actions:
            self._begin(replica, action)
        if decision.decide_again_at is not None:
            assert decision.decide_again_at > self.now
            if replica.next_look <= self.now or decision.decide_again_at < replica.next_look:
                replica.next_look = decision.decide_again_at
                self.at(decision.decide_again_at - self.now, lambda: self._look(replica))

    def _begin(self, replica: Scripted, action: Claim | HandOver | DeleteOwnerKey) -> None:
        shard = action.shard
        delay = self.random.expovariate(10)
        match action:
            case Claim():
                replica.claiming.add(shard)
                self.at(delay, lambda: self._claim(replica, shard))
            case HandOver(to=to):
                replica.serving.discard(shard)
                replica.leaving.add(shard)
                self.at(delay, lambda: self._hand_over(replica, shard, to))
            case DeleteOwnerKey():
                replica.leaving.add(shard)
                self.at(delay, lambda: self._release(replica, shard))

    def _claim(self, replica: Scripted, shard: int) -> None:
        replica.claiming.discard(shard)
        if not replica.alive:
            return
        if shard in self.owners:
            replica.not_before[shard] = self.now + 1.0
        elif replica.unable:
            # The worst case: it got the key, and can't serve.
            self.owners[shard] = replica
            replica.not_before[shard] = self.now + 5.0
            self._send_state()
        else:
            self.longest_free = max(self.longest_free, self.now - self.free_since[shard])
            self.owners[shard] = replica
            replica.serving.add(shard)
            self.moved[shard] += 1
            self._send_state()
        self._look(replica)

    def _hand_over(self, replica: Scripted, shard: int, to: str | None) -> None:
        if not replica.alive:
            return
        self._free(shard)
        self._send_state()
        self.at(3.0, lambda: self._handed_over(replica, shard, to))

    def _handed_over(self, replica: Scripted, shard: int, to: str | None) -> None:
        replica.leaving.discard(shard)
        owner = self.owners.get(shard)
        if owner is None or owner.name != to:
            times = replica.declined.get(shard, (0, 0.0))[0] + 1
            replica.declined[shard] = (times, declined_until(times, self.now, self.moves))
        self._look(replica)

    def _release(self, replica: Scripted, shard: int) -> None:
        if not replica.alive:
            return
        if self.owners.get(shard) is replica:
            self._free(shard)
            self._send_state()
        self.at(1.0, lambda: self._released(replica, shard))

    def _released(self, replica: Scripted, shard: int) -> None:
        replica.leaving.discard(shard)
        self._look(replica)
