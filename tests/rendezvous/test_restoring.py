"""Shards are restored one at a time and in small steps; until one is complete, it is invisible and counts nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from rallypoint.rendezvous.base.cooperative import CooperativeRunner, Work
from rallypoint.rendezvous.base.entries import RESERVED, StoreChange
from rallypoint.rendezvous.base.errors import NotOwner
from rallypoint.rendezvous.base.limits import Limits, RendezvousLimits, SharedTotals
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.core.commands import SERVICE
from rallypoint.rendezvous.core.decide import execute
from rallypoint.rendezvous.core.state import RunSettings, RunState
from rallypoint.rendezvous.journal.codec import DecodedRecord, encode_record
from rallypoint.rendezvous.journal.journal import Entry, JournalError, Record, Recovered
from rallypoint.rendezvous.runs import recovery
from rallypoint.rendezvous.shard.reader import ReadOnlyRuns
from rallypoint.rendezvous.shard.shard import Shard, open_shard
from rallypoint.rendezvous.state.core import SPACE, States
from rallypoint.rendezvous.store.core import RunSpaces
from rallypoint.rendezvous.store.writes import Set
from rendezvous.base.test_shares import used
from rendezvous.engine_fixtures import NO_PAUSES, writer_of
from rendezvous.shard_fixtures import RUN, ShardJournal, opened
from rendezvous.turn_counter import TickingClock, Turns, counting

_NODES = 5


def run_of(run_id: str, records: int) -> list[Entry]:
    """The first records of a run with many rounds."""
    state, entries = RunState(run_id), list[Entry]()
    settings = RunSettings(min_nodes=_NODES, max_nodes=_NODES, max_restarts=1_000_000, restart_backoff=0.0)

    def carry_out(command: commands.Command) -> None:
        for fact in execute(state, command, 1.0):
            content = encode_record(run_id, len(entries) + 1, fact, 1.7e9, SERVICE)
            entries.append(Record(run_id, len(entries) + 1, content))

    for number in range(_NODES):
        carry_out(commands.Join(f"n{number}", settings, "host", 8, "trainer"))
    while len(entries) < records:
        for node_id, node in list(state.nodes.items()):
            carry_out(commands.Confirm(node_id, node.lease, state.round, 29500))
        carry_out(commands.Restart("again"))
    return entries[:records]


@pytest.fixture
def count_records(monkeypatch: pytest.MonkeyPatch) -> Callable[[Turns], None]:
    """Counts the records that recovery folds."""

    def begin(turns: Turns) -> None:
        def decode(content: bytes) -> DecodedRecord:
            turns.did(1)
            return DecodedRecord(content)

        monkeypatch.setattr(recovery, "DecodedRecord", decode)

    return begin


async def drop(shards: Sequence[Shard]) -> None:
    for shard in shards:
        await shard.drop(NotOwner)


async def test_the_loop_is_held_for_a_slice_however_many_shards_are_taken_over(
    count_records: Callable[[Turns], None],
) -> None:
    """Regression: sixteen claims at once held it for nine seconds, and the replica lost its lease, again and again."""
    slices, totals = CooperativeRunner(TickingClock(0.001)), SharedTotals()
    journals = [ShardJournal(run_of(f"run-{number}", 300)) for number in range(16)]
    async with counting() as turns:
        count_records(turns)
        shards = await asyncio.gather(
            *(open_shard(each, slices=slices, totals=totals, lag=NO_PAUSES) for each in journals)
        )
    assert turns.done == 16 * 300
    assert turns.most <= 20, "records between two turns of the loop"
    assert turns.taken >= 16 * 300 / 20
    assert totals.runs.used == 16
    await drop(shards)
    assert set(used(totals).values()) == {0}


_VALUES = [StoreChange(RUN, 0, f"key-{number:05}", b"value") for number in range(500)]
_STATES = [StoreChange(f"run-{number}", SPACE, "state", b"\x01" + bytes(99)) for number in range(500)]


def _read_only(recovered: Recovered) -> Work[ReadOnlyRuns]:
    return ReadOnlyRuns.restore(recovered, not_owner=NotOwner, clock=lambda: 5.0, wall_clock=lambda: 1.7e9)


@pytest.mark.parametrize(
    ("work", "least"),
    [
        (RunSpaces.restore(RUN, _VALUES), 1_000),
        (States.restore(_STATES), 1_000),
        (_read_only(Recovered([], [], _VALUES)), 1_500),
        (_read_only(Recovered([], [], _STATES)), 1_500),
        (_read_only(Recovered([], run_of(RUN, 500), [])), 500),  # type: ignore[arg-type]
    ],
    ids=["store", "states", "store elsewhere", "states elsewhere", "runs elsewhere"],
)
def test_there_can_be_a_pause_after_every_entry(work: Work[object], least: int) -> None:
    """There can be another one each time the entry is read again."""
    assert sum(1 for _ in work) >= least


async def test_stores_and_states_are_restored_in_small_steps_too() -> None:
    """This holds for a shard with few records."""
    changes = [*_VALUES, *_STATES]
    clock = TickingClock(0.001)
    async with counting() as turns:
        shard = await open_shard(ShardJournal([*run_of(RUN, 6), *changes]), slices=CooperativeRunner(clock))
        assert turns.taken >= len(changes) / 10
    assert shard.store.list_keys(RUN, 0, "", "key-00497", 10) == ["key-00498", "key-00499"]
    state = shard.states.get("run-499")
    assert state is not None
    await drop([shard])


def _newer_fact() -> Entry:
    return Record("b", 1, b"\n\x01b\x10\x01")  # its run and revision, and no known fact


_SPOILT = {
    "a fact of a newer version": [_newer_fact()],
    "a state of a newer version": [StoreChange("run", SPACE, "state", b"\xff")],
    "a damaged write": [StoreChange("run", 0, f"{RESERVED}operation/c/0", b"no numbers")],
}
_GOOD = [
    *run_of("run", 40),
    StoreChange("run", SPACE, "state", b"\x01" + bytes(99)),
    StoreChange("run", 0, "key", b"value"),
]


@pytest.mark.parametrize("spoilt", _SPOILT.values(), ids=list(_SPOILT))
async def test_a_claim_that_fails_counts_nothing(spoilt: list[Entry]) -> None:
    """Regression: each left its events counted for ever, until every run of the process kept one event only."""
    totals = SharedTotals()
    async with opened(totals=totals) as scene:
        before, oldest = used(totals), scene.shard.engine.history(RUN).oldest
        for _ in range(5):
            journal = ShardJournal([*_GOOD, *spoilt])
            with pytest.raises(JournalError, match="can't be read by this version"):
                await open_shard(journal, totals=totals, limits=Limits(RendezvousLimits(event_bytes=500)))
            assert used(totals) == before
            assert len(totals.events.histories) == 1
            assert journal.closed
        assert scene.shard.engine.history(RUN).oldest == oldest, "nobody else has less for it"


async def test_a_claim_whose_lease_was_lost_meanwhile_does_not_stand() -> None:
    """The ownership is checked once more when all is restored, and nothing is left of the claim."""
    totals, journal, asked = SharedTotals(), ShardJournal(_GOOD), []

    def guard() -> None:
        asked.append(dict(used(totals)))
        raise ConnectionError("the lease is lost")

    with pytest.raises(ConnectionError):
        await open_shard(journal, totals=totals, guard=guard)
    assert asked[0]["runs"] == 1, "not before the end"
    assert set(used(totals).values()) == {0}
    assert journal.closed
    assert journal.appends == 0


async def test_a_claim_that_is_cancelled_gives_everything_back() -> None:
    """This holds at every step, also while it waits for its turn; the next claim then begins."""
    ended = 0
    for turns in range(30):
        slices, totals = CooperativeRunner(TickingClock(0.001)), SharedTotals()
        journals = [ShardJournal(_GOOD) for _ in range(2)]
        claims = [
            asyncio.create_task(open_shard(each, totals=totals, slices=slices, lag=NO_PAUSES))
            for each in journals
        ]
        for _ in range(turns):
            await asyncio.sleep(0)
        for claim in claims:
            claim.cancel()
        await asyncio.wait(claims)
        await drop([claim.result() for claim in claims if not claim.cancelled()])
        ended += sum(not claim.cancelled() for claim in claims)
        assert set(used(totals).values()) == {0}
        next_ = await open_shard(ShardJournal(_GOOD), totals=totals, slices=slices)
        assert totals.runs.used == 1
        await drop([next_])
    assert ended >= 2, "it went all the way"


async def test_an_old_round_is_deleted_only_once_the_shard_is_restored() -> None:
    """A restore under way must not write: another replica may own the shard."""
    stale = StoreChange(RUN, 1, "old", b"value")
    journal = ShardJournal([*run_of(RUN, 60), stale])
    task = asyncio.create_task(
        open_shard(journal, slices=CooperativeRunner(TickingClock(0.001)), lag=NO_PAUSES)
    )
    while not task.done():
        assert journal.appends == 0
        await asyncio.sleep(0)
    shard = await task
    await shard.engine.settled()
    settings = shard.engine.settings(RUN)
    member = await shard.engine.join(RUN, commands.Join("n0", settings, "host", 8, "trainer"))
    await shard.store.write(RUN, Set(writer=writer_of(member), round=0, key="key", value=b"value"))
    assert StoreChange(RUN, 1, "old", None) in journal.durable
    await drop([shard])
