"""However many runs there are, however many nodes, and however long their names: every answer fits a message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import Any, TypeVar, cast

import pytest

from rallypoint.rendezvous.api import requests
from rallypoint.rendezvous.api.requests import (
    TRACEBACK_BYTES,
    check_list_runs,
    first_node,
    list_runs,
    nodes_page,
    runs_page,
)
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.core.decide import carry_out
from rallypoint.rendezvous.core.state import Outcome, ReportedFailure, RunEnd, RunSettings, RunState
from rallypoint.rendezvous.runs.run import NODES_PER_MESSAGE, run_message, run_summary
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.channel import MAX_MESSAGE_BYTES
from rallypoint.rpc.errors import ServiceError
from rallypoint.serving.requests import NAME_BYTES, PATH_BYTES, SENTENCE_BYTES

T = TypeVar("T")

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
    failure = ReportedFailure(
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


# ---- runs of several readers


class Reader:
    """Some of the runs; `vanish` is called between two looks at them."""

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
    """All pages."""
    pages, token = [], ""
    while True:
        request = pb.ListRunsRequest(page_size=page_size, page_token=token)
        pages.append(await list_runs(request, cast(Any, readers)))
        assert pages[-1].next_page_token > token or not pages[-1].next_page_token, "it gets on"
        token = pages[-1].next_page_token
        if not token:
            return pages


@pytest.mark.parametrize("seed", range(10))
async def test_runs_of_many_readers_are_listed_as_if_they_were_one_readers(seed: int) -> None:
    """However they are spread: page for page the same, unless some are so large that pages end for lack of room."""
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


async def test_what_one_reader_had_no_room_for_is_not_passed_over() -> None:
    """Its next run comes on the next page, though those of another that come later would have fitted into this one."""
    runs = runs_named(*(f"run-{number:03}" for number in range(40)))
    for run in runs[::2]:
        run.run_end = RunEnd(Outcome.FAILED, "x" * 400_000)
    pages = await pages_of([Reader(runs[::2]), Reader(runs[1::2])], 50)
    assert [run.run_id for page in pages for run in page.runs] == [run.run_id for run in runs]


async def test_runs_that_vanish_in_between_hide_no_others() -> None:
    """Whatever expires between two looks at the readers, what is left is listed."""
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
    """They take a thousand times as long as names."""
    made: list[str] = []

    def summary(state: RunState) -> pb.Run:
        made.append(state.run_id)
        return run_summary(state)

    monkeypatch.setattr(requests, "run_summary", summary)
    readers = [Reader(runs_named(*(f"run-{number}{first}" for number in range(10)))) for first in range(8)]
    page = await list_runs(pb.ListRunsRequest(page_size=5), cast(Any, readers))
    assert [run.run_id for run in page.runs] == ["run-00", "run-01", "run-02", "run-03", "run-04"]
    assert len(made) == 6
