"""WatchEvents over real gRPC: all events, in order and once, also for slow and late watchers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from rallypoint.rendezvous.api import event_pages
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.core.commands import SERVICE
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.serving import flow
from rendezvous.engine_fixtures import RUN
from rendezvous.event_fixtures import BEGINNING, Served, Watch, kinds, revisions, serving_events
from support.waiting import PATIENCE

Code = grpc.StatusCode


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """The service."""
    async with serving_events() as served:
        yield served


async def test_a_watcher_receives_all_from_the_beginning(served: Served) -> None:
    """It receives the past events, then the new ones, until the run is closed."""
    watch = served.watch()
    assert kinds(await watch.until(7)) == BEGINNING
    await served.note(2)
    assert kinds(await watch.until(9)) == ["NODE_EVICTED", "NODE_READMITTED"]
    await served.stage.engine.close_run(RUN, "enough", SERVICE)
    events, error = await watch.ended()
    assert kinds(events) == ["RUN_CLOSED"]
    assert events[0].run_end.detail == "closed by an operator: enough"
    assert error is None


async def test_a_watcher_that_comes_back_receives_the_missed_events(served: Served) -> None:
    """It receives each event once; of a closed run the rest, then the end."""
    watch = served.watch()
    await watch.until(7)
    watch.call.cancel()
    await served.note(2)
    again = served.watch(7)
    assert revisions(await again.until(9)) == [8, 9]
    again.call.cancel()
    await served.note(1)
    await served.stage.engine.close_run(RUN, "enough")
    events, error = await served.watch(9).ended()
    assert (kinds(events), error) == (["NODE_EVICTED", "RUN_CLOSED"], None)
    assert await served.watch(served.latest()).ended() == ([], None)


async def test_the_first_message_comes_at_once(served: Served) -> None:
    """So a watcher knows that its stream is open, also if there are no events."""
    for watch in (served.watch(7), served.watch(node_ids=["nobody"])):
        first = await watch.hear()
        assert (list(first.events), first.revision) == ([], 7)
        watch.call.cancel()


async def test_a_watcher_without_matching_events_receives_its_revision(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets a message now and then, so that the revision to resume from is still kept."""
    monkeypatch.setattr(event_pages, "_MOST_UNREPORTED", 3)
    watch = served.watch(node_ids=["nobody"])
    assert (await watch.hear()).revision == 7
    await served.note(2)
    await served.note(2)
    told = await watch.hear()
    assert (list(told.events), told.revision >= 10) == ([], True)


async def test_a_watcher_receives_only_events_of_its_filter(served: Served) -> None:
    """Every message has the revision that the watcher has reached."""
    watch = served.watch(kinds=[pb.EVENT_KIND_NODE_READMITTED])
    assert (await watch.hear()).revision == 7
    await served.note(4)
    assert revisions(await watch.until(11)) == [9, 11]


async def test_nothing_is_published_before_it_is_durable(served: Served) -> None:
    """It is neither sent to a watcher nor listed in a page."""
    watch = served.watch(7)
    await watch.hear()
    served.stage.journal.hold()
    noting = asyncio.create_task(served.note(1))
    await served.stage.journal.held()
    reading = asyncio.create_task(watch.hear())
    done, _ = await asyncio.wait([reading], timeout=0.1)
    assert not done
    assert len((await served.list()).events) == 7
    served.stage.journal.release()
    assert revisions(list((await reading).events)) == [8]
    await noting


async def test_a_cursor_that_was_never_given_out_is_refused(served: Served) -> None:
    """It belongs to another service, or to one that lost its journal."""
    _, error = await served.watch(8).ended()
    assert error is not None
    assert (error.code, error.reason) == (Code.OUT_OF_RANGE, "REVISION_AHEAD")
    assert error.metadata["current"] == "7"


async def test_a_cursor_that_is_gone_is_refused(served: Served) -> None:
    """The error has the oldest revision that is left; a watch from 0 begins there."""
    await served.note(300)
    _, error = await served.watch(7).ended()
    assert error is not None
    assert (error.code, error.reason) == (Code.OUT_OF_RANGE, "EVENTS_COMPACTED")
    oldest = int(error.metadata["oldest_revision"])
    assert oldest == served.latest() - 199
    events = await served.watch().until(served.latest())
    assert revisions(events) == list(range(oldest, served.latest() + 1))
    assert revisions(await served.watch(oldest - 1).until(served.latest())) == revisions(events)


async def test_watchers_are_limited_and_their_places_come_free(served: Served) -> None:
    """Past the limit a watcher is refused for now. A watcher that ends makes room."""
    watches = [served.watch() for _ in range(3)]
    for watch in watches:
        await watch.hear()
    _, error = await served.watch().ended()
    assert error is not None
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_SUBSCRIBERS")
    assert error.retry_after is not None
    watches[0].call.cancel()
    async with asyncio.timeout(PATIENCE):
        while len(served.stage.engine._runs[RUN].followers) == 3:  # noqa: ASYNC110 (no event)
            await asyncio.sleep(0.01)
    assert await served.watch().hear()


async def test_a_draining_server_lets_its_watchers_go(served: Served) -> None:
    """They can resume with their cursor, at any replica; newcomers are refused."""
    watch = served.watch()
    await watch.until(7)
    await served.servicer.drain()
    for stream in (watch, served.watch()):
        _, error = await stream.ended()
        assert error is not None
        assert (error.code, error.reason) == (Code.UNAVAILABLE, "DRAINING")


async def test_a_watcher_that_reads_nothing_is_ended_and_holds_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are not delayed by it, and it receives the events that it missed when it resumes."""
    monkeypatch.setattr(flow, "WRITE_TIMEOUT", 3.0)  # a busy machine reads late too
    history = served.stage.engine.history(RUN)
    history._most_events, history._most_bytes = 10**9, 10**9
    # Windows that don't grow: the transport takes little before a write waits.
    small = {
        "grpc.http2.bdp_probe": 0,
        "grpc.http2.lookahead_bytes": 16_384,
        "grpc.max_receive_message_length": -1,
    }
    request = pb.WatchEventsRequest(run_id=RUN)
    slow = Watch(served.stub(**small).WatchEvents(request, timeout=PATIENCE))
    first = await slow.hear()
    brisk = served.watch(first.revision)
    for number in range(400):
        reason = f"{number} " + "x" * 1_000
        for command in (commands.Evict("elsewhere", reason), commands.Readmit("elsewhere", reason)):
            await served.stage.engine.execute(RUN, command)
    assert (await brisk.until(served.latest()))[-1].revision == served.latest()
    async with asyncio.timeout(PATIENCE):
        while len(served.stage.engine._runs[RUN].followers) == 2:  # noqa: ASYNC110 (no event)
            await asyncio.sleep(0.01)
    _, error = await slow.ended()
    assert error is not None
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "SUBSCRIBER_TOO_SLOW")
    missed = await served.watch(first.revision).until(served.latest())
    assert revisions(missed) == list(range(first.revision + 1, served.latest() + 1))
