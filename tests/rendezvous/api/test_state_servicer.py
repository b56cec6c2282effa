"""The contract of state_service.proto over real gRPC: every call, and every refusal with its reason."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from rallypoint.rendezvous.api import state_servicer
from rallypoint.rendezvous.base.limits import MAX_VALUE_BYTES, StateLimits
from rallypoint.rendezvous.core.commands import LeaseLost, RunIsClosed, RunNotFound
from rallypoint.rendezvous.core.state import Outcome
from rallypoint.rendezvous.state.service import FencedStateService
from rallypoint.rendezvous.v1 import state_service_pb2 as pb
from rallypoint.rendezvous.v1 import state_service_pb2_grpc as rpc
from rallypoint.rendezvous.v1.store_service_pb2 import StoreOperation, StoreWriter
from rallypoint.rpc.errors import decode
from rallypoint.serving import flow
from rallypoint.serving.server import Server
from rendezvous.state.state_fakes import RUN, TestJournal, channel_to, open_states, serving
from support.refusals import refusal
from support.waiting import PATIENCE

Code = grpc.StatusCode


def check_lease(run_id: str, node_id: str, lease: int, token: bytes) -> None:
    if run_id == "unknown":
        raise RunNotFound(run_id)
    if run_id == "closed":
        raise RunIsClosed(run_id, Outcome.SUCCEEDED, "done")
    if (node_id, lease) != ("node", 2):
        raise LeaseLost(run_id, node_id, lease, 2)


@dataclass
class Served:
    """The service on a server, and a stub that calls it."""

    stub: rpc.StateServiceAsyncStub
    server: Server
    states: FencedStateService
    journal: TestJournal


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    journal = TestJournal()
    states = open_states(journal, check_lease=check_lease, limits=StateLimits(states=3, watchers=1))
    path = f"{tmp_path}/state.sock"
    async with serving(states, path) as server, channel_to(path) as channel:
        yield Served(rpc.StateServiceStub(channel), server, states, journal)


async def test_every_row_of_the_table(served: Served) -> None:
    """The responses of GetState and SetState, field by field."""
    stub = served.stub
    assert await stub.GetState(pb.GetStateRequest(run_id=RUN)) == pb.GetStateResponse()
    for token in (b"", b"foreign"):
        nothing = await stub.SetState(pb.SetStateRequest(run_id=RUN, state=b"x", token=token))
        assert nothing == pb.SetStateResponse(has_set=False)
    won = await stub.SetState(pb.SetStateRequest(run_id=RUN, state=b"\x00\xff"))
    assert (won.current.state, won.has_set) == (b"\x00\xff", True)
    assert won.current.token
    assert (await stub.GetState(pb.GetStateRequest(run_id=RUN))).current == won.current
    for other in (None, b"", b"foreign", won.current.token[:-1], won.current.token + b"\x00", b"x" * 16_000):
        lost = await stub.SetState(pb.SetStateRequest(run_id=RUN, state=b"y", token=other))
        assert lost == pb.SetStateResponse(current=won.current, has_set=False)
    replaced = await stub.SetState(pb.SetStateRequest(run_id=RUN, state=b"", token=won.current.token))
    assert (replaced.current.state, replaced.has_set) == (b"", True)
    assert replaced.current.token != won.current.token
    late = await stub.SetState(pb.SetStateRequest(run_id=RUN, state=b"z", token=won.current.token))
    assert late == pb.SetStateResponse(current=replaced.current, has_set=False)


async def test_the_largest_state_goes_both_ways(served: Served) -> None:
    """With the longest run name, and every other field that a request may have."""
    run_id, state = "r" * 256, bytes(range(256)) * (MAX_VALUE_BYTES // 256)
    first = await served.stub.SetState(pb.SetStateRequest(run_id=run_id))
    won = await served.stub.SetState(
        pb.SetStateRequest(
            run_id=run_id,
            state=state,
            token=first.current.token,
            operation=StoreOperation(client_id="c" * 64, slot=65_535, sequence=2**63 - 1),
            writer=StoreWriter(node_id="node", lease=2),
        )
    )
    assert won.has_set
    assert (await served.stub.GetState(pb.GetStateRequest(run_id=run_id))).current.state == state
    watching = served.stub.WatchState(pb.WatchStateRequest(run_id=run_id))
    told = await watching.read()
    assert isinstance(told, pb.WatchStateResponse)
    assert told.current == won.current
    watching.cancel()


async def test_clients_whose_sets_lose_get_turns(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sets once more after the reply, and succeeds: otherwise 20 clients need some 200 sets."""
    monkeypatch.setattr(state_servicer, "_TURN", PATIENCE)
    monkeypatch.setattr(state_servicer, "_LONGEST_WAIT", PATIENCE)
    sets = 0

    async def take_part() -> None:
        nonlocal sets
        response = pb.SetStateResponse()
        while not response.has_set:
            sets += 1
            token = response.current.token if response.HasField("current") else None
            response = await served.stub.SetState(pb.SetStateRequest(run_id=RUN, state=b"x", token=token))

    await asyncio.gather(*(take_part() for _ in range(20)))
    assert sets == 1 + 2 * 19


@pytest.mark.parametrize("limit", ["_TURN", "_LONGEST_WAIT"])
async def test_no_client_waits_for_one_that_does_not_set(
    served: Served, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """A turn ends in time, and each client waits at most that long; also one that reads with `after_turns`."""
    for name in ("_TURN", "_LONGEST_WAIT"):
        monkeypatch.setattr(state_servicer, name, 0.2 if name == limit else 2 * PATIENCE)
    lost = pb.SetStateRequest(run_id=RUN, state=b"x", token=b"foreign")
    began = time.monotonic()
    async with asyncio.timeout(PATIENCE):
        for _ in range(3):
            assert await served.stub.SetState(lost) == pb.SetStateResponse()
        await served.stub.GetState(pb.GetStateRequest(run_id=RUN, after_turns=True))
    assert time.monotonic() - began > 0.59  # all but the first wait


async def test_malformed_requests_name_the_field(served: Served) -> None:
    too_large = pb.SetStateRequest(run_id=RUN, state=b"x" * (MAX_VALUE_BYTES + 1))
    all_bad = pb.SetStateRequest(run_id="a\nb", operation=StoreOperation(slot=65_536), writer=StoreWriter())
    of_operation = "operation.client_id operation.slot operation.sequence"
    for request, fields in (
        (too_large, "state"),
        (all_bad, f"run_id {of_operation} writer.node_id writer.lease"),
    ):
        error = await refusal(served.stub.SetState(request))
        assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
        assert " ".join(name for name, _ in error.field_violations) == fields
    assert (await refusal(served.stub.GetState(pb.GetStateRequest()))).code is Code.INVALID_ARGUMENT
    watching = served.stub.WatchState(pb.WatchStateRequest())
    assert (await refusal(watching.read())).code is Code.INVALID_ARGUMENT
    assert not served.journal.commits


@pytest.mark.parametrize(
    ("run_id", "lease", "code", "reason"),
    [
        (RUN, 1, Code.FAILED_PRECONDITION, "LEASE_LOST"),
        ("unknown", 2, Code.NOT_FOUND, "RUN_NOT_FOUND"),
        ("closed", 2, Code.FAILED_PRECONDITION, "RUN_CLOSED"),
    ],
)
async def test_a_writer_for_a_node_must_hold_its_lease(
    served: Served, run_id: str, lease: int, code: grpc.StatusCode, reason: str
) -> None:
    """A node that was superseded and doesn't know it yet changes nothing, even with the right token."""
    writer = StoreWriter(node_id="node", lease=lease)
    error = await refusal(served.stub.SetState(pb.SetStateRequest(run_id=run_id, writer=writer)))
    assert (error.code, error.reason) == (code, reason)
    assert not (await served.stub.GetState(pb.GetStateRequest(run_id=run_id))).HasField("current")
    allowed = StoreWriter(node_id="node", lease=2)
    assert (await served.stub.SetState(pb.SetStateRequest(run_id=RUN, writer=allowed))).has_set


async def test_errors_of_limits_have_a_retry_delay(served: Served) -> None:
    for number in range(3):
        await served.stub.SetState(pb.SetStateRequest(run_id=f"{number}"))
    error = await refusal(served.stub.SetState(pb.SetStateRequest(run_id="3")))
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_STATES")
    assert error.metadata == {"limit": "3"}
    assert error.retry_after
    watching = served.stub.WatchState(pb.WatchStateRequest(run_id=RUN))
    await watching.read()
    error = await refusal(served.stub.WatchState(pb.WatchStateRequest(run_id=RUN)).read())
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHERS")
    assert error.retry_after
    watching.cancel()


async def test_a_watcher_gets_every_change(served: Served) -> None:
    """It receives every change after the headers, which come even if there is no change to send."""
    first = await served.stub.SetState(pb.SetStateRequest(run_id=RUN, state=b"x"))
    watching = served.stub.WatchState(pb.WatchStateRequest(run_id=RUN, token=first.current.token))
    await watching.initial_metadata()
    second = await served.stub.SetState(pb.SetStateRequest(run_id=RUN, state=b"y", token=first.current.token))
    assert await watching.read() == pb.WatchStateResponse(current=second.current)
    served.states.forget_run(RUN)
    assert await watching.read() == pb.WatchStateResponse()
    watching.cancel()


async def test_a_watcher_that_goes_makes_room(served: Served) -> None:
    watching = served.stub.WatchState(pb.WatchStateRequest(run_id=RUN))
    await watching.read()
    watching.cancel()
    while (reason := await refusal_of_a_watch(served)) is not None:
        assert reason == "TOO_MANY_WATCHERS"


async def refusal_of_a_watch(served: Served) -> str | None:
    watching = served.stub.WatchState(pb.WatchStateRequest(run_id=RUN))
    try:
        await watching.read()
    except grpc.aio.AioRpcError as error:
        return decode(error).reason
    watching.cancel()
    return None


async def read_to_the_end(watching: grpc.aio.UnaryStreamCall[Any, Any]) -> None:
    while await watching.read() is not grpc.aio.EOF:
        pass


async def test_a_watcher_that_reads_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps neither its slot nor the data queued for it."""
    monkeypatch.setattr(flow, "WRITE_TIMEOUT", 0.2)
    states, path = open_states(TestJournal()), f"{tmp_path}/state.sock"
    async with serving(states, path), channel_to(path) as channel:
        stub: rpc.StateServiceAsyncStub = rpc.StateServiceStub(channel)
        watching = stub.WatchState(pb.WatchStateRequest(run_id=RUN))
        await watching.initial_metadata()
        token: bytes | None = None
        while list(states.streams()):
            request = pb.SetStateRequest(run_id=RUN, state=b"x" * MAX_VALUE_BYTES, token=token)
            token = (await stub.SetState(request)).current.token
        error = await refusal(read_to_the_end(watching))
        assert (error.code, error.reason) == (Code.UNAVAILABLE, "SUBSCRIBER_TOO_SLOW")


async def test_a_drain_ends_watches_with_its_reason(served: Served) -> None:
    watching = served.stub.WatchState(pb.WatchStateRequest(run_id=RUN))
    await watching.read()
    drained = asyncio.create_task(served.server.drain(30.0))
    error = await refusal(watching.read())
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "DRAINING")
    assert error.retry_after is not None
    await drained
