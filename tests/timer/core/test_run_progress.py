"""The progress of workers, stalled runs, and the worker that stopped first. The clock is the test's."""

from __future__ import annotations

import random

import pytest

from rallypoint.timer.core.progress import ProgressBoard, ProgressSettings, Stall
from rallypoint.timer.core.values import MAX_AFTER, InvalidField

RUN = "run"
STALL_AFTER = 60.0


class Board:
    """A board of one run with the test's clock; it is judged whenever it is due."""

    def __init__(self, **settings: float | int | None) -> None:
        self.board = ProgressBoard(ProgressSettings(**{"stall_after": STALL_AFTER, **settings}))  # type: ignore[arg-type]
        self.now = 1000.0
        self.news: list[Stall] = []

    def join(self, node_id: str = "a", stall_after: float | None = None) -> None:
        """Subscribe a node whose agent has no progress yet."""
        self.board.subscribe(RUN, node_id, stall_after, self.now)
        self.board.registered(RUN, node_id, self.now)

    def join_two(self, *steps: int) -> None:
        """Subscribe nodes a and b, each with a worker that has sent its step."""
        for worker, node_id in enumerate(("a", "b")):
            self.join(node_id)
            self.tell(worker, steps[worker], node_id=node_id)

    def tell(self, worker: int, step: int, elapsed: float = 0.0, node_id: str = "a") -> bool:
        taken = self.board.report(
            RUN, node_id, f"{worker}@1", self.now, rank=worker, step=step, elapsed=elapsed
        )
        self.news += self.board.take_new_stalls()
        return taken

    def wait(self, seconds: float) -> None:
        """Let time pass, and judge each time that the board is due."""
        end = self.now + seconds
        while (due := self.board.next_due()) is not None and due <= end:
            self.now = max(self.now, due)
            self.board.judge(self.now)
        self.now = end
        self.news += self.board.take_new_stalls()

    def told(self) -> list[tuple[bool, int, float, int]]:
        """Return the new reports: True if it is over, the first's rank, seconds, workers at its step."""
        news, self.news = self.news, []
        return [(stall.over, stall.first.rank, round(stall.idle, 3), stall.at_same_step) for stall in news]


@pytest.fixture
def board() -> Board:
    return Board()


def test_a_run_in_which_no_worker_advances_is_reported_as_stalled_once(board: Board) -> None:
    """It is not reported before that time, nor twice; its end is reported."""
    board.join()
    for worker in range(4):
        board.tell(worker, 7)
    board.wait(59.9)
    assert board.told() == []
    board.wait(0.2)
    assert board.told() == [(False, 0, 60.0, 4)]
    board.wait(1000)
    assert board.told() == []
    board.tell(2, 8)
    assert board.told() == [(True, 0, 1060.1, 4)]
    board.wait(61)
    assert board.told() == [(False, 0, 60.0, 3)]


def test_a_run_in_which_one_worker_advances_does_not_stall(board: Board) -> None:
    """This holds however long the others stand still; those are the slowest."""
    board.join()
    for worker in range(3):
        board.tell(worker, 7)
    for step in range(8, 40):
        board.wait(50)
        board.tell(1, step)
    assert board.told() == []
    progress = board.board.progress_of(RUN, 10, board.now)
    assert [(each.rank, each.step) for each in progress.slowest] == [(0, 7), (2, 7), (1, 39)]
    assert (progress.lowest_step, progress.highest_step, progress.idle) == (7, 39, 0.0)


def test_the_worker_that_stopped_first_is_at_the_lowest_step_for_longest(board: Board) -> None:
    """Rank 3 came to step 7 before the others did, and never to 8, as rank 1 did."""
    board.join()
    for worker in (3, 0, 1, 2):
        board.tell(worker, 7)
        board.wait(1)
    board.tell(1, 8)
    board.tell(2, 8)
    board.wait(61)
    assert board.told() == [(False, 3, 60.0, 2)]
    stall = board.board.stall_of(RUN, board.now)
    assert stall is not None
    assert (stall.first.worker_id, stall.first.step, round(stall.first.idle, 3)) == ("3@1", 7, 65.0)


def test_any_other_step_is_an_advance_and_the_same_one_is_none(board: Board) -> None:
    """A worker that went back to its checkpoint advances; one that repeats its step does not."""
    board.join()
    board.tell(0, 7)
    board.wait(40)
    board.tell(0, 3)
    board.wait(40)
    board.tell(0, 3)
    assert board.told() == []
    board.wait(20.1)
    assert board.told() == [(False, 0, 60.0, 1)]


def test_the_time_at_a_step_before_its_report_counts(board: Board) -> None:
    """An agent that comes back to a new service sends how long its workers have been at their steps."""
    board.board.subscribe(RUN, "a", None, board.now)
    board.tell(0, 7, elapsed=50)
    board.tell(1, 7, elapsed=55)
    board.board.registered(RUN, "a", board.now)
    board.wait(29)
    assert board.told() == []
    board.wait(2)
    # The first agent to be back may have the one part that stands still: the others have 30 s to come.
    assert board.told() == [(False, 1, 80.0, 2)]


def test_the_first_agent_to_be_back_makes_no_stall(board: Board) -> None:
    """Its workers have rightly stood still for long; those of the second one have not."""
    board.board.subscribe(RUN, "a", None, board.now)
    board.tell(0, 7, elapsed=500)
    board.board.registered(RUN, "a", board.now)
    board.wait(5)
    board.board.subscribe(RUN, "b", None, board.now)
    board.tell(1, 90, elapsed=1, node_id="b")
    board.board.registered(RUN, "b", board.now)
    board.wait(50)
    assert board.told() == []


def test_a_run_without_an_agent_is_not_judged(board: Board) -> None:
    """A broken stream gives no information about its workers; the agent's next stream does."""
    board.join()
    board.tell(0, 7)
    board.board.unsubscribe(RUN, "a", board.now)
    board.wait(300)
    assert board.told() == []
    board.board.subscribe(RUN, "a", None, board.now)
    board.tell(0, 900, elapsed=0.5)
    board.board.registered(RUN, "a", board.now)
    board.wait(59)
    assert board.told() == []
    board.wait(1)
    assert board.told() == [(False, 0, 60.0, 1)]


def test_a_stall_lasts_while_its_agents_are_away(board: Board) -> None:
    """A reconnect of an agent changes nothing."""
    board.join()
    board.tell(0, 7)
    board.wait(61)
    assert len(board.told()) == 1
    board.board.unsubscribe(RUN, "a", board.now)
    board.board.subscribe(RUN, "a", None, board.now)
    board.tell(0, 7, elapsed=61)
    board.board.registered(RUN, "a", board.now)
    board.wait(100)
    assert board.told() == []
    assert board.board.stall_of(RUN, board.now) is not None


def test_the_newest_subscriber_decides_after_how_long(board: Board) -> None:
    """0 means never, and also ends a stall; unset, the service's own setting is in force."""
    board.join(stall_after=10)
    board.tell(0, 7)
    board.wait(11)
    assert board.told() == [(False, 0, 10.0, 1)]
    board.join("b", stall_after=0)
    board.wait(1000)
    assert board.told() == [(True, 0, 11.0, 1)]
    assert board.board.progress_of(RUN, 1, board.now).stall_after is None
    board.join("c")
    board.wait(31)
    assert [over for over, *_ in board.told()] == [False]
    assert board.board.progress_of(RUN, 1, board.now).stall_after == STALL_AFTER


def test_a_service_that_never_reports_does_so_only_when_asked() -> None:
    """The service's own setting is None."""
    board = Board(stall_after=None)
    board.join()
    board.tell(0, 7)
    board.wait(10_000)
    assert board.told() == []
    board.join("b", stall_after=60)
    board.wait(1)
    assert [over for over, *_ in board.told()] == [False]


def test_removed_workers_have_no_progress(board: Board) -> None:
    """Workers are cleared, or missing in their node's next stream. With the last of them, the stall is over."""
    board.join()
    for worker in range(3):
        board.tell(worker, 7 + worker)
    board.board.clear(RUN, "a", "0@1", board.now)
    board.board.clear(RUN, "a", "unknown", board.now)
    board.board.clear("unknown", "a", "0@1", board.now)
    assert board.board.progress_of(RUN, 10, board.now).lowest_step == 8
    board.board.subscribe(RUN, "a", None, board.now)
    board.tell(2, 9)
    board.board.registered(RUN, "a", board.now)
    assert board.board.progress_of(RUN, 10, board.now).workers == 1
    board.wait(61)
    board.board.clear(RUN, "a", "2@1", board.now)
    board.wait(100)
    assert [over for over, *_ in board.told()] == [False, True]
    assert board.board.progress_of(RUN, 10, board.now).workers == len(board.board) == 0


def test_a_node_that_does_not_come_back_is_forgotten(board: Board) -> None:
    """It goes after the retention, together with its run if that was its last node."""
    board.join_two(1, 2)
    for node_id in ("a", "b"):
        board.board.unsubscribe(RUN, node_id, board.now)
    board.wait(3599)
    assert board.board.progress_of(RUN, 10, board.now).workers == 2
    board.wait(2)
    assert len(board.board) == 0
    assert board.board._runs == {}
    assert board.board.next_due() is None


def test_a_lost_node_is_not_taken_for_the_one_that_is_behind(board: Board) -> None:
    """It counts for a short time, in which only its agent may be away."""
    board.join_two(7, 8)
    board.board.unsubscribe(RUN, "a", board.now)
    board.wait(29)
    assert board.board.progress_of(RUN, 10, board.now).workers == 2
    board.join("a")
    board.tell(0, 7)
    board.board.unsubscribe(RUN, "a", board.now)
    board.wait(29)
    assert board.board.progress_of(RUN, 10, board.now).workers == 2
    board.wait(40)
    assert [each.rank for each in board.board.progress_of(RUN, 10, board.now).slowest] == [1]
    assert board.told() == [(False, 1, STALL_AFTER, 1)]


def test_a_node_lost_while_all_were_away_is_dropped_once_another_is_back(board: Board) -> None:
    """Until then, the last known data is better than none."""
    board.join_two(7, 8)
    for node_id in ("a", "b"):
        board.board.unsubscribe(RUN, node_id, board.now)
    board.wait(1000)
    assert board.board.progress_of(RUN, 10, board.now).workers == 2
    board.join("b")
    board.tell(1, 9, node_id="b")
    board.wait(31)
    assert [each.rank for each in board.board.progress_of(RUN, 10, board.now).slowest] == [1]


def test_a_worker_cleared_while_its_agent_is_away_takes_its_node_along(board: Board) -> None:
    """Nothing is left of a run without data."""
    board.join()
    board.tell(0, 1)
    board.board.unsubscribe(RUN, "a", board.now)
    board.board.clear(RUN, "a", "0@1", board.now)
    assert board.board._runs == {}
    assert board.board.next_due() is None


def test_the_number_of_workers_is_bounded() -> None:
    """Workers per run and in all are limited; known ones go on."""
    board = Board(max_workers_per_run=3, max_workers=4)
    board.join()
    assert [board.tell(worker, 1) for worker in range(5)] == [True] * 3 + [False] * 2
    assert board.tell(2, 5)
    board.board.subscribe("other", "a", None, board.now)
    told = [
        board.board.report("other", "a", f"{rank}@1", board.now, rank=rank, step=1, elapsed=0)
        for rank in range(3)
    ]
    assert told == [True, False, False]
    assert len(board.board) == 4


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("worker_id", {"worker_id": ""}),
        ("worker_id", {"worker_id": "ü" * 129}),
        ("rank", {"rank": -1}),
        ("elapsed", {"elapsed": -0.1}),
        ("elapsed", {"elapsed": MAX_AFTER * 2}),
        ("elapsed", {"elapsed": float("nan")}),
    ],
)
def test_a_malformed_report_is_refused_and_changes_nothing(
    board: Board, field: str, changes: dict[str, object]
) -> None:
    """The error has the field's name."""
    board.join()
    arguments: dict[str, object] = {"worker_id": "w", "rank": 0, "elapsed": 0.0, **changes}
    worker_id = str(arguments.pop("worker_id"))
    with pytest.raises(InvalidField) as caught:
        board.board.report(RUN, "a", worker_id, board.now, step=1, **arguments)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert len(board.board) == 0


def test_many_runs_that_stall_at_once_are_judged_in_portions() -> None:
    """The event loop runs in between; all are reported in the end."""
    board = ProgressBoard(ProgressSettings(stall_after=1.0))
    for run in range(30):
        board.subscribe(f"run-{run}", "a", None, 0.0)
        for rank in range(5000):
            board.report(f"run-{run}", "a", f"{rank}@1", 0.0, rank=rank, step=1, elapsed=0.0)
        board.registered(f"run-{run}", "a", 0.0)
    portions = []
    while (due := board.next_due()) is not None and due <= 2.0:
        board.judge(2.0)
        portions.append(len(board.take_new_stalls()))
    assert sum(portions) == 30
    assert max(portions) < 30


def test_an_update_costs_the_same_however_many_workers_there_are() -> None:
    """Advancing does not touch the queue of judgements, which holds one entry for the run."""
    board = Board()
    board.join()
    for worker in range(2000):
        board.tell(worker, 1)
    scheduled = board.board._queue._serial
    for step in range(2, 10):
        for worker in range(2000):
            board.tell(worker, step)
    assert len(board.board._queue) == 1
    assert board.board._queue._serial == scheduled


@pytest.mark.parametrize("seed", range(200))
def test_any_history_is_judged_as_a_simple_model_would(seed: int) -> None:
    """The model looks at every worker at every moment; the board must report the same at the same time."""
    dice = random.Random(seed)
    board = Board(stall_after=50.0)
    nodes = ["a", "b"]
    for node in nodes:
        board.join(node)
    model: dict[tuple[str, int], tuple[int, float]] = {}
    advanced, stalls = 0.0, False
    # All agents are always subscribed, so the wait for the others is over after 30 s.
    for _ in range(150):
        node, worker = dice.choice(nodes), dice.randrange(3)
        match dice.choice(["tell", "tell", "clear", "wait", "long"]):
            case "tell":
                step = dice.randrange(4)
                if not model:
                    advanced = board.now
                if model.get((node, worker), (None, 0))[0] != step:
                    model[node, worker] = (step, board.now)
                    advanced = board.now
                board.tell(worker, step, node_id=node)
            case "clear":
                model.pop((node, worker), None)
                board.board.clear(RUN, node, f"{worker}@1", board.now)
            case "wait":
                board.wait(dice.uniform(0, 20))
            case "long":
                board.wait(dice.uniform(30, 90))
        board.wait(0)
        expected = bool(model) and board.now - advanced >= 50.0
        stall = board.board.stall_of(RUN, board.now)
        assert (stall is not None) == expected
        if stall is not None:
            order = min((step, since, worker) for (_, worker), (step, since) in model.items())
            assert (stall.first.step, round(board.now - stall.first.idle, 3)) == (
                order[0],
                round(order[1], 3),
            )
        told = [over for over, *_ in board.told()]
        for over in told:
            assert over == stalls
            stalls = not over
        assert stalls == expected
