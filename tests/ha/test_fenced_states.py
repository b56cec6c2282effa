"""The chain of a run's fenced states: each kind of violation is found, and a correct history has none."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from ha.fenced_states import check_fenced_states
from ha.findings import Wrong
from ha.history import NEVER, Operation, Outcome
from ha.linearizability import SearchResult, judge
from ha.random_histories import corrupted, linearizable

_State = tuple[str, str] | None


def _token(number: int, state: str) -> str:
    return f"{number:016x}{state}"


A, B, C = (_token(number, state) for number, state in ((1, "a"), (2, "b"), (3, "c")))


def _set(
    state: str, on: str | None, began: float, ended: float, answered: tuple[str, str] | str | None
) -> Operation:
    """A write of a state on a token; `answered`: the state in the reply, "?" unknown, "!" refused."""
    asked = {"state": state, "token": on}
    if answered == "?":
        return Operation("c", "state.set", "run", began, NEVER, Outcome.UNKNOWN, asked)
    if answered == "!":
        return Operation(
            "c", "state.set", "run", began, ended, Outcome.REFUSED, asked, {"reason": "LEASE_LOST"}
        )
    shown = _shown(answered)  # type: ignore[arg-type]
    has_set = shown["state"] == state
    return Operation("c", "state.set", "run", began, ended, Outcome.OK, asked, shown | {"has_set": has_set})


def _get(answered: _State, began: float, ended: float) -> Operation:
    return Operation("c", "state.get", "run", began, ended, Outcome.OK, {}, _shown(answered))


def _shown(current: _State) -> dict[str, Any]:
    return {"state": None, "token": None} if current is None else {"state": current[0], "token": current[1]}


def _wrong(*operations: Operation) -> list[Wrong]:
    return [finding.wrong for finding in check_fenced_states(operations)]


FIRST = _set("a", None, 0, 1, ("a", A))
SECOND = _set("b", A, 2, 3, ("b", B))
THIRD = _set("c", B, 4, 5, ("c", C))


def test_a_correct_chain_has_no_findings() -> None:
    """Successive, losing, refused and unknown writes, with reads of the states at their times, have no findings."""
    assert not _wrong()
    assert not _wrong(_get(None, 0, 1), _get(None, 5, 6))
    loser = _set("x", A, 2, 5, ("b", B))
    unknown = _set("y", B, 4, 5, "?")
    refused = _set("z", B, 4, 5, "!")
    reads = _get(None, 0, 1), _get(("a", A), 0, 3), _get(("b", B), 2, 4), _get(("c", C), 5, 6)
    assert not _wrong(FIRST, SECOND, THIRD, loser, unknown, refused, *reads)


def test_a_write_of_unknown_outcome_may_be_seen_at_any_time() -> None:
    """It is on the chain as soon as a reply shows it or a write replaces it, and not before it began."""
    unknown = _set("b", A, 2, 3, "?")
    assert not _wrong(FIRST, unknown, _get(("a", A), 20, 21), _get(("b", B), 30, 31))
    assert not _wrong(FIRST, unknown, _set("x", A, 5, 6, ("b", B)), _set("c", B, 7, 8, ("c", C)))
    assert _wrong(FIRST, unknown, _get(("b", B), 1, 1.5)) == [Wrong.STALE]


@pytest.mark.parametrize("second", [("x", 4, 5), ("x", 2, 3)])
def test_two_writes_on_one_state_are_a_fork(second: tuple[str, float, float]) -> None:
    """This holds also if both were acknowledged at the same time, and if both were set on no state."""
    state, began, ended = second
    rival = _set(state, A, began, ended, (state, _token(2, state)))
    assert _wrong(FIRST, SECOND, rival) == [Wrong.FORK]
    assert _wrong(FIRST, _set("x", None, 2, 3, ("x", _token(1, "x")))) == [Wrong.FORK]


def test_an_unknown_write_that_was_read_can_be_one_side_of_a_fork() -> None:
    """A state that was read has taken effect, although its writer got no reply."""
    assert _wrong(FIRST, SECOND, _set("x", A, 2, 3, "?"), _get(("x", _token(2, "x")), 2, 3)) == [Wrong.FORK]


def test_an_acknowledged_write_missing_from_later_reads_is_lost() -> None:
    """It is lost if all later reads show the state before it."""
    assert _wrong(FIRST, SECOND, _get(("a", A), 4, 5), _get(("a", A), 6, 7)) == [Wrong.LOST]
    assert _wrong(FIRST, _get(None, 4, 5)) == [Wrong.LOST]


def test_a_read_of_a_replaced_state_is_stale() -> None:
    """The write is not lost, since a later read shows it again: the first read was stale."""
    assert _wrong(FIRST, SECOND, _get(("a", A), 4, 5), _get(("b", B), 6, 7)) == [Wrong.STALE]
    # The write was not acknowledged, but a read had shown it.
    unknown = _set("b", A, 2, 3, "?")
    assert _wrong(FIRST, unknown, _get(("b", B), 4, 5), _get(("a", A), 6, 7)) == [Wrong.STALE]
    # A write whose reply shows a past state.
    loser = _set("x", None, 4, 5, ("a", A))
    assert _wrong(FIRST, SECOND, loser, _get(("b", B), 6, 7)) == [Wrong.STALE]


def test_a_state_from_nowhere() -> None:
    """A state without a write, one set on a token never issued, and another's state confirmed to a writer are found."""
    assert _wrong(FIRST, _get(("ghost", B), 2, 3)) == [Wrong.FROM_NOWHERE]
    assert _wrong(FIRST, _set("b", "f" * 16, 2, 3, ("b", B))) == [Wrong.FROM_NOWHERE]
    mine = Operation(
        "c",
        "state.set",
        "run",
        2,
        3,
        Outcome.OK,
        {"state": "x", "token": A},
        _shown(("a", A)) | {"has_set": True},
    )
    assert _wrong(FIRST, mine) == [Wrong.FROM_NOWHERE]


def test_a_refused_write_with_an_effect_is_found() -> None:
    """A refusal, or a reply with another state, means that the write had no effect."""
    assert _wrong(FIRST, _set("b", A, 2, 3, "!"), _get(("b", B), 4, 5)) == [Wrong.REFUSED_BUT_DONE]
    lost = _set("b", A, 2, 3, ("a2", _token(2, "a2")))
    winner = _set("a2", A, 2, 3, ("a2", _token(2, "a2")))
    assert Wrong.REFUSED_BUT_DONE in _wrong(FIRST, winner, lost, _get(("b", _token(3, "b")), 4, 5))


def test_a_write_that_must_succeed() -> None:
    """A write on the current token succeeds, and the repetition of a completed write confirms it."""
    assert _wrong(FIRST, _set("b", A, 2, 3, ("a", A))) == [Wrong.DENIED]
    assert _wrong(_set("a", None, 0, 1, None)) == [Wrong.DENIED]
    again = _set("b", A, 6, 7, ("c", C))
    assert _wrong(FIRST, SECOND, THIRD, again) == [Wrong.DENIED]


def test_a_write_is_repeated() -> None:
    """The repetition of a completed write returns its own token, also if others have replaced its state since."""
    again = _set("b", A, 6, 7, ("b", B))
    assert not _wrong(FIRST, SECOND, THIRD, again)
    assert not _wrong(FIRST, _set("b", A, 2, 3, "?"), again)
    # It took effect before its first reply, regardless of the time of a later one.
    assert _wrong(
        FIRST, SECOND, _set("b", A, 6, 7, ("b", B)), _get(("a", A), 4, 5), _get(("b", B), 8, 9)
    ) == [Wrong.STALE]
    twice = _set("b", A, 6, 7, ("b", _token(4, "b")))
    assert Wrong.DONE_TWICE in _wrong(FIRST, SECOND, THIRD, twice)


def test_a_token_stands_for_one_state_and_numbers_grow() -> None:
    """A token of two states, and one whose number is not greater than that of the state it replaces, are found."""
    assert Wrong.REUSED in _wrong(FIRST, _set("b", A, 2, 3, ("b", A)))
    assert _wrong(FIRST, _set("b", A, 2, 3, ("b", _token(1, "b")))) == [Wrong.OUT_OF_ORDER]


def test_runs_are_apart() -> None:
    """A violation in one run does not affect another, and names its run."""
    other = Operation("c", "state.get", "other", 2, 3, Outcome.OK, {}, _shown(("a", A)))
    (finding,) = check_fenced_states([FIRST, SECOND, other])
    assert finding.where == "other"
    assert "'a'" in str(finding)


def _apply(current: _State, operation: Operation) -> tuple[_State, Mapping[str, Any]]:
    """Apply an operation to a fenced state as the contract requires, with predictable tokens."""
    if operation.what == "state.get":
        return current, _shown(current)
    state, token = operation.asked["state"], operation.asked["token"]
    if token != (None if current is None else current[1]):
        return current, _shown(current) | {"has_set": False}
    number = 0 if current is None else int(current[1][:16], 16)
    current = state, _token(number + 1, state)
    return current, _shown(current) | {"has_set": True}


def _ask(draw: random.Random, number: int, seen: _State) -> tuple[str, Mapping[str, Any]]:
    if draw.random() < 0.4:
        return "state.get", {}
    return "state.set", {"state": f"s{number}", "token": None if seen is None else seen[1]}


def _asked_tokens(operations: list[Operation]) -> set[str | None]:
    return {each.asked["token"] for each in operations if "token" in each.asked} - {None}


def test_it_agrees_with_the_general_search() -> None:
    """Of random correct and corrupted histories, the chain is sound exactly if some order explains the replies."""
    verdicts: Counter[SearchResult] = Counter()
    for seed in range(2000):
        draw = random.Random(seed)
        operations = linearizable(draw, None, _ask, _apply, draw.randint(2, 12))
        found = check_fenced_states(operations)
        assert not found, f"seed {seed}: {found[0]}"
        altered = corrupted(draw, operations)
        if not _asked_tokens(altered) <= {each.answered.get("token") for each in altered}:
            continue  # the general search accepts a token that a client guessed
        verdict = judge(altered, None, _apply).verdict
        assert bool(check_fenced_states(altered)) == (verdict is SearchResult.VIOLATION), f"seed {seed}"
        verdicts[verdict] += 1
    assert min(verdicts[SearchResult.LINEARIZABLE], verdicts[SearchResult.VIOLATION]) > 300, verdicts


def test_long_histories_take_no_time() -> None:
    """A history of half an hour is checked within seconds, and a violation at its end is found."""
    draw = random.Random(3)
    operations = linearizable(draw, None, _ask, _apply, 20_000, clients=8)
    assert not check_fenced_states(operations)
    first = next(each for each in operations if each.outcome is Outcome.OK)
    end = max(each.ended for each in operations if each.ended < NEVER)
    stale = Operation("c", "state.get", "object", end + 1, end + 2, Outcome.OK, {}, _shown(None))
    assert first.ended < end
    assert [finding.wrong for finding in check_fenced_states([*operations, stale])] == [Wrong.LOST]
