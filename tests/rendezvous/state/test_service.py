"""Sets are visible once durable; leases count at the decision; unused states expire; watchers receive changes."""

from __future__ import annotations

import asyncio

import pytest

from rallypoint.rendezvous.base.cooperative import LatestValue
from rallypoint.rendezvous.base.entries import Operation, Writer
from rallypoint.rendezvous.base.errors import Draining
from rallypoint.rendezvous.base.limits import StateLimits
from rallypoint.rendezvous.base.refusals import (
    JournalFailed,
    StateBusy,
    StatesFull,
    TooManyStates,
    TooManyWatchers,
)
from rallypoint.rendezvous.core.commands import LeaseLost
from rallypoint.rendezvous.journal.journal import JournalError
from rallypoint.rendezvous.state.core import FencedState, SetOutcome
from rallypoint.rendezvous.state.service import FencedStateService, StateView
from rendezvous.state.state_fakes import RUN, Clock, TestJournal, asked, open_states, served
from support.waiting import started


async def first(states: FencedStateService, state: bytes = b"x", run_id: str = RUN) -> FencedState:
    """Set the first state of a run."""
    outcome = await states.set(asked(state, run_id=run_id))
    assert outcome.has_set
    assert outcome.current is not None
    return outcome.current


async def view(slot: LatestValue[StateView]) -> FencedState | None:
    """The next state that a watcher receives."""
    told = await slot.take()
    assert told is not None
    return told.current


async def silent(slot: LatestValue[StateView]) -> bool:
    """Return True if a watcher has nothing to receive."""
    (taking,) = await started(slot.take())
    return taking.cancel()


async def test_nothing_is_published_before_it_is_durable() -> None:
    """While the commit is held back, no set is answered, not even a losing one, and no reader or watcher sees the
    state; nor while it is durable but not confirmed."""
    journal = TestJournal()
    async with served(open_states(journal)) as states:
        old = await first(states)
        watching = states.watch(RUN, old.token)
        journal.hold()
        setting = await started(*(states.set(asked(new, old.token)) for new in (b"y", b"z")))
        await journal.until_held()
        assert not any(task.done() for task in setting)
        assert states.get(RUN) == old
        assert await silent(watching)
        journal.release()
        journal.hold_after()
        await journal.until_commits(2)
        assert states.get(RUN) == old
        assert not any(task.done() for task in setting)
        journal.release()
        won, lost = await asyncio.gather(*setting)
        assert (won.has_set, lost.has_set) == (True, False)
        assert won.current == lost.current == states.get(RUN) == await view(watching)


async def test_sets_that_arrive_together_share_a_commit() -> None:
    """This holds for sets of all runs; one that changes nothing needs no commit."""
    journal = TestJournal()
    async with served(open_states(journal)) as states:
        journal.hold()
        (blocking,) = await started(states.set(asked(b"x", run_id="0")))
        await journal.until_held()
        others = await started(*(states.set(asked(b"x", run_id=f"{n % 50}")) for n in range(1, 100)))
        journal.release()
        await blocking
        outcomes = await asyncio.gather(*others)
        assert sum(outcome.has_set for outcome in outcomes) == 49
        assert [len(commit) for commit in journal.commits] == [1, 49]
        assert not (await states.set(asked(b"y", b"foreign", run_id="0"))).has_set
        assert len(journal.commits) == 2


async def test_one_of_many_sets_with_one_token_wins() -> None:
    async with served(open_states(TestJournal())) as states:
        current = await first(states, b"0")
        for _ in range(20):
            outcomes = await asyncio.gather(*(states.set(asked(b"%d" % n, current.token)) for n in range(20)))
            winners = [outcome for outcome in outcomes if outcome.has_set]
            assert len(winners) == 1
            assert {outcome.current for outcome in outcomes} == {winners[0].current}
            assert winners[0].current is not None
            current = winners[0].current


async def test_a_failed_commit_ends_the_service() -> None:
    """No set gets a successful reply, no request waits for ever, and `serve` raises the error."""
    journal = TestJournal()
    states = open_states(journal)
    working = asyncio.create_task(states.serve())
    old = await first(states)
    watching = states.watch(RUN, old.token)
    journal.hold()
    (in_flight,) = await started(states.set(asked(b"y", old.token)))
    await journal.until_held()
    (queued,) = await started(states.set(asked(b"z", old.token)))
    journal.fails_with = OSError("no space left on device")
    journal.release()
    for setting in (in_flight, queued):
        with pytest.raises(JournalFailed, match="no space left on device"):
            await setting
    with pytest.raises(JournalFailed):
        await watching.take()
    with pytest.raises(JournalFailed):
        states.get(RUN)
    with pytest.raises(OSError, match="no space left"):
        await working
    await states.drain()
    assert open_states(journal).get(RUN) == old


async def test_a_cancelled_set_does_not_affect_others() -> None:
    journal = TestJournal()
    async with served(open_states(journal)) as states:
        journal.hold()
        (in_flight,) = await started(states.set(asked(b"x")))
        await journal.until_held()
        gone, stays = await started(
            states.set(asked(b"y", run_id="gone")), states.set(asked(b"z", run_id="stays"))
        )
        in_flight.cancel()
        gone.cancel()
        journal.release()
        assert (await stays).has_set
        assert states.get(RUN) is not None
        assert states.get("gone") is None


async def test_a_lease_counts_when_the_set_is_decided() -> None:
    """A set fails if its lease was lost before the decision; with a held lease, or without one, it succeeds."""
    held = {(RUN, "a", 1)}

    def check_lease(run_id: str, node_id: str, lease: int, token: bytes) -> None:
        if (run_id, node_id, lease) not in held:
            raise LeaseLost(run_id, node_id, lease, None)

    journal = TestJournal()
    async with served(open_states(journal, check_lease=check_lease)) as states:
        current = (await states.set(asked(b"x", writer=Writer("a", 1)))).current
        assert current is not None
        journal.hold()
        blocking = await started(states.set(asked(b"", run_id="other")))
        await journal.until_held()
        late = await started(states.set(asked(b"y", current.token, writer=Writer("a", 1))))
        held.clear()
        journal.release()
        with pytest.raises(LeaseLost):
            await late[0]
        await blocking[0]
        assert states.get(RUN) == current
        assert (await states.set(asked(b"y", current.token))).has_set


async def test_a_repetition_is_answered_after_its_lease_was_lost() -> None:
    """The state was set while the lease was held, so the repetition gets that outcome."""
    lost = False

    def check_lease(run_id: str, node_id: str, lease: int, token: bytes) -> None:
        if lost:
            raise LeaseLost(run_id, node_id, lease, None)

    async with served(open_states(TestJournal(), check_lease=check_lease)) as states:
        request = asked(b"x", writer=Writer("a", 1), operation=Operation("c", 0, 1))
        outcome = await states.set(request)
        lost = True
        assert await states.set(request) == outcome


async def test_an_unused_state_expires() -> None:
    """Reads, attempts to set and watches are uses; an expired state leaves the journal, and its token is invalid."""
    clock, journal = Clock(), TestJournal()
    async with served(open_states(journal, clock=clock, ttl=100.0)) as states:
        kept = ["read", "tried", "watched"]
        old = await first(states, run_id="unused")
        for run_id in kept:
            await first(states, run_id=run_id)
        watching = states.watch("watched", None)
        await view(watching)
        clock.now += 60.0
        assert states.get("read") is not None
        await states.set(asked(b"y", run_id="tried"))
        clock.now += 60.0
        await states.set(asked(b"x", run_id="later"))  # any set wakes the service
        assert {run_id for run_id, *_ in journal.rows} == {"later", *kept}
        assert states.get("unused") is None
        assert await states.set(asked(b"y", old.token, "unused")) == SetOutcome(None, has_set=False)
        assert (await first(states, run_id="unused")).token != old.token
        states.unwatch("watched", watching)
        clock.now += 99.0
        await states.set(asked(b"x", run_id="again"))
        assert states.get("watched") is not None
        assert states.get("tried") is None


async def test_a_restart_gives_a_state_the_full_time() -> None:
    clock, journal = Clock(), TestJournal()
    async with served(open_states(journal, clock=clock, ttl=100.0)) as states:
        await first(states)
        clock.now += 99.0
    async with served(open_states(journal, clock=clock, ttl=100.0)) as states:
        clock.now += 99.0
        await first(states, run_id="other")
        assert states.get(RUN) is not None


async def test_expiry_needs_no_request() -> None:
    """The deadline itself wakes the service, and until the end is durable the state is there."""
    clock, journal = Clock(), TestJournal()
    async with served(open_states(journal, clock=clock, ttl=0.05)) as states:
        current = await first(states)
        journal.hold()
        clock.now += 0.05
        await journal.until_held()
        assert states.get(RUN) == current
        watching = states.watch(RUN, current.token)
        journal.release()
        assert await view(watching) is None
        assert states.get(RUN) is None
        assert not journal.rows


async def test_very_many_expire_a_portion_at_a_time() -> None:
    clock, journal = Clock(), TestJournal()
    async with served(open_states(journal, clock=clock, ttl=100.0)) as states:
        await asyncio.gather(*(first(states, run_id=f"{n}") for n in range(2_500)))
        clock.now += 101.0
        await first(states, run_id="wakes it")
        await journal.until_commits(4)
        assert [len(commit) for commit in journal.commits] == [2_500, 1_000, 1_000, 501]
        assert len(journal.rows) == 1


async def test_a_forgotten_run_is_gone() -> None:
    """This holds for readers, watchers, token holders and the journal; also while its first state is being set."""
    journal = TestJournal()
    async with served(open_states(journal)) as states:
        old = await first(states)
        watching = states.watch(RUN, old.token)
        states.forget_run(RUN)
        states.forget_run("unknown")
        assert await view(watching) is None
        assert states.get(RUN) is None
        assert await states.set(asked(b"y", old.token)) == SetOutcome(None, has_set=False)
        assert not journal.rows
        journal.hold()
        (setting,) = await started(states.set(asked(b"x", run_id="new")))
        await journal.until_held()
        states.forget_run("new")
        journal.release()
        await setting
        await journal.until_commits(4)
        assert not journal.rows


async def test_a_watcher_receives_states_that_it_does_not_know() -> None:
    """Without the current token it gets the state at once; then each change, or the latest one if it is slow."""
    async with served(open_states(TestJournal())) as states:
        early = states.watch(RUN, None)
        assert await view(early) is None
        current = await first(states)
        assert await view(early) == current
        for token in (None, b"", b"foreign"):
            assert await view(states.watch(RUN, token)) == current
        knowing = states.watch(RUN, current.token)
        assert await silent(knowing)
        for state in (b"1", b"2", b"3"):
            outcome = await states.set(asked(state, current.token))
            assert outcome.current is not None
            current = outcome.current
        assert await view(knowing) == current
        assert await silent(knowing)
        gone = states.watch("none", b"a token that was")
        assert await view(gone) is None


async def test_limits_hold() -> None:
    limits = StateLimits(states=2, state_bytes=10_000, queued_bytes=2_000, watchers=2)
    journal = TestJournal()
    async with served(open_states(journal, limits=limits)) as states:
        current = await first(states)
        with pytest.raises(StatesFull):
            await states.set(asked(b"x" * 10_000, current.token))
        await first(states, run_id="other")
        with pytest.raises(TooManyStates):
            await states.set(asked(b"x", run_id="third"))
        watching = [states.watch(RUN, None) for _ in range(2)]
        with pytest.raises(TooManyWatchers):
            states.watch(RUN, None)
        states.unwatch(RUN, watching[0])
        states.watch(RUN, None)
        journal.hold()
        (in_flight,) = await started(states.set(asked(b"y", current.token)))
        await journal.until_held()
        (queued,) = await started(states.set(asked(b"z" * 1_000, current.token)))
        with pytest.raises(StateBusy):
            await states.set(asked(b"z" * 1_000, current.token))
        journal.release()
        assert (await in_flight).has_set
        assert not (await queued).has_set
        assert not (await states.set(asked(b"z", current.token))).has_set


async def test_a_drain_finishes_accepted_requests() -> None:
    """It accepts no more requests, and ends every watch."""
    journal = TestJournal()
    async with served(open_states(journal)) as states:
        watching = states.watch(RUN, None)
        await view(watching)
        journal.hold()
        (setting,) = await started(states.set(asked(b"x")))
        await journal.until_held()
        (draining,) = await started(states.drain())
        for refused in (states.get, lambda run_id: states.watch(run_id, None)):
            with pytest.raises(Draining):
                refused(RUN)
        with pytest.raises(Draining):
            await states.set(asked(b"y"))
        with pytest.raises(Draining):
            await watching.take()
        assert not draining.done()
        journal.release()
        await draining
        assert (await setting).has_set


def test_a_journal_of_a_newer_version_is_refused() -> None:
    journal = TestJournal()
    journal.rows[RUN, -1, "state"] = b"\x02later"
    with pytest.raises(JournalError, match="can't be read by this version"):
        open_states(journal)
