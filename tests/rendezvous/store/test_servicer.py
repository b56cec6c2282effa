"""The contract of store_service.proto over real gRPC: every call, and every refusal with its reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from rallypoint.rendezvous.store import refusals
from rallypoint.rendezvous.store.core import StoreLimits
from rallypoint.rendezvous.store.errors import service_error
from rallypoint.rendezvous.store.requests import MAX_VALUE_BYTES
from rallypoint.rendezvous.store.service import StoreService
from rallypoint.rendezvous.v1 import store_service_pb2 as pb
from rallypoint.rendezvous.v1 import store_service_pb2_grpc as rpc
from rallypoint.serving.errors import ServiceError, decode
from rallypoint.serving.server import Server
from rendezvous.store.store_fakes import RUN, Rounds, TestJournal, channel_to, open_store, serving

Code = grpc.StatusCode
LONG = Duration(seconds=3600)


@dataclass
class Served:
    """A store on a server, and a stub that calls it."""

    stub: rpc.StoreServiceAsyncStub
    server: Server
    store: StoreService
    journal: TestJournal
    rounds: Rounds


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    journal, rounds = TestJournal(), Rounds()
    store = open_store(journal, rounds, StoreLimits(run_bytes=3 * MAX_VALUE_BYTES))
    path = f"{tmp_path}/store.sock"
    async with serving(store, path) as server, channel_to(path) as channel:
        yield Served(rpc.StoreServiceStub(channel), server, store, journal, rounds)


async def refused(call: Awaitable[object]) -> ServiceError:
    """Return the error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return decode(error.value)


async def test_every_call_does_what_the_contract_says(served: Served) -> None:
    stub = served.stub
    place: dict[str, Any] = {"run_id": RUN, "round": 1}
    await stub.Set(pb.SetRequest(**place, key="k", value=b"\x00\xff"))
    assert (await stub.Get(pb.GetRequest(**place, key="k"))).value == b"\x00\xff"
    assert (await stub.Add(pb.AddRequest(**place, key="n", amount=-5))).value == -5
    lost = await stub.CompareSet(pb.CompareSetRequest(**place, key="k", expected=b"no", desired=b"2"))
    assert (lost.swapped, lost.exists, lost.value) == (False, True, b"\x00\xff")
    absent = await stub.CompareSet(pb.CompareSetRequest(**place, key="a", expected=b"no", desired=b"2"))
    assert (absent.swapped, absent.exists, absent.value) == (False, False, b"")
    won = await stub.CompareSet(pb.CompareSetRequest(**place, key="a", desired=b""))
    assert (won.swapped, won.exists, won.value) == (True, True, b"")
    await stub.Wait(pb.WaitRequest(**place, keys=["k", "n", "a"]))
    assert (await stub.Check(pb.CheckRequest(**place, keys=["k", "n"]))).present
    assert not (await stub.Check(pb.CheckRequest(**place, keys=["k", "missing"]))).present
    assert (await stub.Delete(pb.DeleteRequest(**place, key="a"))).deleted
    assert not (await stub.Delete(pb.DeleteRequest(**place, key="a"))).deleted
    page = await stub.ListKeys(pb.ListKeysRequest(**place, page_size=1))
    assert (list(page.keys), page.next_page_token) == (["k"], "k")
    page = await stub.ListKeys(pb.ListKeysRequest(**place, page_size=1, page_token=page.next_page_token))
    assert (list(page.keys), page.next_page_token) == (["n"], "")
    assert not (await stub.ListKeys(pb.ListKeysRequest(run_id=RUN))).keys


async def test_a_reader_is_told_by_the_write_it_waits_for(served: Served) -> None:
    """And not before that is durable."""
    waiting = asyncio.ensure_future(served.stub.Get(pb.GetRequest(run_id=RUN, key="k", timeout=LONG)))
    served.journal.hold()
    setting = asyncio.ensure_future(served.stub.Set(pb.SetRequest(run_id=RUN, key="k", value=b"1")))
    await served.journal.until_held()
    assert not waiting.done()
    assert not setting.done()
    served.journal.release()
    assert (await waiting).value == b"1"
    await setting


async def test_the_largest_value_goes_both_ways(served: Served) -> None:
    value = bytes(range(256)) * (MAX_VALUE_BYTES // 256)
    key = "k" * 1024
    await served.stub.Set(pb.SetRequest(run_id=RUN, key=key, value=value))
    assert (await served.stub.Get(pb.GetRequest(run_id=RUN, key=key))).value == value


async def test_refusals_carry_their_reason(served: Served) -> None:
    """One of each that a test can bring about; `test_each_refusal_has_a_code` looks at the table."""
    stub = served.stub
    malformed: list[tuple[Awaitable[object], grpc.StatusCode, str]] = [
        (stub.Set(pb.SetRequest(run_id="other", key="k")), Code.NOT_FOUND, "RUN_NOT_FOUND"),
        (stub.Set(pb.SetRequest(run_id=RUN, key="")), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (
            stub.Set(pb.SetRequest(run_id=RUN, key="k", value=b"x" * (MAX_VALUE_BYTES + 1))),
            Code.INVALID_ARGUMENT,
            "INVALID_ARGUMENT",
        ),
        (stub.Get(pb.GetRequest(run_id=RUN, round=7, key="k")), Code.FAILED_PRECONDITION, "ROUND_NOT_BEGUN"),
        (stub.Get(pb.GetRequest(run_id=RUN, key="k")), Code.DEADLINE_EXCEEDED, "KEY_WAIT_TIMED_OUT"),
        (stub.Check(pb.CheckRequest(run_id=RUN)), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (stub.ListKeys(pb.ListKeysRequest(run_id=RUN, round=-1)), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
    ]
    for call, code, reason in malformed:
        error = await refused(call)
        assert (error.code, error.reason) == (code, reason)
    await stub.Set(pb.SetRequest(run_id=RUN, key="text", value=b"text"))
    error = await refused(stub.Add(pb.AddRequest(run_id=RUN, key="text", amount=1)))
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "NOT_AN_INTEGER")
    for key in "ab":
        await stub.Set(pb.SetRequest(run_id=RUN, key=key, value=b"x" * MAX_VALUE_BYTES))
    error = await refused(stub.Set(pb.SetRequest(run_id=RUN, key="c", value=b"x" * MAX_VALUE_BYTES)))
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "RUN_STORE_FULL")
    assert error.retry_after is None


async def test_missing_keys_are_named(served: Served) -> None:
    await served.stub.Set(pb.SetRequest(run_id=RUN, key="there"))
    request = pb.WaitRequest(run_id=RUN, keys=["there", "one", "two"], timeout=Duration(nanos=1_000_000))
    error = await refused(served.stub.Wait(request))
    assert error.reason == "KEY_WAIT_TIMED_OUT"
    assert error.metadata == {"missing_count": "2", "missing": "'one', 'two'"}
    many = [f"{number}" + "ä" * 500 for number in range(2_000)]
    error = await refused(served.stub.Wait(pb.WaitRequest(run_id=RUN, keys=many)))
    assert error.metadata["missing_count"] == "2000"


async def test_who_waits_in_a_round_that_ends_is_told(served: Served) -> None:
    waiting = asyncio.ensure_future(
        served.stub.Get(pb.GetRequest(run_id=RUN, round=1, key="k", timeout=LONG))
    )
    await served.stub.Set(
        pb.SetRequest(run_id=RUN, round=1, key="other")
    )  # so the wait has arrived, or is next
    served.rounds.of[RUN] = 2
    served.store.forget_rounds_before(RUN, 2)
    error = await refused(waiting)
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "ROUND_OVER")
    assert error.metadata == {"round": "1", "current_round": "2"}
    error = await refused(served.stub.Set(pb.SetRequest(run_id=RUN, key="k", writer_round=1)))
    assert error.reason == "ROUND_OVER"


async def test_draining_ends_waits_as_unavailable(served: Served) -> None:
    waiting = asyncio.ensure_future(served.stub.Get(pb.GetRequest(run_id=RUN, key="k", timeout=LONG)))
    await served.stub.Set(pb.SetRequest(run_id=RUN, key="other"))
    await served.server.drain(30.0)
    error = await refused(waiting)
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "DRAINING")


async def test_a_caller_that_goes_is_forgotten(served: Served) -> None:
    call = served.stub.Get(pb.GetRequest(run_id=RUN, key="k", timeout=LONG))
    await served.stub.Set(pb.SetRequest(run_id=RUN, key="other"))
    call.cancel()
    async with asyncio.timeout(30):
        # The server learns of it before it answers what was sent later on the same connection, or soon after.
        while served.store._runs[RUN].waiting:
            await served.stub.Check(pb.CheckRequest(run_id=RUN, keys=["k"]))


def test_each_refusal_has_a_code() -> None:
    """None is forgotten in the table, and no message is empty."""
    examples: list[refusals.StoreRefusal] = [
        refusals.RunNotFound("r"),
        refusals.RoundOver("r", 1, 2),
        refusals.RoundNotBegun("r", 3, 2),
        refusals.NotAnInteger("k", b"x" * 5_000_000),
        refusals.IntegerOverflow("k", 2**63 - 1, 1),
        refusals.RunStoreFull("r", "k", 11, 10),
        refusals.StoreBusy("r", 10, 0.5),
        refusals.OperationSuperseded("c/0", 1, 2),
        refusals.OperationReused("c/0", 1),
        refusals.KeyWaitTimedOut("r", ["k"], 1.0),
        refusals.Draining(),
        refusals.JournalFailed("disk full"),
    ]
    assert {type(each) for each in examples} == set(refusals.StoreRefusal.__subclasses__())
    for each in examples:
        error = service_error(each)
        assert error.message
        assert error.reason.isupper()
        assert (error.retry_after is not None) == isinstance(each, refusals.StoreBusy)
