"""Every response fits a message, however many runs and nodes there are, and however long their names are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import Any, TypeVar, cast

import pytest

from rallypoint.rendezvous.api import requests
from rallypoint.rendezvous.api.requests import TRACEBACK_BYTES, NodesPage, RunsPage
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.core.decide import carry_out
from rallypoint.rendezvous.core.failures import MOST_EVICTED
from rallypoint.rendezvous.core.state import Outcome, ReportedFailure, RunEnd, RunSettings, RunState
from rallypoint.rendezvous.runs.run import NODES_PER_MESSAGE, run_message, run_summary
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.channel import MAX_MESSAGE_BYTES
from rallypoint.rpc.errors import ServiceError
from rallypoint.serving.requests import NAME_BYTES, PATH_BYTES, SENTENCE_BYTES

T = TypeVar("T")

SETTINGS = RunSettings(min_nodes=1, max_nodes=100_000)


def run_of(nodes: int, long: bool = False) -> RunState:
    """Return a run that nodes have joined; `long`: with the longest names allowed."""

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
            supervisor_address=name("10.0.0.1:29420"),
        )
        carry_out(state, node, 0.0)
    return state


def runs_named(*names: str) -> list[RunState]:
    """Return runs without nodes."""
    return [RunState(name, settings=SETTINGS) for name in names]


def listed(runs: list[RunState], page_size: int) -> list[list[str]]:
    """Return the names on each page."""
    pages, token = [], ""
    while True:
        response = RunsPage(pb.ListRunsRequest(page_size=page_size, page_token=token)).of(runs)
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
    """A run that exists all the time is listed once."""
    first = RunsPage(pb.ListRunsRequest(page_size=2)).of(runs_named("b", "c", "d", "e"))
    assert [run.run_id for run in first.runs] == ["b", "c"]
    request = pb.ListRunsRequest(page_size=2, page_token=first.next_page_token)
    second = RunsPage(request).of(runs_named("a", "d", "e"))
    assert ([run.run_id for run in second.runs], second.next_page_token) == (["d", "e"], "")


def test_a_page_of_runs_with_long_failures_fits_a_message() -> None:
    """The page then has fewer runs, and the others follow."""
    failure = ReportedFailure(
        *(1, 0, 0, "r" * NAME_BYTES, "n" * NAME_BYTES, "h" * NAME_BYTES, 1, 1, 1.7e9),
        *("m" * SENTENCE_BYTES, "t" * TRACEBACK_BYTES, "f" * PATH_BYTES),
    )
    end = RunEnd(Outcome.FAILED, "d" * SENTENCE_BYTES, failure)
    runs = [replace(run, run_end=end) for run in runs_named(*(f"run-{number:04}" for number in range(1_000)))]
    response = RunsPage(pb.ListRunsRequest(page_size=1_000)).of(runs)
    assert 100 < len(response.runs) < 1_000
    assert response.ByteSize() < MAX_MESSAGE_BYTES
    assert sum(len(page) for page in listed(runs, 1_000)) == 1_000


def test_the_nodes_of_a_large_run_come_a_page_at_a_time() -> None:
    """All nodes, each once, in the order of a single message."""
    state = run_of(5_000)
    names, token, pages = [], "", 0
    while True:
        response = NodesPage(pb.ListNodesRequest(page_token=token)).read(state)
        names += [node.node_id for node in response.nodes]
        assert response.revision == state.revision
        token, pages = response.next_page_token, pages + 1
        if not token:
            break
    assert pages == 3
    assert names == [node.node_id for node in run_message(state).nodes]
    assert len(set(names)) == 5_000


def test_the_largest_page_with_the_longest_names_fits_a_message() -> None:
    """Also with an evicted node."""
    state = run_of(NODES_PER_MESSAGE + 1, long=True)
    carry_out(state, commands.Evict("x" * NAME_BYTES, "why"), 0.0)
    page = NodesPage(pb.ListNodesRequest()).read(state)
    assert (len(page.nodes), bool(page.next_page_token)) == (NODES_PER_MESSAGE, True)
    run = run_message(state, NODES_PER_MESSAGE)
    assert (list(run.nodes), list(run.evicted_node_ids)) == (list(page.nodes), ["x" * NAME_BYTES])
    assert run.ByteSize() < MAX_MESSAGE_BYTES


def test_nodes_that_do_not_fit_a_message_come_on_the_next_page() -> None:
    """Each may have a sentence about its watchdog, and the run the largest number of evicted nodes."""
    state = run_of(NODES_PER_MESSAGE, long=True)
    for node in state.nodes.values():
        node.watchdog_trouble = "x" * SENTENCE_BYTES
    for number in range(MOST_EVICTED):
        carry_out(state, commands.Evict(f"{number}".ljust(NAME_BYTES, "x"), "why"), 0.0)
    run = run_message(state, NODES_PER_MESSAGE)
    assert len(run.evicted_node_ids) == MOST_EVICTED
    assert 1_000 < len(run.nodes) < run.node_count == NODES_PER_MESSAGE
    assert run.ByteSize() < MAX_MESSAGE_BYTES
    names, request = [], pb.ListNodesRequest()
    while True:
        page = NodesPage(request).read(state)
        assert page.ByteSize() < MAX_MESSAGE_BYTES
        names += [node.node_id for node in page.nodes]
        request.page_token = page.next_page_token
        if not request.page_token:
            break
    assert names == list(state.nodes)


@pytest.mark.parametrize("page", [RunsPage, NodesPage])
@pytest.mark.parametrize(
    ("request_", "told"),
    [
        ({"page_size": -1}, "page_size: must be at least 0, not -1"),
        ({"page_token": "-1"}, "page_token: must be the next_page_token"),
        ({"page_token": "٣"}, "page_token: must be the next_page_token"),
        ({"page_token": "9" * 50_000}, "page_token: must be the next_page_token"),
    ],
)
def test_an_impossible_page_is_refused(page: Any, request_: dict[str, Any], told: str) -> None:
    """The error names the field and the expected value."""
    kind = pb.ListRunsRequest if page is RunsPage else pb.ListNodesRequest
    with pytest.raises(ServiceError, match=told):
        page(kind(**request_))


def test_a_larger_page_size_returns_the_largest_page() -> None:
    """In all lists alike."""
    nodes = NodesPage(pb.ListNodesRequest(page_size=10**6)).read(run_of(NODES_PER_MESSAGE + 1))
    assert (len(nodes.nodes), bool(nodes.next_page_token)) == (NODES_PER_MESSAGE, True)
    runs = RunsPage(pb.ListRunsRequest(page_size=10**6)).of(runs_named(*map(str, range(1_001))))
    assert (len(runs.runs), bool(runs.next_page_token)) == (1_000, True)


@pytest.mark.parametrize(
    ("filter_", "names"),
    [
        ({"node_ids": ["node-00001", "none"]}, ["node-00001"]),
        ({"states": [pb.NODE_STATE_WAITING]}, ["node-00000", "node-00001", "node-00002"]),
        ({"states": [pb.NODE_STATE_RUNNING]}, []),
        ({"connected": False}, ["node-00002"]),
        ({"connected": True, "node_ids": ["node-00001", "node-00002"]}, ["node-00001"]),
    ],
)
def test_nodes_that_match_a_filter_are_listed(filter_: dict[str, Any], names: list[str]) -> None:
    """Page by page, with the requested page size."""
    state = run_of(3)
    state.nodes["node-00002"].broken_at = 0.0
    for size in (1, 2_000):
        found, token = [], ""
        while True:
            request = pb.ListNodesRequest(filter=pb.NodeFilter(**filter_), page_size=size, page_token=token)
            page = NodesPage(request).read(state)
            found += [node.node_id for node in page.nodes]
            token = page.next_page_token
            if not token:
                break
        assert found == names


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["a"] * 1_001, "must have at most 1000 entries"),
        (["a", "x" * 257], "must have at most 256 bytes, not 257"),
        ([""], "must not be empty"),
    ],
)
def test_a_filter_with_invalid_or_too_many_names_is_refused(names: list[str], told: str) -> None:
    wanted = pb.NodeFilter(node_ids=names)
    with pytest.raises(ServiceError, match=rf"filter\.node_ids: {told}"):
        NodesPage(pb.ListNodesRequest(filter=wanted))


def test_a_page_past_the_end_is_empty() -> None:
    """Nodes may have left since the previous page."""
    first = NodesPage(pb.ListNodesRequest(page_size=3)).read(run_of(4))
    page = NodesPage(pb.ListNodesRequest(page_token=first.next_page_token)).read(run_of(3))
    assert (len(page.nodes), page.next_page_token) == (0, "")


# ---- runs of several readers


class Reader:
    """Some of the runs; `vanish` is called after each read of them."""

    def __init__(
        self, runs: list[RunState], vanish: Callable[[list[RunState]], None] = lambda _: None
    ) -> None:
        self.runs = runs
        self._vanish = vanish

    async def read_runs(self, view: Callable[[Iterable[RunState]], T]) -> T:
        answer = view(self.runs)
        self._vanish(self.runs)
        return answer


async def pages_of(readers: Sequence[Reader], page_size: int) -> list[pb.ListRunsResponse]:
    pages, token = [], ""
    while True:
        request = pb.ListRunsRequest(page_size=page_size, page_token=token)
        pages.append(await RunsPage(request).read(cast(Any, readers)))
        assert not pages[-1].next_page_token or pages[-1].next_page_token != token, "it gets on"
        token = pages[-1].next_page_token
        if not token:
            return pages


@pytest.mark.parametrize("seed", range(10))
async def test_runs_of_many_readers_are_listed_as_if_they_were_one_readers(seed: int) -> None:
    """However they are spread, the pages are the same, unless pages end early because runs are large."""
    draw = Random(seed)
    runs = runs_named(*(f"run-{number:03}" for number in range(draw.randrange(60))))
    large = seed % 2 == 1
    for run in draw.sample(runs, len(runs) // 2 if large else 0):
        run.run_end = RunEnd(Outcome.FAILED, "x" * 400_000)  # seven of them fill a page
    readers = [Reader([]) for _ in range(draw.randrange(2, 9))]
    for run in draw.sample(runs, len(runs)):
        draw.choice(readers).runs.append(run)
    page_size = draw.randrange(1, 20)
    listed_ = await pages_of(readers, page_size)
    assert [run.run_id for page in listed_ for run in page.runs] == [run.run_id for run in runs]
    if not large:
        assert listed_ == await pages_of([Reader(runs)], page_size)
    assert all(page.ByteSize() <= MAX_MESSAGE_BYTES for page in listed_)
    assert all(page.runs for page in listed_[1:])


async def test_a_run_that_does_not_fit_comes_on_the_next_page() -> None:
    """Its next run comes on the next page, although later runs of another reader would have fitted into this one."""
    runs = runs_named(*(f"run-{number:03}" for number in range(40)))
    for run in runs[::2]:
        run.run_end = RunEnd(Outcome.FAILED, "x" * 400_000)
    pages = await pages_of([Reader(runs[::2]), Reader(runs[1::2])], 50)
    assert [run.run_id for page in pages for run in page.runs] == [run.run_id for run in runs]


async def test_runs_that_vanish_in_between_hide_no_others() -> None:
    """Runs that expire between two reads do not hide the runs that remain."""
    draw = Random(1)
    names = [f"run-{number:03}" for number in range(100)]
    stay = set(names[::3])

    def vanish(runs: list[RunState]) -> None:
        gone = [run for run in runs if run.run_id not in stay]
        for run in gone[: draw.randrange(4)]:
            runs.remove(run)

    readers = [Reader(runs_named(*names[first::5]), vanish) for first in range(5)]
    listed_ = [run.run_id for page in await pages_of(readers, 7) for run in page.runs]
    assert stay <= set(listed_)
    assert listed_ == sorted(set(listed_))


async def test_readers_are_not_asked_for_more_summaries_than_the_page_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A summary takes a thousand times as long as a name."""
    made: list[str] = []

    def summary(state: RunState) -> pb.Run:
        made.append(state.run_id)
        return run_summary(state)

    monkeypatch.setattr(requests, "run_summary", summary)
    readers = [Reader(runs_named(*(f"run-{number}{first}" for number in range(10)))) for first in range(8)]
    page = await RunsPage(pb.ListRunsRequest(page_size=5)).read(cast(Any, readers))
    assert [run.run_id for run in page.runs] == ["run-00", "run-01", "run-02", "run-03", "run-04"]
    assert len(made) == 6
