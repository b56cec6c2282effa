"""Decide which shards a replica claims, hands over or releases. Pure: no waiting, no I/O.

etcd, not this module, ensures that two replicas never own a shard at the same time: a claim writes the owner key only
if there is none, and every commit compares its create_revision. The decisions here only ensure that each shard soon has
an owner, mostly the replica preferred by all, and that shards seldom move.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from hashlib import blake2b

# ---- The shard of a run, and the preferred replica of a shard: the same on every replica, for ever.


def shard_of(run_id: str, shards: int) -> int:
    """Return the shard of a run, from 0 to `shards` - 1.

    Never changes: data under a prefix of etcd is found again by this.
    """
    return _number(run_id.encode()) % shards


def by_preference(shard: int, replicas: Iterable[str]) -> list[str]:
    """Return names of replicas in the order in which they should own a shard.

    Rendezvous hashing (Thaler and Ravishankar, 1996): every replica scores every shard, and the highest score has it. A
    replica that comes or goes moves only the shards that it gets or had, and replicas that see the same names compute
    the same order, without any messages.
    """
    return sorted(replicas, key=lambda name: (_number(shard.to_bytes(4) + name.encode()), name), reverse=True)


def _number(content: bytes) -> int:
    # Not Python's own hash: that differs from process to process.
    return int.from_bytes(blake2b(content, digest_size=8).digest())


@dataclass(frozen=True, slots=True)
class MoveSettings:
    """Speed of moving shards; times in seconds."""

    # The replicas must be unchanged for this time before a shard is handed over to a replica that is only preferred.
    # Longer than a restart of a replica: a rolling restart then moves each shard once per restart, not to and fro. A
    # longer time only leaves shards unevenly spread for longer.
    settle: float = 10.0
    # A free shard is claimed by the preferred replica at once, by the next one this much later, and so on: the one
    # before may be alive and unable to. Several times the duration of a claim (milliseconds; more for a large shard).
    claim_interval: float = 3.0
    # Claims in flight at a time: each reads a whole shard.
    claims: int = 16
    # Shards handed over at a time, which limits how many are unavailable for that moment: to spread them evenly, and
    # when draining, while a supervisor waits to kill the process.
    balancing: int = 2
    draining: int = 16
    # A shard that came back (the preferred replica didn't take it) is offered again after this time; twice as long each
    # time, up to the second value.
    declined: float = 30.0
    most_declined: float = 3_600.0


class MoveReason(Enum):
    """Reason for a claim, hand-over or release of a shard; for logs and tests."""

    PREFERRED = "this replica is preferred"
    NOT_CLAIMED = "the preferred replicas did not claim it in time"
    BALANCE = "another replica is preferred"
    DRAIN = "this replica drains"


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """The knowledge of one replica; times are seconds of its own clock.

    Attributes:
        name: Its name.
        live: Names of all registered replicas, its own included unless it drains.
        live_since: Time of the last change of `live`.
        free: Shards without an owner, and since when this replica knows it.
        owned: Shards whose owner key is this replica's.
        serving: Shards that it serves.
        claiming: Shards that it is claiming.
        leaving: Shards that it is handing over or releasing.
        not_before: Shards that it could not claim, with the time of the next attempt.
        declined: Shards that others did not take, with the time of the next offer.
        draining: True if it drains.
    """

    name: str
    live: Collection[str]
    live_since: float
    free: Mapping[int, float] = field(default_factory=dict)
    owned: Collection[int] = ()
    serving: Collection[int] = ()
    claiming: Collection[int] = ()
    leaving: Collection[int] = ()
    not_before: Mapping[int, float] = field(default_factory=dict)
    declined: Mapping[int, float] = field(default_factory=dict)
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """Try to become the owner of a free shard."""

    shard: int
    why: MoveReason


@dataclass(frozen=True, slots=True)
class HandOver:
    """Stop serving a shard, so that `to` claims it; None: there is no other replica."""

    shard: int
    to: str | None
    why: MoveReason


@dataclass(frozen=True, slots=True)
class DeleteOwnerKey:
    """Delete our owner key of a shard that we don't serve."""

    shard: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Actions to begin now, and the time of the next decision if nothing happens; None: none needed."""

    actions: Sequence[Claim | HandOver | DeleteOwnerKey]
    decide_again_at: float | None


def decide(standing: ReplicaState, now: float, moves: MoveSettings) -> Decision:
    """Return the actions of a replica on its shards. Actions in flight count as done: they are not begun twice."""
    actions: list[Claim | HandOver | DeleteOwnerKey] = []
    later: list[float] = []
    under_way = {*standing.claiming, *standing.leaving}
    # Left by a claim that failed halfway, or a journal that broke: while the key exists, no replica can claim.
    actions += [
        DeleteOwnerKey(shard) for shard in sorted({*standing.owned} - {*standing.serving} - under_way)
    ]
    if standing.draining:
        actions += _drain(standing, moves)
        return Decision(actions, None)
    live = frozenset(standing.live)
    actions += _claims(standing, now, moves, live, later)
    actions += _balance(standing, now, moves, live, later)
    return Decision(actions, min(later, default=None))


@lru_cache(maxsize=16_384)
def _preference(shard: int, live: frozenset[str]) -> Sequence[str]:
    """Cache of by_preference: the live replicas seldom change, and every change of an owner needs a decision."""
    return by_preference(shard, live)


def _claims(
    standing: ReplicaState, now: float, moves: MoveSettings, live: frozenset[str], later: list[float]
) -> Sequence[Claim]:
    claims: list[Claim] = []
    if standing.name not in live:
        return claims  # this replica is not registered yet
    room = moves.claims - len(standing.claiming)
    for shard in sorted(standing.free):
        if shard in standing.serving or shard in standing.claiming or shard in standing.leaving:
            continue
        turn = _preference(shard, live).index(standing.name)
        # `live` may have changed after the shard became free: the replicas before us have had their time only since
        # then.
        begin = standing.free[shard] if turn == 0 else max(standing.free[shard], standing.live_since)
        due = max(begin + turn * moves.claim_interval, standing.not_before.get(shard, now))
        if due > now:
            later.append(due)
        elif len(claims) < room:
            claims.append(Claim(shard, MoveReason.NOT_CLAIMED if turn else MoveReason.PREFERRED))
    return claims


def _balance(
    standing: ReplicaState, now: float, moves: MoveSettings, live: frozenset[str], later: list[float]
) -> Sequence[HandOver]:
    hand_overs: list[HandOver] = []
    room = moves.balancing - len(standing.leaving)
    for shard in sorted({*standing.serving} - {*standing.leaving}):
        preferred = _preference(shard, live)[0] if live else standing.name
        if preferred == standing.name:
            continue
        due = max(standing.live_since + moves.settle, standing.declined.get(shard, now))
        if due > now:
            later.append(due)
        elif len(hand_overs) < room:
            hand_overs.append(HandOver(shard, preferred, MoveReason.BALANCE))
    return hand_overs


def _drain(standing: ReplicaState, moves: MoveSettings) -> Sequence[HandOver]:
    others = [name for name in standing.live if name != standing.name]
    room = moves.draining - len(standing.leaving)
    leaving = sorted({*standing.serving} - {*standing.leaving})
    return [
        HandOver(shard, next(iter(by_preference(shard, others)), None), MoveReason.DRAIN)
        for shard in leaving[: max(0, room)]
    ]


def declined_until(times: int, now: float, moves: MoveSettings) -> float:
    """Return the time at which a shard is offered again that was declined so many times in a row, at least once."""
    return now + min(moves.declined * 2.0 ** min(times - 1, 32), moves.most_declined)
