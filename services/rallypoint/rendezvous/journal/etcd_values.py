"""Values as they stand in etcd: with a checksum, and cut into parts where they are too large for one key."""

from __future__ import annotations

from collections.abc import Mapping
from zlib import crc32

from google.protobuf.message import DecodeError

from rallypoint.rendezvous.journal.etcd_keys import part_key
from rallypoint.rendezvous.v1.etcd_journal_pb2 import EtcdValue

# Bytes of a value under one key. Two such keys fit into a transaction of 1.5 MiB, etcd's default limit, besides others.
PART_BYTES = 512 * 1024


class DamagedValue(ValueError):
    """What stands under a key is not what was written."""


def seal(key: bytes, content: bytes) -> list[tuple[bytes, bytes]]:
    """The keys of a value with what is put there: `key` first, then those of further parts.

    etcd tells nobody when its disk has changed a value, or somebody else has put another one there; the checksum does.
    """
    checksum = crc32(content, crc32(key))
    if len(content) <= PART_BYTES:
        return [(key, EtcdValue(checksum=checksum, content=content).SerializeToString())]
    parts = [content[at : at + PART_BYTES] for at in range(0, len(content), PART_BYTES)]
    first = EtcdValue(checksum=checksum, parts=len(parts), content=parts[0]).SerializeToString()
    return [(key, first), *((part_key(key, index), part) for index, part in enumerate(parts) if index)]


def unseal(key: bytes, stored: Mapping[bytes, bytes]) -> tuple[bytes, int]:
    """A value, and the number of its parts, from all that is stored.

    Raises:
        DamagedValue: A part is missing, or changed.
    """
    try:
        value = EtcdValue.FromString(stored[key])
    except DecodeError:
        raise DamagedValue(
            f"the value of {key.decode(errors='replace')!r} is no value of a journal"
        ) from None
    content, parts = value.content, max(1, value.parts)
    if parts > 1:
        try:
            content = b"".join([content, *(stored[part_key(key, index)] for index in range(1, parts))])
        except KeyError as missing:
            raise DamagedValue(f"the key {missing.args[0].decode(errors='replace')!r} is missing") from None
    if crc32(content, crc32(key)) != value.checksum:
        raise DamagedValue(f"the value of {key.decode(errors='replace')!r} is not what was written")
    return content, parts
