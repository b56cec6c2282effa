"""A set takes effect if its token is the current state's, or absent if there is no state; and once per operation."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.rendezvous.base.cooperative import finish
from rallypoint.rendezvous.base.entries import Operation, StoreChange
from rallypoint.rendezvous.base.limits import SharedTotals, StateLimits
from rallypoint.rendezvous.base.refusals import (
    OperationReused,
    OperationSuperseded,
    StatesFull,
    TooManyStates,
)
from rallypoint.rendezvous.state.core import (
    OPERATION_BYTES,
    SPACE,
    STATE_OVERHEAD_BYTES,
    FencedState,
    SetOutcome,
    SetState,
    StateCreators,
    States,
    StatesDraft,
)
from rendezvous.state.state_fakes import RUN, asked


class StateTable:
    """States and the journal behind them, each change in a batch of its own by default."""

    def __init__(self, limits: StateLimits | None = None) -> None:
        self.limits = limits or StateLimits()
        self.states = States()
        self.rows: dict[tuple[str, str], bytes] = {}
        self._random = random.Random(1)

    def draft(self) -> StatesDraft:
        return StatesDraft(self.states, self.limits, StateCreators(self.limits, SharedTotals()))

    def nonce(self) -> bytes:
        return self._random.randbytes(16)

    def decide(self, draft: StatesDraft, request: SetState) -> SetOutcome:
        return draft.repetition(request) or draft.set(request, self.nonce())

    def keep(self, draft: StatesDraft) -> None:
        for entry in draft.entries():
            assert entry.round == SPACE
            if entry.value is None:
                self.rows.pop((entry.run_id, entry.key), None)
            else:
                self.rows[entry.run_id, entry.key] = entry.value
        for run_id, held in draft.changed.items():
            self.states.apply(run_id, held)

    def set(self, request: SetState) -> SetOutcome:
        draft = self.draft()
        outcome = self.decide(draft, request)
        self.keep(draft)
        return outcome

    def drop(self, run_id: str = RUN) -> None:
        draft = self.draft()
        draft.drop(run_id)
        self.keep(draft)

    def entries(self) -> list[StoreChange]:
        return [StoreChange(run_id, SPACE, key, value) for (run_id, key), value in self.rows.items()]

    def restart(self) -> None:
        before = self.states.used_bytes
        self.states = finish(States.restore(self.entries()))
        assert self.states.used_bytes == before

    def current(self, run_id: str = RUN) -> FencedState | None:
        held = self.states.held(run_id)
        return None if held is None else held.current


_MOVES = st.lists(
    st.tuples(
        st.sampled_from(["set", "set", "set", "drop", "restart"]),
        st.binary(max_size=3),
        st.one_of(st.none(), st.integers(0, 30), st.binary(max_size=40)),
    ),
    max_size=40,
)


@given(_MOVES)
def test_only_the_current_token_ever_matches(moves: Sequence[tuple[str, bytes, int | bytes | None]]) -> None:
    """Random sets, drops and restarts have the results of a model that has only this rule. Earlier tokens, by number,
    and arbitrary bytes are tried; a set that loses changes nothing in the journal either."""
    ledger, given_out, expected = StateTable(), list[bytes](), None
    for what, state, choice in moves:
        if what == "drop":
            ledger.drop()
            expected = None
            assert not ledger.rows
            continue
        if what == "restart":
            ledger.restart()
            continue
        token = given_out[choice % len(given_out)] if isinstance(choice, int) and given_out else choice
        token = None if isinstance(token, int) else token
        rows = dict(ledger.rows)
        wins = token == (None if expected is None else expected.token)
        outcome = ledger.set(asked(state, token))
        assert outcome.has_set == wins
        if wins:
            assert outcome.current is not None
            assert outcome.current.state == state
            assert outcome.current.token not in given_out
            given_out.append(outcome.current.token)
            expected = outcome.current
        else:
            assert ledger.rows == rows
        assert outcome.current == ledger.current() == expected


def test_a_token_matches_in_its_own_run_only() -> None:
    ledger = StateTable()
    one = ledger.set(asked(b"x", run_id="one")).current
    two = ledger.set(asked(b"x", run_id="two")).current
    assert one is not None
    assert ledger.set(asked(b"y", one.token, "two")) == SetOutcome(two, has_set=False)
    assert ledger.set(asked(b"y", one.token, "three")) == SetOutcome(None, has_set=False)


def test_in_one_batch_the_first_of_a_token_wins() -> None:
    """The others lose against it, as if they had come in batches of their own."""
    ledger = StateTable()
    first = ledger.set(asked(b"x")).current
    assert first is not None
    draft = ledger.draft()
    outcomes = [ledger.decide(draft, asked(b"%d" % n, first.token)) for n in range(3)]
    assert [outcome.has_set for outcome in outcomes] == [True, False, False]
    assert outcomes[0].current == outcomes[1].current == outcomes[2].current
    assert len(draft.entries()) == 1
    assert ledger.current() == first
    ledger.keep(draft)
    assert ledger.current() == outcomes[0].current


def test_a_repetition_gets_its_first_outcome() -> None:
    """It gets its first outcome, also after a restart and after sets of others; it changes nothing."""
    ledger = StateTable()
    request = asked(b"x", operation=Operation("one", 0, 1))
    outcome = ledger.set(request)
    assert outcome.has_set
    assert outcome.current is not None
    ledger.set(asked(b"y", outcome.current.token, operation=Operation("two", 0, 1)))
    ledger.restart()
    rows = dict(ledger.rows)
    assert ledger.set(request) == outcome
    assert ledger.rows == rows
    current = ledger.current()
    assert current is not None
    assert current.state == b"y"


def test_a_set_that_lost_may_win_when_repeated() -> None:
    """It leaves no record: it changed nothing, so a new decision is as good."""
    ledger = StateTable()
    ledger.set(asked(b"x"))
    request = asked(b"y", operation=Operation("one", 0, 1))
    assert not ledger.set(request).has_set
    ledger.drop()
    assert ledger.set(request).has_set


def test_a_slot_goes_on() -> None:
    ledger = StateTable()
    current = ledger.set(asked(b"x", operation=Operation("one", 0, 1))).current
    assert current is not None
    ledger.set(asked(b"y", current.token, operation=Operation("one", 0, 5)))
    with pytest.raises(OperationSuperseded) as refused:
        ledger.set(asked(b"z", operation=Operation("one", 0, 4)))
    assert refused.value.latest == 5
    for other in (asked(b"z", current.token), asked(b"y", b""), asked(b"y")):
        with pytest.raises(OperationReused):
            ledger.set(asked(other.state, other.token, operation=Operation("one", 0, 5)))
    assert not ledger.set(asked(b"z", current.token, operation=Operation("one", 1, 1))).has_set


def test_the_slot_used_longest_ago_makes_room() -> None:
    """This holds in memory and journal, also over a restart; the order is that of use."""
    ledger = StateTable(StateLimits(operations=2))
    token: bytes | None = None
    requests: list[SetState] = []
    for number, client in enumerate(["one", "two", "one", "three"]):
        request = asked(b"%d" % number, token, operation=Operation(client, 0, number + 1))
        current = ledger.set(request).current
        assert current is not None
        token = current.token
        requests.append(request)
        ledger.restart()
    assert ledger.set(requests[2]).has_set
    assert ledger.set(requests[3]).has_set
    assert not ledger.set(requests[1]).has_set
    assert len(ledger.rows) == 3


def test_a_drop_leaves_nothing() -> None:
    ledger = StateTable()
    ledger.set(asked(b"x", operation=Operation("one", 0, 1)))
    ledger.set(asked(b"x", run_id="other"))
    ledger.drop()
    ledger.drop()
    assert [run_id for run_id, _ in ledger.rows] == ["other"]
    assert ledger.states.used_bytes == 1 + STATE_OVERHEAD_BYTES


def test_states_are_bounded_by_number() -> None:
    """Present states may be replaced, and a dropped one makes room."""
    ledger = StateTable(StateLimits(states=1))
    current = ledger.set(asked(b"x")).current
    assert current is not None
    with pytest.raises(TooManyStates) as refused:
        ledger.set(asked(b"x", run_id="other"))
    assert refused.value.limit == 1
    assert ledger.set(asked(b"y", current.token)).has_set
    ledger.drop()
    assert ledger.set(asked(b"x", run_id="other")).has_set


def test_states_are_bounded_by_bytes() -> None:
    """Operations count; a refused set leaves the draft unchanged; a set that adds no bytes may exceed the limit."""
    ledger = StateTable(StateLimits(state_bytes=1000 + STATE_OVERHEAD_BYTES))
    current = ledger.set(asked(b"x" * 1000)).current
    assert current is not None
    draft = ledger.draft()
    with pytest.raises(StatesFull) as refused:
        draft.set(asked(b"x" * 1001, current.token), ledger.nonce())
    assert refused.value.used_bytes == refused.value.limit_bytes + 1
    with pytest.raises(StatesFull):
        draft.set(asked(b"x" * 1000, current.token, operation=Operation("one", 0, 1)), ledger.nonce())
    assert not draft.entries()
    assert not draft.changed
    smaller = b"x" * (1000 - OPERATION_BYTES)
    assert ledger.set(asked(smaller, current.token, operation=Operation("one", 0, 1))).has_set
    ledger.limits = StateLimits(state_bytes=1)
    current = ledger.current()
    assert current is not None
    assert ledger.set(asked(smaller, current.token)).has_set


@pytest.mark.parametrize(
    "entry",
    [
        StoreChange(RUN, SPACE, "state", b"\x02" + b"x" * 30),
        StoreChange(RUN, SPACE, "state", b"\x01short"),
        StoreChange(RUN, SPACE, "state", None),
        StoreChange(RUN, SPACE, "later", b""),
        StoreChange(RUN, SPACE, "\x01operation/c/0", b"no record"),
    ],
    ids=["layout", "short", "deletion", "key", "operation"],
)
def test_entries_of_others_are_not_guessed_at(entry: StoreChange) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        finish(States.restore([entry]))
