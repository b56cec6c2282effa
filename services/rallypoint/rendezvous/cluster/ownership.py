"""Which shards a replica should claim, hand over or let go of. Nothing here waits, or talks to anybody.

That two replicas never own a shard at the same time is not decided here but by etcd: a claim puts the owner key only
where there is none, and every commit compares its create_revision. What is decided here is only that each shard is
soon owned by somebody, mostly by the one that everybody prefers, and that shards move seldom.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from hashlib import blake2b

# ---- Which shard a run is in, and which replica a shard belongs to: the same answer from everybody, for ever.


def shard_of(run_id: str, shards: int) -> int:
    """The shard of a run, from 0 to `shards` - 1.

    What is written under a prefix of etcd is found by this again, so it never changes.
    """
    return _number(run_id.encode()) % shards


def by_preference(shard: int, replicas: Iterable[str]) -> list[str]:
    """Names of replicas in the order in which they should own a shard.

    Rendezvous hashing (Thaler and Ravishankar, 1996): every replica scores every shard, and the highest score has it.
    A replica that comes or goes moves only the shards that it gets or had, and whoever sees the same names sees the
    same order: nobody needs to tell anybody.
    """
    return sorted(replicas, key=lambda name: (_number(shard.to_bytes(4) + name.encode()), name), reverse=True)


def _number(content: bytes) -> int:
    # Not Python's own hash: that differs from process to process.
    return int.from_bytes(blake2b(content, digest_size=8).digest())


@dataclass(frozen=True, slots=True)
class MoveSettings:
    """How fast shards move; times in seconds."""

    # For so long the replicas must have been the same before a shard is handed over to a replica that is merely
    # preferred. Longer than a replica takes to restart: a rolling restart then moves each shard once per restart, not
    # to and fro. Longer leaves shards unevenly spread for longer, and nothing else.
    settle: float = 10.0
    # A free shard is claimed by the one that is preferred at once, by the next one so much later, and so on: the
    # one before may be alive and unable to. Some times what a claim takes (milliseconds; more if the shard is large).
    claim_interval: float = 3.0
    # Claims under way at a time: each reads a whole shard.
    claims: int = 16
    # Shards that are handed over at a time, so that only so many are unavailable for the blink that it takes: to
    # spread them evenly, and when draining, where a supervisor waits to kill.
    balancing: int = 2
    draining: int = 16
    # A shard that came back (the preferred one didn't take it) is offered again after so long; twice as long
    # each time, up to the second figure.
    declined: float = 30.0
    most_declined: float = 3_600.0


class MoveReason(Enum):
    """Why a shard is claimed, handed over or let go of; for logs and tests."""

    PREFERRED = "it is ours by preference"
    NOBODY_CAME = "those preferred did not claim it in their time"
    BALANCE = "another replica is preferred"
    DRAIN = "this replica is going away"
    STRAY = "we own it and do not serve it"


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What one replica knows; times are seconds of its own clock.

    Attributes:
        name: Its name.
        live: Names of all replicas that are registered, its own included unless it drains.
        live_since: When `live` last changed.
        free: Shards that nobody owns, and since when that is known here.
        owned: Shards whose owner key is this replica's.
        serving: Those that it serves.
        claiming: Those that it is claiming.
        leaving: Those that it is handing over, or letting go of.
        not_before: Shards that it could not claim, and when it may try again.
        declined: Shards that others did not take, and when they may be offered again.
        draining: Whether it is going away.
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
    """Stop serving a shard, so that `to` claims it; None: nobody is there who could."""

    shard: int
    to: str | None
    why: MoveReason


@dataclass(frozen=True, slots=True)
class DeleteOwnerKey:
    """Delete our owner key of a shard that we don't serve."""

    shard: int
    why: MoveReason = MoveReason.STRAY


@dataclass(frozen=True, slots=True)
class Decision:
    """What to begin now, and when to decide again even if nothing happens; None: only then."""

    actions: Sequence[Claim | HandOver | DeleteOwnerKey]
    decide_again_at: float | None


def decide(standing: ReplicaState, now: float, moves: MoveSettings) -> Decision:
    """What a replica does about shards. What it began already counts as done: it is not begun twice."""
    actions: list[Claim | HandOver | DeleteOwnerKey] = []
    later: list[float] = []
    under_way = {*standing.claiming, *standing.leaving}
    # The end of a claim that failed halfway, or of a journal that broke: while the key stands, nobody can claim.
    actions += [
        DeleteOwnerKey(shard) for shard in sorted({*standing.owned} - {*standing.serving} - under_way)
    ]
    if standing.draining:
        actions += _drain(standing, moves)
        return Decision(actions, None)
    order = _Order(standing.live)
    actions += _claims(standing, now, moves, order, later)
    actions += _balance(standing, now, moves, order, later)
    return Decision(actions, min(later, default=None))


class _Order:
    """The preferences among those who are live."""

    def __init__(self, live: Collection[str]) -> None:
        self._live = frozenset(live)

    def of(self, shard: int) -> Sequence[str]:
        return _preference(shard, self._live)


@lru_cache(maxsize=16_384)
def _preference(shard: int, live: frozenset[str]) -> Sequence[str]:
    """As by_preference. Who is live changes seldom, and decisions are made with every change of an owner."""
    return by_preference(shard, live)


def _claims(
    standing: ReplicaState, now: float, moves: MoveSettings, order: _Order, later: list[float]
) -> Sequence[Claim]:
    claims: list[Claim] = []
    if standing.name not in standing.live:
        return claims  # nobody counts with us yet
    room = moves.claims - len(standing.claiming)
    for shard in sorted(standing.free):
        if shard in standing.serving or shard in standing.claiming or shard in standing.leaving:
            continue
        turn = order.of(shard).index(standing.name)
        # Who is live may have changed after the shard was free: those before us have had their time only since.
        begin = standing.free[shard] if turn == 0 else max(standing.free[shard], standing.live_since)
        due = max(begin + turn * moves.claim_interval, standing.not_before.get(shard, now))
        if due > now:
            later.append(due)
        elif len(claims) < room:
            claims.append(Claim(shard, MoveReason.NOBODY_CAME if turn else MoveReason.PREFERRED))
    return claims


def _balance(
    standing: ReplicaState, now: float, moves: MoveSettings, order: _Order, later: list[float]
) -> Sequence[HandOver]:
    hand_overs: list[HandOver] = []
    room = moves.balancing - len(standing.leaving)
    for shard in sorted({*standing.serving} - {*standing.leaving}):
        preferred = order.of(shard)[0] if standing.live else standing.name
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
    """When a shard is offered again that was declined so many times in a row, at least once."""
    return now + min(moves.declined * 2.0 ** min(times - 1, 32), moves.most_declined)
