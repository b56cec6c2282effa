"""Which shard a run is in, and which replica a shard belongs to: the same answer from everybody, for ever."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b


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
