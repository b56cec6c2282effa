"""Read the contents of a space of etcd at one revision, and parse them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.values import KeyValue, Put, prefix_end
from rallypoint.journal.v1.etcd_pb2 import EtcdCheckpoint, EtcdHead, EtcdRecordPack
from rallypoint.rendezvous.base.cooperative import Work
from rallypoint.rendezvous.base.entries import StoreChange
from rallypoint.rendezvous.journal.etcd.commit import Change, SpaceContents, unstage
from rallypoint.rendezvous.journal.etcd.keys import (
    HEAD,
    STAGED,
    CheckpointKey,
    DamagedValue,
    EntryKey,
    HighWaterKey,
    PackKey,
    checkpoint_key,
    parse,
    seal,
    staged_key,
    unseal,
)
from rallypoint.rendezvous.journal.journal import (
    Checkpoint,
    JournalError,
    OutOfSequenceError,
    Record,
    Recovered,
    Span,
)

VERSION = 1
"""Version of the layout of a space's keys."""


@dataclass(slots=True)
class JournalSpace:
    """A journal as read.

    Attributes:
        recovered: Its contents, all of them durable.
        contents: The state that the next commit needs.
        head: The present head; a new one, if there is none.
        head_revision: Its mod_revision, which changes with every commit; 0: there is none.
        unfinished: Changes of a durable commit that are not yet written to their own keys.
        abandoned: True if there are staged parts of no commit.
    """

    recovered: Recovered
    contents: SpaceContents
    head: EtcdHead
    head_revision: int = 0
    unfinished: Sequence[Change] = field(default_factory=tuple)
    abandoned: bool = False


async def read_pairs(client: EtcdClient, space: bytes) -> Sequence[KeyValue]:
    """Return the keys of a space in order, linearizably, as of one revision; raise EtcdError if that fails."""
    return (await client.get(space, prefix_end(space))).pairs


async def head_revision(client: EtcdClient, space: bytes) -> int:
    """Return the present `JournalSpace.head_revision`, unchanged without a commit; raise EtcdError if that fails."""
    snapshot = await client.get(space + HEAD, keys_only=True)
    return snapshot.pairs[0].mod_revision if snapshot.pairs else 0


def interpret(space: bytes, pairs: Sequence[KeyValue]) -> Work[JournalSpace]:
    """Parse all keys of a space, in small steps; raise JournalError if it is damaged or of a newer version."""
    where = space.decode(errors="replace").rstrip("/")
    try:
        return (yield from _interpret(where, space, pairs))
    except (ValueError, DecodeError) as error:
        raise JournalError(
            f"the journal in etcd under {where} is damaged ({' '.join(str(error).split())}) and was not touched; "
            "restore etcd from a snapshot, or delete the keys there to start without its runs"
        ) from error


def _interpret(where: str, space: bytes, pairs: Sequence[KeyValue]) -> Work[JournalSpace]:
    values: dict[bytes, bytes] = {}
    staged: dict[bytes, bytes] = {}
    revision = 0
    for pair in pairs:
        key = pair.key.removeprefix(space)
        (staged if key.startswith(STAGED) else values)[key] = pair.value
        if key == HEAD:
            revision = pair.mod_revision
        yield
    content = values.pop(HEAD, None)
    if content is None:
        if values:
            return (yield from _left_over(values))
        return JournalSpace(
            Recovered([], [], []), SpaceContents(), EtcdHead(version=VERSION), abandoned=bool(staged)
        )
    head = EtcdHead.FromString(content)
    if head.version != VERSION:
        raise JournalError(
            f"the journal in etcd under {where} has version {head.version}, this program knows {VERSION}; use the "
            "version of Rallypoint that wrote it, or another prefix in --journal"
        )
    unfinished = list(_staged_changes(head, staged))
    for change in unfinished:
        _overlay(values, change)
        yield
    reader = _SpaceReader(values)
    recovered = yield from reader.read()
    contents = reader.contents
    for name, found, counted in (
        ("packs of records", contents.pack_count, head.packs),
        ("checkpoints", len(contents.checkpoints), head.checkpoints),
    ):
        if found != counted:
            raise ValueError(f"it has {found} {name}, but its head counts {counted}")
    abandoned = bool(staged) and not head.staged_parts
    return JournalSpace(recovered, contents, head, revision, unfinished, abandoned)


def _left_over(values: Mapping[bytes, bytes]) -> Work[JournalSpace]:
    """Read a space that lost all keys but the high-water marks with a lease: each mark becomes its run's checkpoint.

    The next owner writes these checkpoints under their own keys, like the rest of an unfinished commit.
    """
    changes: list[Change] = []
    for key in values:
        parsed, whole = parse(key)
        if not isinstance(parsed, HighWaterKey):
            raise ValueError("its head is missing")
        if whole is None:
            content, _ = unseal(key, values)
            changes += [Put(*each) for each in seal(checkpoint_key(parsed.run_id), content)]
        yield
    reader = _SpaceReader(
        {**values, **{change.key: change.value for change in changes if isinstance(change, Put)}}
    )
    recovered = yield from reader.read()
    head = EtcdHead(version=VERSION, checkpoints=len(reader.contents.checkpoints))
    return JournalSpace(recovered, reader.contents, head, 0, changes)


def _staged_changes(head: EtcdHead, staged: Mapping[bytes, bytes]) -> Iterator[Change]:
    for index in range(head.staged_parts):
        part = staged.get(staged_key(index))
        if part is None:
            raise ValueError(f"part {index} of {head.staged_parts} of commit {head.number} is missing")
        yield from unstage(part)


def _overlay(values: dict[bytes, bytes], change: Change) -> None:
    """Apply a change, even if it was applied already."""
    if isinstance(change, Put):
        values[change.key] = change.value
    elif change.end:
        for key in [key for key in values if change.key <= key < change.end]:
            del values[key]
    else:
        values.pop(change.key, None)


class _SpaceReader:
    """Parses checkpoints, records and store entries; checks every value's checksum, and every run for gaps."""

    def __init__(self, values: Mapping[bytes, bytes]) -> None:
        self._values = values
        self._parts = 0
        self.contents = SpaceContents()

    def read(self) -> Work[Recovered]:
        checkpoints: list[Checkpoint] = []
        packs: list[tuple[bytes, PackKey]] = []
        entries: list[tuple[bytes, EntryKey]] = []
        further = 0
        # In the order of keys, so that the packs of a run are in the order of their revisions.
        for key in sorted(self._values):
            parsed, whole = parse(key)
            if whole is not None:
                further += 1
            elif isinstance(parsed, CheckpointKey):
                checkpoints.append(self._checkpoint(key, parsed))
            elif isinstance(parsed, HighWaterKey):
                # Not needed while the rest is there, but checked all the same.
                self._unseal(key)
            elif isinstance(parsed, PackKey):
                packs.append((key, parsed))
            else:
                entries.append((key, parsed))
            yield
        records: list[Record] = []
        for key, pack in packs:
            for record in self._records(key, pack):
                records.append(record)
                yield
        store_entries: list[StoreChange] = []
        for key, entry in entries:
            store_entries.append(self._entry(key, entry))
            yield
        if further != self._parts:
            raise DamagedValue(
                f"it has {further} further parts of values, but their first parts count {self._parts}"
            )
        for checkpoint in checkpoints:
            last = self.contents.spans[checkpoint.run_id].last
            if last < checkpoint.revision:
                raise ValueError(
                    f"run {checkpoint.run_id!r} has no records after {last}, but a checkpoint after record "
                    f"{checkpoint.revision}"
                )
        return Recovered(checkpoints, records, store_entries)

    def _unseal(self, key: bytes) -> bytes:
        content, parts = unseal(key, self._values)
        if parts > 1:
            self.contents.parts[key] = parts
            self._parts += parts - 1
        return content

    def _checkpoint(self, key: bytes, parsed: CheckpointKey) -> Checkpoint:
        stored = EtcdCheckpoint.FromString(self._unseal(key))
        self.contents.checkpoints.add(parsed.run_id)
        self.contents.spans[parsed.run_id] = Span(stored.keep_from, stored.keep_from - 1, stored.era)
        return Checkpoint(parsed.run_id, stored.revision, stored.content, stored.keep_from)

    def _span(self, run_id: str, era: int) -> Span:
        span = self.contents.spans.get(run_id) or Span()
        if span.era != era:
            raise ValueError(f"run {run_id!r} has keys of era {era}, but its checkpoint is of {span.era}")
        return span

    def _records(self, key: bytes, parsed: PackKey) -> Iterator[Record]:
        span = self.contents.spans[parsed.run_id] = self._span(parsed.run_id, parsed.era)
        self.contents.packs.setdefault(parsed.run_id, []).append(parsed.first)
        self.contents.pack_count += 1
        pack = EtcdRecordPack.FromString(self._unseal(key))
        for revision, content in enumerate(pack.records, parsed.first):
            if revision < span.first:
                continue  # dropped, unlike the rest of its pack
            record = Record(parsed.run_id, revision, content)
            try:
                span.add(record)
            except OutOfSequenceError as error:
                raise ValueError(str(error)) from error
            yield record

    def _entry(self, key: bytes, parsed: EntryKey) -> StoreChange:
        self._span(parsed.run_id, parsed.era)
        if parsed.run_id in self.contents.spans:
            self.contents.storing.add(parsed.run_id)
        return StoreChange(parsed.run_id, parsed.round, parsed.key, self._unseal(key))
