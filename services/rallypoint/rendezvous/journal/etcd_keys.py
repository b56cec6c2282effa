"""Where the things of a journal stand in its space of etcd.

    head                                      EtcdHead, which every commit writes
    checkpoints/RUN                           EtcdCheckpoint
    highwater/RUN                             EtcdCheckpoint, which stays when a lease takes all other keys
    runs/RUN/ERA/records/FIRST                EtcdRecordPack, from record FIRST on
    runs/RUN/ERA/store/ROUND/KEY              the value of a store entry
    staged/INDEX                              EtcdStagedPart
    …/PART                                    further parts of a value that is too large for one key

Names are percent-encoded, so that none has a slash: what belongs to one run is a range in which no other run has
anything, whatever it is called. All keys here are without the prefix of the space.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import quote, unquote

HEAD = b"head"
STAGED = b"staged/"
HIGH_WATER = b"highwater/"
_CHECKPOINTS = b"checkpoints/"
_RUNS = b"runs/"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a journal is.

    Attributes:
        owner_key: The key of its owner; its create_revision is the fencing token.
        space: What all its other keys begin with. Ends with a slash.
    """

    owner_key: bytes
    space: bytes

    def __str__(self) -> str:
        return self.space.decode(errors="replace").rstrip("/")


@dataclass(frozen=True, slots=True)
class CheckpointKey:
    """Of the checkpoint of a run."""

    run_id: str


@dataclass(frozen=True, slots=True)
class HighWaterKey:
    """Of what outlives a run's other keys."""

    run_id: str


@dataclass(frozen=True, slots=True)
class PackKey:
    """Of records of a run, from `first` on."""

    run_id: str
    era: int
    first: int


@dataclass(frozen=True, slots=True)
class EntryKey:
    """Of a store entry."""

    run_id: str
    era: int
    round: int
    key: str


ParsedKey = CheckpointKey | HighWaterKey | PackKey | EntryKey


def checkpoint_key(run_id: str) -> bytes:
    """The key of a run's checkpoint."""
    return _CHECKPOINTS + _quoted(run_id)


def high_water_key(run_id: str) -> bytes:
    """The key of what outlives a run's other keys."""
    return HIGH_WATER + _quoted(run_id)


def era_prefix(run_id: str, era: int) -> bytes:
    """What all keys of one era of a run begin with, but for its checkpoint."""
    return b"%b%b/%08x/" % (_RUNS, _quoted(run_id), era)


def pack_key(run_id: str, era: int, first: int) -> bytes:
    """The key of a pack of records. In the order of revisions."""
    return b"%brecords/%016x" % (era_prefix(run_id, era), first)


def entry_key(run_id: str, era: int, round_: int, key: str) -> bytes:
    """The key of a store entry."""
    return b"%bstore/%d/%b" % (era_prefix(run_id, era), round_, _quoted(key))


def staged_key(index: int) -> bytes:
    """The key of a staged part of a commit."""
    return b"%b%08x" % (STAGED, index)


def part_key(key: bytes, index: int) -> bytes:
    """The key of a further part, from 1 on, of the value under a key."""
    return b"%b/%04x" % (key, index)


def parts_end(key: bytes) -> bytes:
    """The end of the range of all further parts of the value under a key."""
    return key + b"0"  # what comes after the slash


def parse(key: bytes) -> tuple[ParsedKey, bytes | None]:
    """What a key is of; and, where it is of a further part, the key of the value that this belongs to.

    Raises:
        ValueError: It is none of the keys of checkpoints, high-water marks, packs and store entries.
    """
    try:
        match key.decode("ascii").split("/"):
            case ["checkpoints", run_id, *part] if len(part) <= 1:
                parsed: ParsedKey = CheckpointKey(_unquoted(run_id))
            case ["highwater", run_id, *part] if len(part) <= 1:
                parsed = HighWaterKey(_unquoted(run_id))
            case ["runs", run_id, era, "records", first, *part] if len(part) <= 1:
                parsed = PackKey(_unquoted(run_id), int(era, 16), int(first, 16))
            case ["runs", run_id, era, "store", round_, name, *part] if len(part) <= 1:
                parsed = EntryKey(
                    _unquoted(run_id), int(era, 16), int(round_), unquote(name, errors="strict")
                )
            case _:
                raise ValueError
    except ValueError:
        raise ValueError(f"the key {key.decode(errors='replace')!r} is not of a journal") from None
    return parsed, key.rpartition(b"/")[0] if part else None


@lru_cache(maxsize=4096)
def _quoted(name: str) -> bytes:
    return quote(name, safe="").encode()


@lru_cache(maxsize=1024)
def _unquoted(run_id: str) -> str:
    return unquote(run_id, errors="strict")
