"""The layout of a journal's keys in its space of etcd.

    head                                      EtcdHead, which every commit writes
    checkpoints/RUN                           EtcdCheckpoint
    highwater/RUN                             EtcdCheckpoint, which stays when a lease takes all other keys
    runs/RUN/ERA/records/FIRST                EtcdRecordPack, from record FIRST on
    runs/RUN/ERA/store/ROUND/KEY              the value of a store entry
    staged/INDEX                              EtcdStagedPart
    …/PART                                    further parts of a value that is too large for one key

Names are percent-encoded, so none has a slash: the keys of one run are a range without keys of any other run, for every
name. All keys here are without the prefix of the space.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from urllib.parse import quote, unquote
from zlib import crc32

from google.protobuf.message import DecodeError

from rallypoint.journal.v1.etcd_pb2 import EtcdValue
from rallypoint.rendezvous.journal.journal import JournalError

HEAD = b"head"
STAGED = b"staged/"
HIGH_WATER = b"highwater/"
_CHECKPOINTS = b"checkpoints/"
_RUNS = b"runs/"


@dataclass(frozen=True, slots=True)
class JournalLocation:
    """The keys of one journal.

    Attributes:
        owner_key: The key of its owner; its create_revision is the fencing token.
        space: The prefix of all its other keys. Ends with a slash.
    """

    owner_key: bytes
    space: bytes

    def __str__(self) -> str:
        return self.space.decode(errors="replace").rstrip("/")


@dataclass(frozen=True, slots=True)
class CheckpointKey:
    """The key of a run's checkpoint."""

    run_id: str


@dataclass(frozen=True, slots=True)
class HighWaterKey:
    """The key of the part of a run that outlives its other keys."""

    run_id: str


@dataclass(frozen=True, slots=True)
class PackKey:
    """The key of a run's records from `first` on."""

    run_id: str
    era: int
    first: int


@dataclass(frozen=True, slots=True)
class EntryKey:
    """The key of a store entry."""

    run_id: str
    era: int
    round: int
    key: str


ParsedKey = CheckpointKey | HighWaterKey | PackKey | EntryKey


def checkpoint_key(run_id: str) -> bytes:
    """Return the key of a run's checkpoint."""
    return _CHECKPOINTS + _quoted(run_id)


def high_water_key(run_id: str) -> bytes:
    """Return the key of the part of a run that outlives its other keys."""
    return HIGH_WATER + _quoted(run_id)


def era_prefix(run_id: str, era: int) -> bytes:
    """Return the prefix of all keys of one era of a run, except its checkpoint."""
    return b"%b%b/%08x/" % (_RUNS, _quoted(run_id), era)


def pack_key(run_id: str, era: int, first: int) -> bytes:
    """Return the key of a pack of records; keys sort by revision."""
    return b"%brecords/%016x" % (era_prefix(run_id, era), first)


def entry_key(run_id: str, era: int, round_: int, key: str) -> bytes:
    """Return the key of a store entry."""
    return b"%bstore/%d/%b" % (era_prefix(run_id, era), round_, _quoted(key))


def staged_key(index: int) -> bytes:
    """Return the key of a staged part of a commit."""
    return b"%b%08x" % (STAGED, index)


def part_key(key: bytes, index: int) -> bytes:
    """Return the key of a further part, from 1 on, of the value under a key."""
    return b"%b/%04x" % (key, index)


def parts_end(key: bytes) -> bytes:
    """Return the end of the range of all further parts of the value under a key."""
    return key + b"0"  # the character after the slash


def parse(key: bytes) -> tuple[ParsedKey, bytes | None]:
    """Return the parsed key; and for a further part also the key of the value to which it belongs.

    Raises:
        ValueError: It is not a key of a checkpoint, high-water mark, pack or store entry.
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
        raise ValueError(f"the key {key.decode(errors='replace')!r} is not a journal key") from None
    return parsed, key.rpartition(b"/")[0] if part else None


@lru_cache(maxsize=4096)
def _quoted(name: str) -> bytes:
    return quote(name, safe="").encode()


@lru_cache(maxsize=1024)
def _unquoted(run_id: str) -> str:
    return unquote(run_id, errors="strict")


# ---- Values as stored in etcd: with a checksum, and cut into parts if they are too large for one key.


# Bytes of a value under one key. Two such keys fit into a transaction of 1.5 MiB, etcd's default limit, besides others.
PART_BYTES = 512 * 1024


class DamagedValue(ValueError):
    """The value under a key is not the one that was written."""


def seal(key: bytes, content: bytes) -> list[tuple[bytes, bytes]]:
    """Return the keys of a value with the content of each: `key` first, then those of further parts.

    etcd does not report a value that its disk has damaged or that another program has overwritten; the checksum does.
    """
    checksum = crc32(content, crc32(key))
    if len(content) <= PART_BYTES:
        return [(key, EtcdValue(checksum=checksum, content=content).SerializeToString())]
    parts = [content[at : at + PART_BYTES] for at in range(0, len(content), PART_BYTES)]
    first = EtcdValue(checksum=checksum, parts=len(parts), content=parts[0]).SerializeToString()
    return [(key, first), *((part_key(key, index), part) for index, part in enumerate(parts) if index)]


def unseal(key: bytes, stored: Mapping[bytes, bytes]) -> tuple[bytes, int]:
    """Return a value and the number of its parts; raise DamagedValue if a part is missing or changed."""
    try:
        value = EtcdValue.FromString(stored[key])
    except DecodeError:
        raise DamagedValue(f"the value of {key.decode(errors='replace')!r} is not a journal value") from None
    content, parts = value.content, max(1, value.parts)
    if parts > 1:
        try:
            content = b"".join([content, *(stored[part_key(key, index)] for index in range(1, parts))])
        except KeyError as missing:
            raise DamagedValue(f"the key {missing.args[0].decode(errors='replace')!r} is missing") from None
    if crc32(content, crc32(key)) != value.checksum:
        raise DamagedValue(f"the value of {key.decode(errors='replace')!r} is not what was written")
    return content, parts


# ---- The owner of a journal on etcd: the content of its owner key.


@dataclass(frozen=True, slots=True)
class Owner:
    """A replica of the service.

    Attributes:
        replica: Its name, which its next process has too.
        address: Address for clients: host:port.
        instance: A random id, different for each process.
    """

    replica: str
    address: str
    instance: str

    def encode(self, claim: str = "") -> bytes:
        """Encode as JSON. `claim`: an id that makes two claims of the same owner differ."""
        return json.dumps({**asdict(self), **({"claim": claim} if claim else {})}).encode()

    @classmethod
    def decode(cls, content: bytes) -> Owner:
        """Decode from JSON. Missing fields are empty: the journal has an owner even if it is unknown."""
        try:
            fields = json.loads(content)
            known = {name: str(fields.get(name, "")) for name in cls.__slots__}
        except (ValueError, AttributeError):
            known = dict.fromkeys(cls.__slots__, "")
        return cls(**known)


class OwnedElsewhere(JournalError):
    """The journal can't be opened: another process owns it."""

    def __init__(self, where: str, owner: Owner) -> None:
        super().__init__(
            f"the journal in etcd under {where} is owned by {owner.replica or 'another replica'} "
            f"({owner.address or 'address unknown'}); it is free when that replica stops or its lease expires"
        )
        self.owner = owner
