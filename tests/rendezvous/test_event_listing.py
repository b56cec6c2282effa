"""ListEvents over real gRPC: all events, in order, a page at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from rallypoint.rendezvous.core import facts
from rallypoint.rendezvous.core.commands import SERVICE
from rallypoint.rendezvous.core.state import ReportedFailure
from rallypoint.rendezvous.journal.codec import encode_record
from rallypoint.rendezvous.journal.journal import Record
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rendezvous.engine_fixtures import RUN
from rendezvous.event_fixtures import BEGINNING, Served, kinds, revisions, serving_events
from support.refusals import refusal
from support.waiting import PATIENCE

Code = grpc.StatusCode


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """The service."""
    async with serving_events() as served:
        yield served


async def test_events_are_listed_in_order_with_their_actors(served: Served) -> None:
    """The failure, the end of the round and the next round are listed in order, with their actors."""
    members = list(served.stage.engine._runs[RUN].members.values())
    await served.stage.fail(members[1], 1)
    response = await served.list()
    events = list(response.events)
    assert kinds(events) == [*BEGINNING, "WORKER_FAILED", "ROUND_ENDED", "ROUND_FROZEN"]
    assert (response.next_page_token, response.oldest_revision) == ("", 1)
    assert revisions(events) == list(range(1, 11))
    assert [event.actor.name for event in events[:4]] == ["a", "a", "b", ""]
    failed, ended = events[7:9]
    assert (failed.node_id, failed.failure.message) == ("b", "it broke")
    assert ended.detail == "round 1 ended: worker of rank 0 on node b failed: it broke (restart 1 of 3)"
    assert ended.round_end.cause == pb.ROUND_END_CAUSE_WORKER_FAILED


async def test_pages_lead_from_one_to_the_next(served: Served) -> None:
    """This holds in both directions, also if events are added meanwhile."""
    up = await served.list(page_size=3)
    down = await served.list(page_size=3, newest_first=True)
    await served.note(1)
    seen_up, seen_down = list(up.events), list(down.events)
    while up.next_page_token:
        up = await served.list(page_size=3, page_token=up.next_page_token)
        seen_up += up.events
    while down.next_page_token:
        down = await served.list(page_size=3, page_token=down.next_page_token, newest_first=True)
        seen_down += down.events
    assert revisions(seen_up) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert revisions(seen_down) == [7, 6, 5, 4, 3, 2, 1]


async def test_only_events_of_the_filter_are_listed(served: Served) -> None:
    """Events are filtered by node, kind, round and time."""

    async def listed(**filter_: Any) -> list[int]:
        return revisions(list((await served.list(filter=pb.EventFilter(**filter_))).events))

    assert await listed(node_ids=["b"]) == [3, 6]
    assert await listed(kinds=[pb.EVENT_KIND_NODE_JOINED]) == [2, 3]
    assert await listed(rounds=[1], node_ids=["a"]) == [5]
    assert await listed(since=Timestamp(seconds=1_700_000_001)) == []
    assert len(await listed(until=Timestamp(seconds=1_700_000_001))) == 7


async def test_a_page_stays_within_the_message_limit_of_a_client(served: Served) -> None:
    """This holds for large failures too; the rest is on the next page."""
    history = served.stage.engine.history(RUN)
    history._most_events = history._most_bytes = 10**9
    failure = ReportedFailure(1, 0, 0, "t", "a", "h", 1, 1, 1.7e9, "it broke", "x" * 16_384, "")
    for revision in range(8, 308):
        content = encode_record(RUN, revision, facts.WorkerFailed(failure), 1.7e9, SERVICE)
        history.add(Record(RUN, revision, content))
    first = await served.list(page_size=10_000)
    rest = await served.list(page_size=10_000, page_token=first.next_page_token)
    assert first.next_page_token
    assert first.ByteSize() <= 3 * 1024 * 1024 + 100
    assert revisions([*first.events, *rest.events]) == list(range(1, 308))
    assert rest.next_page_token == ""


def ask(served: Served, request: pb.ListEventsRequest | pb.WatchEventsRequest) -> Awaitable[object]:
    """Ask for a page, or for the first message of a stream."""
    if isinstance(request, pb.ListEventsRequest):
        return served.stub().ListEvents(request, timeout=PATIENCE)
    return served.stub().WatchEvents(request, timeout=PATIENCE).read()


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("run_id", pb.ListEventsRequest()),
        ("page_size", pb.ListEventsRequest(run_id=RUN, page_size=-1)),
        ("page_token", pb.ListEventsRequest(run_id=RUN, page_token="7")),  # noqa: S106
        ("filter.rounds", pb.ListEventsRequest(run_id=RUN, filter=pb.EventFilter(rounds=[0]))),
        ("run_id", pb.WatchEventsRequest()),
        ("after_revision", pb.WatchEventsRequest(run_id=RUN, after_revision=-1)),
        ("filter.rounds", pb.WatchEventsRequest(run_id=RUN, filter=pb.EventFilter(rounds=[0]))),
    ],
)
async def test_a_bad_request_names_its_field(
    served: Served, field: str, bad: pb.ListEventsRequest | pb.WatchEventsRequest
) -> None:
    """The error is INVALID_ARGUMENT with a BadRequest."""
    error = await refusal(ask(served, bad))
    assert (error.code, [each for each, _ in error.field_violations]) == (Code.INVALID_ARGUMENT, [field])


async def test_a_page_that_is_gone_is_refused(served: Served) -> None:
    """The error has the oldest revision that is left; a new listing begins there."""
    token = (await served.list(page_size=3)).next_page_token
    down = (await served.list(page_size=3, newest_first=True)).next_page_token
    await served.note(300)
    for request in (
        pb.ListEventsRequest(run_id=RUN, page_token=token),
        pb.ListEventsRequest(run_id=RUN, page_token=down, newest_first=True),
    ):
        error = await refusal(served.stub().ListEvents(request, timeout=PATIENCE))
        assert (error.code, error.reason) == (Code.OUT_OF_RANGE, "EVENTS_COMPACTED")
        assert error.metadata == {"run_id": RUN, "oldest_revision": str(served.latest() - 199)}
    response = await served.list()
    assert response.oldest_revision == response.events[0].revision == served.latest() - 199


@pytest.mark.parametrize("method", ["ListEvents", "WatchEvents"])
async def test_a_run_that_is_not_there_has_no_events(served: Served, method: str) -> None:
    """The error is RUN_NOT_FOUND, also while the creation of the run is not durable yet."""
    request = getattr(pb, f"{method}Request")
    assert (await refusal(ask(served, request(run_id="nowhere")))).reason == "RUN_NOT_FOUND"
    served.stage.journal.hold()
    joining = asyncio.create_task(served.stage.join("x", run_id="new"))
    await served.stage.journal.held()
    assert (await refusal(ask(served, request(run_id="new")))).reason == "RUN_NOT_FOUND"
    served.stage.journal.release()
    await joining
    assert await served.stub().ListEvents(pb.ListEventsRequest(run_id="new"), timeout=PATIENCE)
