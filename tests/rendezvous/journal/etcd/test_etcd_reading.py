"""A damaged journal on etcd is refused, untouched, in one line that has the remedy."""

from __future__ import annotations

import pytest

from rallypoint.journal.v1.etcd_pb2 import EtcdHead
from rallypoint.rendezvous.journal.etcd.reading import head_revision, interpret, read_pairs
from rallypoint.rendezvous.journal.journal import Checkpoint, HighWater, JournalError, Recovered
from rendezvous.journal.entries import change, checkpoint, record
from rendezvous.journal.etcd_shelf import EtcdShelf
from support.etcd_server import NEEDS_ETCD

pytestmark = NEEDS_ETCD

_FIRST = "runs/run/00000000/records/0000000000000001"
_LAST = "runs/run/00000000/records/0000000000000003"


async def _fill(shelf: EtcdShelf) -> None:
    journal = shelf.journal()
    await journal.open()
    await journal.append([record(1), record(2)])
    await journal.append([record(3), change("k", b"value"), change("large", b"x" * 600_000)])
    await journal.append([checkpoint(2, 1), checkpoint(0, 1, "b")])
    await journal.close()


async def _refused(shelf: EtcdShelf) -> str:
    """Return the error, which is the same for a reader and for a new owner, who releases the journal again."""
    before = await shelf.snapshot()
    with pytest.raises(JournalError) as read:
        await shelf.read()
    with pytest.raises(JournalError) as opened:
        await shelf.journal().open()
    assert str(opened.value) == str(read.value)
    assert "\n" not in str(read.value)
    assert await shelf.snapshot() == before
    assert await shelf.owner() is None
    return str(read.value)


async def test_a_space_where_nothing_was_written_is_an_empty_journal(shelf: EtcdShelf) -> None:
    """Before it had an owner."""
    read = await shelf.read()
    assert read.recovered == Recovered([], [], [])
    assert read.head_revision == 0 == await head_revision(shelf.client, shelf.place.space)


async def test_the_revision_of_the_head_changes_with_each_commit(shelf: EtcdShelf) -> None:
    """It changes with each commit, and with nothing else."""
    journal = shelf.journal()
    await journal.open()
    seen = []
    for revision in range(1, 4):
        await journal.append([record(revision)])
        read = await shelf.read()
        assert read.head_revision == await head_revision(shelf.client, shelf.place.space)
        seen.append(read.head_revision)
    await journal.close()
    assert seen == sorted(set(seen))
    assert (await shelf.read()).head_revision == seen[-1]


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (_FIRST, "where record 1 is due"),
        (_LAST, "it has 1 packs of records, but its head counts 2"),
        ("checkpoints/b", "it has 1 checkpoints, but its head counts 2"),
        ("head", "its head is missing"),
        ("runs/run/00000000/store/1/large/0001", "is missing"),
        (
            "runs/run/00000000/store/1/large",
            "it has 1 further parts of values, but their first parts count 0",
        ),
    ],
)
async def test_a_key_that_is_missing_is_noticed(shelf: EtcdShelf, key: str, why: str) -> None:
    """Also that of the latest records, which leaves no gap."""
    await _fill(shelf)
    assert key in await shelf.keys()
    await shelf.delete(key)
    message = await _refused(shelf)
    assert why in message
    assert "is damaged (" in message
    assert "restore etcd from a snapshot, or delete the keys there" in message
    assert str(shelf.place) in message


@pytest.mark.parametrize("value", [b"", b"\xff\xff\xff", b"another"])
async def test_a_damaged_value_is_noticed(shelf: EtcdShelf, value: bytes) -> None:
    """Under any key."""
    await _fill(shelf)
    whole = await shelf.snapshot()
    for key, (was, _) in whole.items():
        name = key.removeprefix(shelf.place.space).decode()
        await shelf.put(name, value)
        message = await _refused(shelf)
        assert " is damaged (" in message or (name == "head" and "has version" in message)
        await shelf.put(name, was)
    assert (await shelf.read()).recovered.records == [record(1), record(2), record(3)]


async def test_a_foreign_key_is_noticed(shelf: EtcdShelf) -> None:
    """Only the owner may write there."""
    await _fill(shelf)
    await shelf.put("mine", b"x")
    assert "the key 'mine' is not a journal key" in await _refused(shelf)


async def test_keys_of_another_era_are_noticed(shelf: EtcdShelf) -> None:
    """A run that was forgotten has none."""
    await _fill(shelf)
    await shelf.put("runs/run/00000001/store/1/k", b"x")
    assert "has keys of era 1, but its checkpoint is of 0" in await _refused(shelf)


async def test_a_part_of_a_durable_commit_that_is_missing_is_noticed(shelf: EtcdShelf) -> None:
    """The commit can't be finished."""
    await _fill(shelf)
    (head, _) = (await shelf.snapshot())[shelf.place.space + b"head"]
    marked = EtcdHead.FromString(head)
    marked.staged_parts = 2
    await shelf.put("head", marked.SerializeToString())
    await shelf.put("staged/00000000", b"")
    assert "part 1 of 2 of commit 3 is missing" in await _refused(shelf)


async def test_a_journal_of_a_newer_version_is_left_alone(shelf: EtcdShelf) -> None:
    """The version that wrote it can read it."""
    await _fill(shelf)
    await shelf.put("head", EtcdHead(version=2).SerializeToString())
    message = await _refused(shelf)
    assert "has version 2, this program knows 1; use the version of Rallypoint that wrote it" in message


async def test_many_keys_are_read_like_few(shelf: EtcdShelf) -> None:
    """On a thread, where they are decoded."""
    journal = shelf.journal()
    await journal.open()
    entries = [change(f"k{n}", b"%d" % n) for n in range(1500)]
    await journal.append(entries)
    assert sorted((await shelf.read()).recovered.store_entries, key=lambda each: int(each.key[1:])) == entries
    await shelf.put("mine", b"x")
    await journal.close()
    assert "is damaged (" in await _refused(shelf)


async def test_a_journal_is_made_sense_of_in_many_parts(shelf: EtcdShelf) -> None:
    """One per key, and one per record: the event loop gets a turn between any two."""
    journal = shelf.journal()
    await journal.open()
    await journal.append([record(revision) for revision in range(1, 301)])
    await journal.append([change(f"k{number}", b"value") for number in range(50)])
    await journal.close()
    pairs = await read_pairs(shelf.client, shelf.place.space)
    assert sum(1 for _ in interpret(shelf.place.space, pairs)) >= 300 + 2 * 50


async def _only_high_water(shelf: EtcdShelf) -> None:
    """Delete the keys that go with the lease of a run: all but the high-water marks."""
    for key in await shelf.keys():
        if not key.startswith("highwater/"):
            await shelf.delete(key)


@pytest.mark.parametrize("size", [10, 600_000], ids=["small", "in parts"])
async def test_a_high_water_mark_is_all_that_is_left_and_the_next_owner_goes_on_from_it(
    shelf: EtcdShelf, size: int
) -> None:
    """After a lease took the rest. A reader sees the same before there is an owner."""
    await _fill(shelf)
    journal = await shelf.take_over()
    await journal.append([HighWater("run", 2, b"old"), record(4), HighWater("run", 4, b"x" * size)])
    left = Recovered([Checkpoint("run", 4, b"x" * size, 5)], [], [])
    assert (await shelf.read()).recovered.records[-1] == record(4), "as long as the rest is there, it counts"
    await _only_high_water(shelf)
    assert (await shelf.read()).recovered == left
    await shelf.take_over("killed")
    # The owner that found it wrote nothing yet but the checkpoint.
    assert (await shelf.read()).recovered == left
    journal = await shelf.take_over()
    await journal.append([record(5), HighWater("run", 5, b"new")])
    await journal.close()
    assert (await shelf.read()).recovered == Recovered(left.checkpoints, [record(5)], [])
    await _only_high_water(shelf)
    assert (await shelf.read()).recovered == Recovered([Checkpoint("run", 5, b"new", 6)], [], [])


async def test_a_head_that_is_missing_beside_a_high_water_mark_is_noticed(shelf: EtcdShelf) -> None:
    """A lease takes all other keys at once: if some are left, the head was deleted by other means."""
    journal = shelf.journal()
    await journal.open()
    await journal.append([record(1), HighWater("run", 1, b"x")])
    await journal.close()
    await shelf.delete("head")
    assert "its head is missing" in await _refused(shelf)


async def test_a_damaged_high_water_mark_is_noticed(shelf: EtcdShelf) -> None:
    """Also while it is not needed."""
    journal = shelf.journal()
    await journal.open()
    await journal.append([record(1), HighWater("run", 1, b"x")])
    await journal.close()
    await shelf.put("highwater/run", b"y")
    assert "highwater/run" in await _refused(shelf)
    await _only_high_water(shelf)
    assert "highwater/run" in await _refused(shelf)
