"""However many runs there are, however many nodes, and however long their names: every answer fits a message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.core.execute import carry_out
from rallypoint.rendezvous.core.state import Outcome, RunEnd, RunSettings, RunState, WorkerFailure
from rallypoint.rendezvous.requests import TRACEBACK_BYTES
from rallypoint.rendezvous.run_pages import check_list_runs, first_node, nodes_page, runs_page
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.views import NODES_PER_MESSAGE, run_message
from rallypoint.serving.channel import MAX_MESSAGE_BYTES
from rallypoint.serving.errors import ServiceError
from rallypoint.serving.fields import NAME_BYTES, PATH_BYTES, SENTENCE_BYTES

SETTINGS = RunSettings(min_nodes=1, max_nodes=100_000)


def run_of(nodes: int, long: bool = False) -> RunState:
    """A run that nodes have joined; `long`: with the longest names that there may be."""

    def name(text: str) -> str:
        return text.ljust(NAME_BYTES, "x") if long else text

    state = RunState(name("run"))
    for number in range(nodes):
        node = commands.Join(
            node_id=name(f"node-{number:05}"),
            settings=SETTINGS,
            address=name("10.0.0.1"),
            local_world_size=8,
            role=name("trainer"),
            topology=name("rack1"),
        )
        carry_out(state, node, 0.0)
    return state


def runs_named(*names: str) -> list[RunState]:
    """Runs without nodes."""
    return [RunState(name, settings=SETTINGS) for name in names]


def listed(runs: list[RunState], page_size: int) -> list[list[str]]:
    """The names on each page."""
    pages, token = [], ""
    while True:
        response = runs_page(pb.ListRunsRequest(page_size=page_size, page_token=token), runs)
        pages.append([run.run_id for run in response.runs])
        token = response.next_page_token
        if not token:
            return pages


def test_runs_are_listed_by_name_a_page_at_a_time() -> None:
    """Every run once, and no empty page at the end."""
    runs = runs_named("c", "a", "e", "b", "d", "f")
    assert listed(runs, 4) == [["a", "b", "c", "d"], ["e", "f"]]
    assert listed(runs, 3) == [["a", "b", "c"], ["d", "e", "f"]]
    assert listed([], 3) == [[]]


def test_runs_that_come_and_go_between_pages_shift_no_other() -> None:
    """What is there all the time is seen once."""
    first = runs_page(pb.ListRunsRequest(page_size=2), runs_named("b", "c", "d", "e"))
    assert [run.run_id for run in first.runs] == ["b", "c"]
    second = runs_page(
        pb.ListRunsRequest(page_size=2, page_token=first.next_page_token), runs_named("a", "d", "e")
    )
    assert ([run.run_id for run in second.runs], second.next_page_token) == (["d", "e"], "")


def test_a_page_of_runs_with_long_failures_fits_a_message() -> None:
    """It has fewer of them then, and the others follow."""
    failure = WorkerFailure(
        *(1, 0, 0, "r" * NAME_BYTES, "n" * NAME_BYTES, "h" * NAME_BYTES, 1, 1, 1.7e9),
        *("m" * SENTENCE_BYTES, "t" * TRACEBACK_BYTES, "f" * PATH_BYTES),
    )
    end = RunEnd(Outcome.FAILED, "d" * SENTENCE_BYTES, failure)
    runs = [replace(run, run_end=end) for run in runs_named(*(f"run-{number:04}" for number in range(1_000)))]
    response = runs_page(pb.ListRunsRequest(page_size=1_000), runs)
    assert 100 < len(response.runs) < 1_000
    assert response.ByteSize() < MAX_MESSAGE_BYTES
    assert sum(len(page) for page in listed(runs, 1_000)) == 1_000


def test_the_nodes_of_a_large_run_come_a_page_at_a_time() -> None:
    """All of them, each once, in the order that one message would have them in."""
    state = run_of(5_000)
    names, token, pages = [], "", 0
    while True:
        request = pb.GetRunRequest(page_token=token)
        response = nodes_page(request, state, first_node(request))
        names += [node.node_id for node in response.run.nodes]
        assert (response.run.node_count, response.run.revision) == (5_000, state.revision)
        token, pages = response.next_page_token, pages + 1
        if not token:
            break
    assert pages == 3
    assert names == [node.node_id for node in run_message(state).nodes]
    assert len(set(names)) == 5_000


def test_the_largest_page_with_the_longest_names_fits_a_message() -> None:
    """Whoever joined."""
    state = run_of(NODES_PER_MESSAGE + 1, long=True)
    carry_out(state, commands.Evict("x" * NAME_BYTES, "why"), 0.0)
    page = nodes_page(pb.GetRunRequest(), state, 0)
    assert (len(page.run.nodes), bool(page.next_page_token)) == (NODES_PER_MESSAGE, True)
    assert page.ByteSize() < MAX_MESSAGE_BYTES
    assert list(page.run.evicted_node_ids) == ["x" * NAME_BYTES]
    assert not nodes_page(pb.GetRunRequest(), state, NODES_PER_MESSAGE).run.evicted_node_ids


@pytest.mark.parametrize("size", [-1, 1_001])
def test_a_page_of_runs_that_can_not_be_is_refused(size: int) -> None:
    """Naming the field."""
    with pytest.raises(ServiceError, match="page_size: must be from 0 to 1000"):
        check_list_runs(pb.ListRunsRequest(page_size=size))


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        (pb.GetRunRequest(page_size=-1), "page_size: must be from 0 to 2000"),
        (pb.GetRunRequest(page_size=2_001), "page_size: must be from 0 to 2000"),
        (pb.GetRunRequest(page_token="-1"), "page_token: must be the next_page_token"),  # noqa: S106
        (pb.GetRunRequest(page_token="٣"), "page_token: must be the next_page_token"),  # noqa: S106
        (pb.GetRunRequest(page_token="9" * 5_000), "page_token: must be the next_page_token"),
    ],
)
def test_a_page_of_nodes_that_can_not_be_is_refused(request_: pb.GetRunRequest, told: str) -> None:
    """Naming the field, and what is expected in it."""
    with pytest.raises(ServiceError, match=told):
        first_node(request_)


def test_a_page_past_the_end_is_empty() -> None:
    """Nodes may have left since the page before."""
    page = nodes_page(pb.GetRunRequest(), run_of(3), 100)
    assert (len(page.run.nodes), page.run.node_count, page.next_page_token) == (0, 3, "")
