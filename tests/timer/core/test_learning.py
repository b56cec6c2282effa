"""A ScopeBook never counts more than happened, forgets idle runs, and reports only important changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.timer.core.learning import ScopeBook
from rallypoint.timer.core.values import Learned, ScopeView, TimerSettings, TooMany

SETTINGS = TimerSettings(
    learn_warm_up=3,
    learn_factor=5.0,
    learn_least=10.0,
    max_scopes_per_run=2,
    max_scopes=5,
    max_learned_runs=3,
    learned_retention=100.0,
)


@pytest.fixture
def book() -> ScopeBook[str]:
    return ScopeBook(SETTINGS)


def after_of(book: ScopeBook[str], run_id: str = "run") -> float | None:
    (view,) = book.scopes(run_id)
    return view.after


def test_enough_is_exactly_the_warm_up(book: ScopeBook[str]) -> None:
    """One completion less gives no timeout; it is reported when enough came, in portions of any size."""
    assert book.observe("run", "step", 2, 4.0) is None
    assert after_of(book) is None
    ripe = book.observe("run", "step", 1, 1.0)
    assert ripe is not None
    assert ripe.after == 20.0
    assert book.observe("run", "step", 1, 1.0) is None, "it was enough before"


def test_the_longest_counts_however_much_shorter_the_others_are(book: ScopeBook[str]) -> None:
    """Nothing shortens the timeout, and it is never below `learn_least`."""
    book.observe("run", "step", 3, 0.001)
    assert after_of(book) == 10.0
    for longest, after in ((3.0, 15.0), (0.5, 15.0), (4.0, 20.0)):
        book.observe("run", "step", 1000, longest)
        assert after_of(book) == after


@dataclass
class Agent:
    """An agent's data of a scope: completions to send, its longest, and the copy from the service."""

    untold: int = 0
    longest: float = 0.0
    copy: Learned = field(default_factory=lambda: Learned("step", 0, 0.0))


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["complete", "complete", "observe", "lose", "tell", "restart", "echo"]),
        st.integers(0, 2),
        st.integers(1, 9),
    ),
    max_size=60,
)


@given(EVENTS)
def test_no_restart_or_loss_adds_completions(events: list[tuple[str, int, int]]) -> None:
    """Three agents observe, lose messages, receive data, and send it to a service that has it or not."""
    book: ScopeBook[str] = ScopeBook(SETTINGS)
    agents = [Agent() for _ in range(3)]
    happened, longest = 0, 0.0
    for kind, number, amount in events:
        agent = agents[number]
        if kind == "complete":
            happened += 1
            agent.untold += 1
            agent.longest, longest = max(agent.longest, amount), max(longest, amount)
        elif kind == "observe" and agent.untold:
            book.observe("run", "step", agent.untold, agent.longest)
            agent.untold = 0
        elif kind == "lose":
            agent.untold = 0
        elif kind == "tell":
            for _, learned in book.take_learned():
                for each in agents:
                    each.copy = learned
        elif kind == "restart":
            book = ScopeBook(SETTINGS)
        elif kind == "echo" and agent.copy.count:
            book.learn("run", "step", agent.copy.count, agent.copy.longest)
        for learned in book.learned_of("run"):
            assert learned.count <= happened
            assert learned.longest <= longest
            assert after_of(book) is None or happened >= SETTINGS.learn_warm_up


def test_only_important_changes_are_reported_and_each_scope_once(book: ScopeBook[str]) -> None:
    """A report is due when there are enough, or longer ones, or on forgetting; not for one more."""
    book.observe("run", "step", 1, 2.0)
    assert book.take_learned() == [("run", Learned("step", 1, 2.0))]
    book.observe("run", "step", 1, 2.0)
    assert book.take_learned() == []
    book.observe("run", "step", 1, 1.0)
    assert book.take_learned() == [("run", Learned("step", 3, 2.0))]
    book.observe("run", "step", 1, 2.0)
    assert book.take_learned() == []
    book.observe("run", "step", 1, 3.0)
    book.observe("run", "save", 1, 9.0)
    book.observe("run", "step", 1, 4.0)
    assert book.take_learned() == [("run", Learned("step", 6, 4.0)), ("run", Learned("save", 1, 9.0))]
    assert book.forget("run", "step") == 1
    assert book.take_learned() == [("run", Learned("step", 0, 0.0))]
    assert book.learned_of("run") == [Learned("save", 1, 9.0)]


def test_forgetting_an_unknown_scope_is_harmless(book: ScopeBook[str]) -> None:
    """A scope that has only timers has nothing to forget."""
    book.scope("run", "step").timers.add("timer")
    assert (book.forget("run"), book.forget("run", "save"), book.forget("other")) == (0, 0, 0)
    assert book.take_learned() == []


def test_a_scope_without_completions_leaves_nothing(book: ScopeBook[str]) -> None:
    """It is dropped after its last timer: names that are used once don't fill the book."""
    for number in range(100):
        scope = book.scope("run", f"epoch {number}")
        scope.timers.add("timer")
        book.tidy(scope)
        assert len(list(book.scopes())) == 1
        scope.timers.clear()
        book.tidy(scope)
    assert list(book.scopes()) == []


def test_a_run_has_so_many_scopes_and_no_more(book: ScopeBook[str]) -> None:
    """Its present scopes go on learning; other runs have their own."""
    book.observe("run", "1", 1, 1.0)
    book.observe("run", "2", 1, 1.0)
    with pytest.raises(TooMany) as refusal:
        book.observe("run", "3", 1, 1.0)
    assert refusal.value.limit == 2
    book.observe("run", "1", 1, 1.0)
    book.observe("other", "3", 1, 1.0)
    assert [(view.run_id, view.learned.count) for view in book.scopes()] == [
        ("other", 1),
        ("run", 2),
        ("run", 1),
    ]


def test_a_run_is_forgotten_so_long_after_its_last_node(book: ScopeBook[str]) -> None:
    """It is kept while a node is there; a node that comes back in time finds the learned data."""
    book.enter("run")
    book.enter("run")
    book.observe("run", "step", 3, 1.0)
    book.leave("run", 0.0)
    assert book.next_forget() is None
    book.leave("run", 10.0)
    assert book.next_forget() == 110.0
    book.forget_idle(109.0)
    book.enter("run")
    assert book.next_forget() is None
    book.forget_idle(1000.0)
    assert after_of(book) == 10.0
    book.leave("run", 1000.0)
    book.take_learned()
    book.forget_idle(1100.0)
    assert list(book.scopes()) == []
    assert book.take_learned() == [("run", Learned("step", 0, 0.0))], "who keeps a file must know"


def test_a_new_run_takes_the_place_of_the_one_idle_for_longest(book: ScopeBook[str]) -> None:
    """Runs with nodes are never forgotten for it: then the new one is refused."""
    for when, run in enumerate(["first", "second", "third"]):
        book.enter(run)
        book.observe(run, "step", 1, 1.0)
        if run != "third":
            book.leave(run, float(when))
    book.observe("fourth", "step", 1, 1.0)
    assert {run for run, _ in book.all_learned()} == {"second", "third", "fourth"}
    book.observe("fifth", "step", 1, 1.0)
    with pytest.raises(TooMany) as refusal:
        book.observe("sixth", "step", 1, 1.0)
    assert refusal.value.limit == 3
    assert {run for run, _ in book.all_learned()} == {"third", "fourth", "fifth"}


def test_all_runs_together_have_so_many_scopes_and_no_more(book: ScopeBook[str]) -> None:
    """The scopes of the run idle for longest make room; without such a run the new scope is refused."""
    for run in ("first", "second"):
        book.enter(run)
        book.observe(run, "1", 1, 1.0)
        book.observe(run, "2", 1, 1.0)
    book.observe("third", "1", 1, 1.0)
    with pytest.raises(TooMany) as refusal:
        book.observe("third", "2", 1, 1.0)
    assert refusal.value.limit == 5
    book.leave("first", 0.0)
    book.observe("third", "2", 1, 1.0)
    assert [(view.run_id, view.learned.scope) for view in book.scopes()] == [
        ("second", "1"),
        ("second", "2"),
        ("third", "1"),
        ("third", "2"),
    ]
    book.forget("second")
    assert book.scope("second", "3").count == 0


def test_kept_data_is_restored(book: ScopeBook[str]) -> None:
    """The order is kept, so that the same run is forgotten first; nothing is sent, and newer data stays."""
    for when, run in enumerate(["first", "second", "third"]):
        book.enter(run)
        book.observe(run, "step", 3, float(when))
        book.leave(run, float(when))
    kept = list(book.all_learned())
    later: ScopeBook[str] = ScopeBook(SETTINGS)
    later.observe("second", "step", 5, 0.5)
    later.take_learned()
    for run, learned in kept:
        later.restore(run, learned, 50.0)
    assert later.take_learned() == []
    assert dict(later.all_learned())["second"] == Learned("step", 5, 1.0)
    assert later.next_forget() == 150.0
    later.observe("fourth", "step", 1, 1.0)
    assert "first" not in dict(later.all_learned())


def test_a_pending_report_is_sent_though_its_scope_was_restored(book: ScopeBook[str]) -> None:
    """Reading a file removes no pending report."""
    book.observe("run", "step", 1, 1.0)
    book.restore("run", Learned("step", 2, 2.0), 0.0)
    assert book.take_learned() == [("run", Learned("step", 2, 2.0))]


def test_a_count_stays_within_63_bits(book: ScopeBook[str]) -> None:
    """More than 63 bits don't fit a file, nor 64 the message."""
    book.learn("run", "step", 2**64 - 1, 1.0)
    book.observe("run", "step", 2**32 - 1, 1.0)
    assert book.learned_of("run")[0].count == 2**63 - 1


def test_listing_goes_on_from_a_scope() -> None:
    """All pages together are the whole list, filtered by run; unlearned scopes are shown with their timers."""
    book: ScopeBook[str] = ScopeBook(TimerSettings())
    places = [(run, scope) for run in "rst" for scope in "123"]
    for run, scope in reversed(places):
        book.scope(run, scope).timers.add("timer")

    def found(views: Iterator[ScopeView]) -> list[tuple[str, str]]:
        return [(view.run_id, view.learned.scope) for view in views if view.timers == 1]

    for position, place in enumerate(places):
        assert found(book.scopes(beyond=place)) == places[position + 1 :]
    assert found(book.scopes("s")) == places[3:6]
    assert found(book.scopes("s", beyond=("s", "1"))) == places[4:6]
    assert found(book.scopes("nobody")) == []
