"""How much one run may take of a store that serves many."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds of one run's store.

    Attributes:
        run_bytes: Most bytes of keys and values of all its spaces, 128 per entry included. Default 256 MiB. All
            of it is held in memory, and once more in the journal.
        run_keys: Most keys of all its spaces. Default 1,000,000. What a key costs besides its bytes is counted in
            `run_bytes`; this bounds how long the store takes to read them all at its start, about 4 s.
        waiters: Most requests that wait for keys at the same time. Default 100,000. Each takes about 1 KiB here,
            and is an open call besides.
        waited_keys: Most keys that these wait for, a key counted once for each that waits for it. Default
            2,000,000, about 200 MiB: room for 1,024 nodes that each wait for a key of every other.
        queued_bytes: Most bytes of writes that wait for a commit to begin. Default 64 MiB: sixteen of the
            largest values. More of it lets a slow disk hold more memory; less refuses bursts (STORE_BUSY).
        batch_bytes: Bytes after which a commit takes no further write. Default 8 MiB. One write more than these
            always fits, so the largest does. Runs take turns commit by commit: more of it makes each of them
            wait longer for the others, less costs a run that writes much.
        batch_entries: Writes, and entries changed by them, after which a commit takes no further write. Default
            1,000: about 10 ms in which the process does nothing else.
        operations: Most (client, slot) pairs of one run whose last write is remembered, so that repeating
            it is harmless. Default 65,536, about 16 MiB; more than any run has agents times concurrent writes.
    """

    run_bytes: int = 256 * 1024 * 1024
    run_keys: int = 1_000_000
    waiters: int = 100_000
    waited_keys: int = 2_000_000
    queued_bytes: int = 64 * 1024 * 1024
    batch_bytes: int = 8 * 1024 * 1024
    batch_entries: int = 1_000
    operations: int = 65_536


# A commit on etcd is one transaction as long as it has at most 100 operations and about 1 MiB: with more it takes three
# or more, one after the other.
ETCD_BATCH_BYTES = 1024 * 1024
ETCD_BATCH_ENTRIES = 100


def on_etcd(limits: StoreLimits) -> StoreLimits:
    """The limits where the journal is in etcd: usual commits fit into one of its transactions."""
    return replace(
        limits,
        batch_bytes=min(limits.batch_bytes, ETCD_BATCH_BYTES),
        batch_entries=min(limits.batch_entries, ETCD_BATCH_ENTRIES),
    )
