"""A commit that is too large for one transaction is there whole or not at all, wherever it is cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rallypoint.rendezvous.journal.etcd.journal import EtcdJournal
from rallypoint.rendezvous.journal.journal import Entry
from rendezvous.journal.entries import change, checkpoint, forgotten, record
from rendezvous.journal.etcd_shelf import EtcdShelf, Fate
from rendezvous.journal.model import Model, plain
from support.etcd_server import NEEDS_ETCD

pytestmark = NEEDS_ETCD

_BEFORE: Sequence[Entry] = [
    *(record(n) for n in range(1, 6)),
    change("gone", b"x"),
    change("large", b"l" * 1_500_000),
    record(1, "forgotten"),
    change("k", b"x", run_id="forgotten"),
]
# Puts, overwrites, deletions, dropped and forgotten entries all at once: more than three transactions take.
_LARGE: Sequence[Entry] = [
    *(change(f"k{n}", b"y" * 20) for n in range(200)),
    record(6),
    record(7, padding=1_200_000),
    checkpoint(6, 4),
    change("gone", None),
    change("large", b"small by now"),
    forgotten(1, "forgotten"),
    change("k", b"again", run_id="forgotten"),
]
_STEPS = 6


async def _filled(shelf: EtcdShelf) -> tuple[EtcdJournal, Model]:
    journal = shelf.journal()
    await journal.open()
    for entry in _BEFORE:
        await journal.append([entry])
    shelf.client.from_now(lambda n: Fate.ANSWERED)
    return journal, Model().after(_BEFORE)


async def test_a_large_commit_takes_so_many_steps(shelf: EtcdShelf) -> None:
    """Two parts, of which the second makes it durable, and as many transactions as its final keys need."""
    journal, before = await _filled(shelf)
    await journal.append(_LARGE)
    await journal.close()
    assert len(shelf.client.sent) == _STEPS + 1  # and the release
    assert plain((await shelf.read()).recovered) == before.after(_LARGE).recovered()
    assert not [key for key in await shelf.keys() if key.startswith("staged/")]


@pytest.mark.parametrize("fate", [Fate.LAST, Fate.NEVER])
@pytest.mark.parametrize("step", range(_STEPS))
async def test_cut_off_at_any_step_it_is_there_whole_or_not_at_all(
    shelf: EtcdShelf, step: int, fate: Fate
) -> None:
    """For readers and for the next owner, which finishes it, or deletes the staged parts."""
    journal, before = await _filled(shelf)
    shelf.client.from_now(lambda n: fate if n == step else Fate.ANSWERED)
    append = asyncio.create_task(journal.append(_LARGE))
    await shelf.client.killed.wait()
    told = append.done()
    append.cancel()
    shelf.client.from_now(lambda n: Fate.ANSWERED)
    durable = step > 1 or (step == 1 and fate is Fate.LAST)
    assert durable or not told
    expected = before.after(_LARGE) if durable else before
    assert plain((await shelf.read()).recovered) == expected.recovered()
    new = await shelf.take_over()
    assert plain((await shelf.read()).recovered) == expected.recovered()
    assert not [key for key in await shelf.keys() if key.startswith("staged/")]
    await new.append([change("after", b"1")])
    await new.close()
    again = shelf.journal()
    assert plain(await again.open()) == expected.after([change("after", b"1")]).recovered()


@pytest.mark.parametrize("step", range(2, _STEPS))
async def test_an_owner_that_is_cut_off_while_it_finishes_leaves_it_to_the_next(
    shelf: EtcdShelf, step: int
) -> None:
    """As often as that happens: repeating a partly finished step changes nothing."""
    journal, before = await _filled(shelf)
    shelf.client.from_now(lambda n: Fate.LAST if n == 1 else Fate.ANSWERED)
    append = asyncio.create_task(journal.append(_LARGE))
    await shelf.client.killed.wait()
    append.cancel()
    # The claim is the first transaction that it sends.
    shelf.client.from_now(lambda n: Fate.LAST if n == step - 1 else Fate.ANSWERED)
    with pytest.raises(asyncio.CancelledError):
        await shelf.take_over("unlucky")
    shelf.client.from_now(lambda n: Fate.ANSWERED)
    expected = before.after(_LARGE).recovered()
    assert plain((await shelf.read()).recovered) == expected
    await shelf.take_over("lucky")
    assert plain((await shelf.read()).recovered) == expected
    assert not [key for key in await shelf.keys() if key.startswith("staged/")]


@pytest.mark.parametrize("lost", [Fate.ANSWER_LOST, Fate.REQUEST_LOST])
@pytest.mark.parametrize("step", range(_STEPS))
async def test_an_answer_that_is_lost_at_any_step_makes_no_difference(
    shelf: EtcdShelf, step: int, lost: Fate
) -> None:
    """The step is sent again, and known to be done if it was."""
    journal, before = await _filled(shelf)
    shelf.client.from_now(lambda n: lost if n == step else Fate.ANSWERED)
    await journal.append(_LARGE)
    await journal.append([change("after", b"1")])
    await journal.close()
    again = shelf.journal()
    assert plain(await again.open()) == before.after([*_LARGE, change("after", b"1")]).recovered()


async def test_it_is_acknowledged_as_soon_as_it_is_durable(shelf: EtcdShelf) -> None:
    """Only the next commit waits for its final keys."""
    journal, _ = await _filled(shelf)
    shelf.client.from_now(lambda n: Fate.NEVER if n == 2 else Fate.ANSWERED)
    await journal.append(_LARGE)
    await shelf.client.killed.wait()
