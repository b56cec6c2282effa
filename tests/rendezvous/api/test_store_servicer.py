"""The contract of store_service.proto over real gRPC: every call, and every refusal with its reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.duration_pb2 import Duration

from rallypoint.rendezvous.base.limits import MAX_MULTI_BYTES, MAX_VALUE_BYTES, StoreLimits
from rallypoint.rendezvous.core.commands import LeaseLost, Refused, RunIsClosed
from rallypoint.rendezvous.core.state import Outcome
from rallypoint.rendezvous.store.service import StoreService
from rallypoint.rendezvous.v1 import store_service_pb2 as pb
from rallypoint.rendezvous.v1 import store_service_pb2_grpc as rpc
from rallypoint.serving.requests import page_token
from rallypoint.serving.server import Server
from rendezvous.store.store_fakes import RUN, Rounds, TestJournal, channel_to, serving
from support.refusals import refusal
from support.waiting import PATIENCE

Code = grpc.StatusCode
LONG = Duration(seconds=3600)
WRITER = pb.StoreWriter(node_id="node", lease=7)
WRITING: dict[str, Any] = {"run_id": RUN, "writer": WRITER}


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
    limits = StoreLimits(run_bytes=3 * MAX_VALUE_BYTES, run_keys=10_001)
    store = StoreService(journal, rounds, limits=limits)
    path = f"{tmp_path}/store.sock"
    async with serving(store, path) as server, channel_to(path) as channel:
        yield Served(rpc.StoreServiceStub(channel), server, store, journal, rounds)


async def test_every_call_follows_the_contract(served: Served) -> None:
    stub = served.stub
    place: dict[str, Any] = {"run_id": RUN, "round": 1}
    writing: dict[str, Any] = {**place, "writer": WRITER}
    await stub.Set(pb.SetRequest(**writing, key="k", value=b"\x00\xff"))
    assert (await stub.Get(pb.GetRequest(**place, key="k"))).value == b"\x00\xff"
    assert (await stub.Add(pb.AddRequest(**writing, key="n", amount=-5))).value == -5
    lost = await stub.CompareSet(pb.CompareSetRequest(**writing, key="k", expected=b"no", desired=b"2"))
    assert (lost.swapped, lost.exists, lost.value) == (False, True, b"\x00\xff")
    absent = await stub.CompareSet(pb.CompareSetRequest(**writing, key="a", expected=b"no", desired=b"2"))
    assert (absent.swapped, absent.exists, absent.value) == (False, False, b"")
    won = await stub.CompareSet(pb.CompareSetRequest(**writing, key="a", desired=b""))
    assert (won.swapped, won.exists, won.value) == (True, True, b"")
    assert (await stub.Append(pb.AppendRequest(**writing, key="l", value=b"ab"))).length == 2
    assert (await stub.Append(pb.AppendRequest(**writing, key="l", value=b"c"))).length == 3
    entries = [pb.StoreEntry(key="m", value=b"1"), pb.StoreEntry(key="l"), pb.StoreEntry(key="m", value=b"2")]
    await stub.MultiSet(pb.MultiSetRequest(**writing, entries=entries))
    several = await stub.MultiGet(pb.MultiGetRequest(**place, keys=["m", "l", "k", "m"]))
    assert list(several.values) == [b"2", b"", b"\x00\xff", b"2"]
    for key in ("l", "m"):
        await stub.Delete(pb.DeleteRequest(**writing, key=key))
    await stub.Wait(pb.WaitRequest(**place, keys=["k", "n", "a"]))
    assert (await stub.Check(pb.CheckRequest(**place, keys=["k", "n"]))).present
    assert not (await stub.Check(pb.CheckRequest(**place, keys=["k", "missing"]))).present
    assert (await stub.Delete(pb.DeleteRequest(**writing, key="a"))).deleted
    assert not (await stub.Delete(pb.DeleteRequest(**writing, key="a"))).deleted
    page = await stub.ListKeys(pb.ListKeysRequest(**place, page_size=1))
    assert (list(page.keys), page.next_page_token) == (["k"], page_token(pb.ListKeysRequest(**place), "k"))
    page = await stub.ListKeys(pb.ListKeysRequest(**place, page_size=1, page_token=page.next_page_token))
    assert (list(page.keys), page.next_page_token) == (["n"], "")
    assert not (await stub.ListKeys(pb.ListKeysRequest(run_id=RUN))).keys


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"10.0.0.7:41235", "10.0.0.7:41235"),
        ("Größe 3".encode(), "Größe 3"),
        (b"x" * 256, "x" * 256),
        (b"x" * 257, ""),
        (b"two\nlines", ""),
        (b"\x1b[2J", ""),
        (b"\x80\x04K\x01.", ""),
        (b"", ""),
    ],
)
async def test_a_short_printable_value_is_text_too(served: Served, value: bytes, text: str) -> None:
    await served.stub.Set(pb.SetRequest(**WRITING, key="k", value=value))
    response = await served.stub.Get(pb.GetRequest(run_id=RUN, key="k"))
    assert (response.value, response.value_text) == (value, text)


async def test_a_write_answers_the_read_that_waits_for_it(served: Served) -> None:
    """And not before that write is durable."""
    waiting = asyncio.ensure_future(served.stub.Get(pb.GetRequest(run_id=RUN, key="k", timeout=LONG)))
    served.journal.hold()
    setting = asyncio.ensure_future(served.stub.Set(pb.SetRequest(**WRITING, key="k", value=b"1")))
    await served.journal.until_held()
    assert not waiting.done()
    assert not setting.done()
    served.journal.release()
    assert (await waiting).value == b"1"
    await setting


# The largest request around a value: every name has the greatest length.
PLACE: dict[str, Any] = {
    "run_id": "r" * 256,
    "round": 2**31 - 1,
    "writer_round": 2**31 - 1,
    "writer": pb.StoreWriter(node_id="n" * 256, lease=2**63 - 1),
    "operation": pb.StoreOperation(client_id="c" * 64, slot=65_535, sequence=2**63 - 1),
}
SPACE: dict[str, Any] = {name: PLACE[name] for name in ("run_id", "round")}
KEY = "k" * 1024
VALUE = bytes(range(256)) * (MAX_VALUE_BYTES // 256)

Send = Callable[["rpc.StoreServiceAsyncStub", bytes], Awaitable[Any]]

LARGEST: dict[str, tuple[str, Send]] = {
    "set": ("value", lambda stub, value: stub.Set(pb.SetRequest(**PLACE, key=KEY, value=value))),
    "append": ("value", lambda stub, value: stub.Append(pb.AppendRequest(**PLACE, key=KEY, value=value))),
    "compare_set": (
        "desired",
        lambda stub, value: stub.CompareSet(
            pb.CompareSetRequest(**PLACE, key=KEY, expected=b"", desired=value)
        ),
    ),
    "multi_set": (
        "entries[0].value",
        lambda stub, value: stub.MultiSet(
            pb.MultiSetRequest(**PLACE, entries=[pb.StoreEntry(key=KEY, value=value)])
        ),
    ),
}


@pytest.mark.parametrize(
    ("methods", "fields"),
    [
        ("Set Add Append CompareSet Delete", "run_id writer key"),
        ("MultiSet", "run_id writer entries"),
        ("Get", "run_id key"),
        ("MultiGet Wait Check", "run_id keys"),
    ],
)
async def test_every_bad_field_of_a_request_is_named(served: Served, methods: str, fields: str) -> None:
    for method in methods.split():
        error = await refusal(getattr(served.stub, method)(getattr(pb, f"{method}Request")()))
        assert " ".join(field for field, _ in error.field_violations) == fields


@pytest.mark.parametrize("name", LARGEST)
async def test_the_largest_value_and_one_byte_more(served: Served, name: str) -> None:
    """It passes through every write and every read, with the longest names; one byte more is refused
    with the field and the limit, and changes nothing."""
    field, send = LARGEST[name]
    served.rounds.of[PLACE["run_id"]] = PLACE["round"]
    error = await refusal(send(served.stub, VALUE + b"x"))
    assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
    assert error.field_violations[0][0] == field
    assert "4,177,921 bytes; at most 4,177,920 fit" in error.message
    await send(served.stub, VALUE)
    assert (await served.stub.Get(pb.GetRequest(**SPACE, key=KEY))).value == VALUE
    several = await served.stub.MultiGet(pb.MultiGetRequest(**SPACE, keys=[KEY]))
    assert list(several.values) == [VALUE]
    request = pb.CompareSetRequest(**SPACE, writer=WRITER, key=KEY, expected=b"no", desired=b"")
    assert (await served.stub.CompareSet(request)).value == VALUE


async def test_the_most_that_can_be_set_at_once_can_be_read_at_once(served: Served) -> None:
    """10,000 entries that fill a message; one byte more is refused in both directions, with the remedy."""
    served.rounds.of[PLACE["run_id"]] = PLACE["round"]
    keys = [f"{number:04}" for number in range(10_000)]
    size = MAX_MULTI_BYTES // len(keys) - 20
    rest = MAX_MULTI_BYTES - len(keys) * (size + 20)
    values = [b"x" * size] * (len(keys) - 1) + [b"y" * (size + rest)]
    entries = [pb.StoreEntry(key=key, value=value) for key, value in zip(keys, values, strict=True)]
    await served.stub.MultiSet(pb.MultiSetRequest(**PLACE, entries=entries))
    answer = await served.stub.MultiGet(pb.MultiGetRequest(**SPACE, keys=keys))
    assert list(answer.values) == values
    entries[0].value += b"x"
    error = await refusal(served.stub.MultiSet(pb.MultiSetRequest(**PLACE, entries=entries)))
    assert (error.code, error.field_violations[0][0]) == (Code.INVALID_ARGUMENT, "entries")
    assert "at most 4,186,112 fit, split it over several requests" in error.message
    large = pb.SetRequest(**SPACE, writer=WRITER, key="large", value=VALUE)
    await served.stub.Set(large)
    error = await refusal(served.stub.MultiGet(pb.MultiGetRequest(**SPACE, keys=[*keys[:9_999], "large"])))
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "ANSWER_TOO_LARGE")
    assert error.metadata == {"limit_bytes": "4186112", "fitting": "9999"}
    assert "ask for fewer keys at once: the first 9,999 fit" in error.message


async def test_append_past_the_largest_value_is_refused(served: Served) -> None:
    await served.stub.Set(pb.SetRequest(**WRITING, key="k", value=VALUE))
    error = await refusal(served.stub.Append(pb.AppendRequest(**WRITING, key="k", value=b"x")))
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "VALUE_TOO_LARGE")
    assert error.metadata == {"limit_bytes": "4177920"}


def writes(stub: rpc.StoreServiceAsyncStub, place: dict[str, Any]) -> list[Awaitable[object]]:
    """Return one write of each kind."""
    return [
        stub.Set(pb.SetRequest(**place, key="k")),
        stub.Add(pb.AddRequest(**place, key="n")),
        stub.Append(pb.AppendRequest(**place, key="k")),
        stub.CompareSet(pb.CompareSetRequest(**place, key="k")),
        stub.MultiSet(pb.MultiSetRequest(**place, entries=[pb.StoreEntry(key="k")])),
        stub.Delete(pb.DeleteRequest(**place, key="k")),
    ]


async def test_every_write_is_fenced_by_its_lease(served: Served) -> None:
    """Each of them, with the reason that the lease check gives."""
    asked: list[tuple[str, str, int]] = []
    lease_error: Refused = LeaseLost(RUN, "node", 7, None)

    def check_lease(run_id: str, node_id: str, lease: int, token: bytes) -> None:
        asked.append((run_id, node_id, lease))
        raise lease_error

    served.rounds.check = check_lease
    for call in writes(served.stub, WRITING):
        error = await refusal(call)
        assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "LEASE_LOST")
        assert error.metadata == {"run_id": RUN, "node_id": "node", "lease": "7"}
    assert asked == [(RUN, "node", 7)] * 6
    lease_error = RunIsClosed(RUN, Outcome.SUCCEEDED, "all done")
    error = await refusal(served.stub.Set(pb.SetRequest(**WRITING, key="k")))
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "RUN_CLOSED")
    assert error.metadata == {"run_id": RUN, "outcome": "SUCCEEDED"}
    assert not served.journal.commits


async def test_no_write_goes_without_a_lease(served: Served) -> None:
    """The refusal names the field, and the source of a lease. Reads and waits need none."""
    calls = writes(served.stub, {"run_id": RUN})
    wire = pb.DESCRIPTOR.services_by_name["StoreService"].methods
    assert len(calls) == sum("writer" in method.input_type.fields_by_name for method in wire)
    for call in calls:
        error = await refusal(call)
        assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "INVALID_ARGUMENT")
        assert error.field_violations[0][0] == "writer"
        assert "the lease and the token that Join sent" in error.message
        assert "RALLYPOINT_STORE_SOCKET" in error.message
    assert not served.journal.commits
    waiting = asyncio.ensure_future(served.stub.Get(pb.GetRequest(run_id=RUN, key="k", timeout=LONG)))
    await served.stub.Set(pb.SetRequest(**WRITING, key="k", value=b"1"))
    assert (await waiting).value == b"1"
    assert (await served.stub.Check(pb.CheckRequest(run_id=RUN, keys=["k"]))).present


async def test_a_wait_in_a_forgotten_run_is_refused(served: Served) -> None:
    waiting = asyncio.ensure_future(served.stub.Get(pb.GetRequest(run_id=RUN, key="k", timeout=LONG)))
    await served.stub.Set(pb.SetRequest(**WRITING, key="other"))  # so the wait has arrived, or arrives next
    served.journal.drop_run(RUN)
    del served.rounds.of[RUN]
    served.store.forget_run(RUN)
    error = await refusal(waiting)
    assert (error.code, error.reason) == (Code.NOT_FOUND, "RUN_NOT_FOUND")


async def test_refusals_carry_their_reason(served: Served) -> None:
    """One of each that a test can cause; `test_the_table` in test_errors.py checks the table."""
    stub = served.stub
    malformed: list[tuple[Awaitable[object], grpc.StatusCode, str]] = [
        (stub.Set(pb.SetRequest(run_id="other", writer=WRITER, key="k")), Code.NOT_FOUND, "RUN_NOT_FOUND"),
        (stub.Set(pb.SetRequest(**WRITING, key="")), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (
            stub.Set(pb.SetRequest(**WRITING, key="k", value=b"x" * (MAX_VALUE_BYTES + 1))),
            Code.INVALID_ARGUMENT,
            "INVALID_ARGUMENT",
        ),
        (stub.Get(pb.GetRequest(run_id=RUN, round=7, key="k")), Code.FAILED_PRECONDITION, "ROUND_NOT_BEGUN"),
        (stub.Get(pb.GetRequest(run_id=RUN, key="k")), Code.DEADLINE_EXCEEDED, "KEY_WAIT_TIMED_OUT"),
        (stub.Check(pb.CheckRequest(run_id=RUN)), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
        (stub.ListKeys(pb.ListKeysRequest(run_id=RUN, round=-1)), Code.INVALID_ARGUMENT, "INVALID_ARGUMENT"),
    ]
    for call, code, reason in malformed:
        error = await refusal(call)
        assert (error.code, error.reason) == (code, reason)
    await stub.Set(pb.SetRequest(**WRITING, key="text", value=b"text"))
    error = await refusal(stub.Add(pb.AddRequest(**WRITING, key="text", amount=1)))
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "NOT_AN_INTEGER")
    for key in "ab":
        await stub.Set(pb.SetRequest(**WRITING, key=key, value=b"x" * MAX_VALUE_BYTES))
    error = await refusal(stub.Set(pb.SetRequest(**WRITING, key="c", value=b"x" * MAX_VALUE_BYTES)))
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "RUN_STORE_FULL")
    assert error.retry_after is None
    await stub.Delete(pb.DeleteRequest(**WRITING, key="a"))
    entries = [pb.StoreEntry(key=f"{number}") for number in range(10_000)]
    error = await refusal(stub.MultiSet(pb.MultiSetRequest(**WRITING, entries=entries)))
    assert (error.code, error.reason) == (Code.RESOURCE_EXHAUSTED, "TOO_MANY_KEYS")
    assert (error.metadata, error.retry_after) == ({"limit_keys": "10001"}, None)


async def test_missing_keys_are_named(served: Served) -> None:
    await served.stub.Set(pb.SetRequest(**WRITING, key="there"))
    request = pb.WaitRequest(run_id=RUN, keys=["there", "one", "two"], timeout=Duration(nanos=1_000_000))
    error = await refusal(served.stub.Wait(request))
    assert error.reason == "KEY_WAIT_TIMED_OUT"
    assert error.metadata == {"missing_count": "2", "missing": '["one","two"]'}
    many = [f"{number}" + "ä" * 500 for number in range(2_000)]
    error = await refusal(served.stub.Wait(pb.WaitRequest(run_id=RUN, keys=many)))
    assert error.metadata["missing_count"] == "2000"


async def test_a_wait_in_a_round_that_ends_is_refused(served: Served) -> None:
    waiting = asyncio.ensure_future(
        served.stub.Get(pb.GetRequest(run_id=RUN, round=1, key="k", timeout=LONG))
    )
    await served.stub.Set(
        pb.SetRequest(**WRITING, round=1, key="other")
    )  # so the wait has arrived, or arrives next
    served.rounds.of[RUN] = 2
    served.store.forget_rounds_before(RUN, 2)
    error = await refusal(waiting)
    assert (error.code, error.reason) == (Code.FAILED_PRECONDITION, "ROUND_OVER")
    assert error.metadata == {"round": "1", "current_round": "2"}
    error = await refusal(served.stub.Set(pb.SetRequest(**WRITING, key="k", writer_round=1)))
    assert error.reason == "ROUND_OVER"


async def test_draining_ends_waits_as_unavailable(served: Served) -> None:
    waiting = asyncio.ensure_future(served.stub.Get(pb.GetRequest(run_id=RUN, key="k", timeout=LONG)))
    await served.stub.Set(pb.SetRequest(**WRITING, key="other"))
    await served.server.drain(30.0)
    error = await refusal(waiting)
    assert (error.code, error.reason) == (Code.UNAVAILABLE, "DRAINING")


async def test_a_caller_that_goes_is_forgotten(served: Served) -> None:
    call = served.stub.Get(pb.GetRequest(run_id=RUN, key="k", timeout=LONG))
    await served.stub.Set(pb.SetRequest(**WRITING, key="other"))
    call.cancel()
    async with asyncio.timeout(PATIENCE):
        # The server learns of it before it answers a later request on the same connection, or soon after.
        while served.store._runs[RUN].waits.rounds:
            await served.stub.Check(pb.CheckRequest(run_id=RUN, keys=["k"]))
