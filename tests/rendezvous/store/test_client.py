"""Calls go on over a restart of the service, and every write takes effect exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from rallypoint.rendezvous.base.errors import NotOwner
from rallypoint.rendezvous.base.limits import MAX_VALUE_BYTES, StoreLimits
from rallypoint.rendezvous.core.commands import LeaseLost
from rallypoint.rendezvous.store.client import OperationSlots, StoreClient, Writer
from rallypoint.rendezvous.store.service import StoreService
from rallypoint.rendezvous.store.writes import Comparison
from rallypoint.rpc.errors import ServiceError
from rallypoint.rpc.pace import Pace
from rendezvous.store.store_fakes import RUN, Rounds, TestJournal, channel_to, client_of, open_store, serving

Write = Callable[[StoreClient], Awaitable[Any]]

WRITES: dict[str, tuple[Write, object, dict[str, bytes]]] = {
    "set": (lambda client: client.set("k", b"new"), None, {"k": b"new", "n": b"1"}),
    "add": (lambda client: client.add("n", 1), 2, {"k": b"old", "n": b"2"}),
    "append": (lambda client: client.append("k", b"er"), 5, {"k": b"older", "n": b"1"}),
    "multi_set": (
        lambda client: client.multi_set({"k": b"new", "m": b""}),
        None,
        {"k": b"new", "m": b"", "n": b"1"},
    ),
    "compare_set": (
        lambda client: client.compare_set("k", b"old", b"new"),
        Comparison(True, b"new"),
        {"k": b"new", "n": b"1"},
    ),
    "delete": (lambda client: client.delete("k"), True, {"n": b"1"}),
}


def values(journal: TestJournal) -> dict[str, bytes]:
    return {key: value for (_, _, key), value in journal.rows.items() if not key.startswith("\x01")}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("durable", [True, False], ids=["killed-after-commit", "killed-before-commit"])
async def test_a_write_over_a_restart_takes_effect_once(tmp_path: Path, name: str, durable: bool) -> None:
    """The service dies with the write unanswered, made durable or not; the client notices nothing."""
    write, answer, expected = WRITES[name]
    journal, path = TestJournal(), f"{tmp_path}/store.sock"
    async with channel_to(path) as channel:
        client = client_of(channel)
        async with serving(open_store(journal), path):
            await client.set("k", b"old")
            await client.add("n", 1)
            (journal.hold_after if durable else journal.hold)()
            writing = asyncio.ensure_future(write(client))
            await journal.until_held()
        rows = dict(journal.rows)
        # Commits that the dead service still held are lost.
        journal.fails_with = OSError("dead")
        journal.release()
        assert not writing.done()
        restarted = TestJournal()
        restarted.rows = rows
        async with serving(open_store(restarted), path):
            assert await writing == answer
            assert values(restarted) == expected


async def test_a_wait_goes_on_over_a_restart(tmp_path: Path) -> None:
    journal, path = TestJournal(), f"{tmp_path}/store.sock"
    async with channel_to(path) as channel:
        client = client_of(channel)
        async with serving(open_store(journal), path):
            waiting = asyncio.ensure_future(client.get("k"))
            both = asyncio.ensure_future(client.wait(["k", "j"]))
            values = asyncio.ensure_future(client.multi_get(["k", "j"]))
            await client.set("j", b"2")
        async with serving(open_store(journal), path):
            await client.set("k", b"1")
            assert await waiting == b"1"
            await both
            assert await values == [b"1", b"2"]


async def test_a_wait_goes_on_over_a_drain(tmp_path: Path) -> None:
    journal, path = TestJournal(), f"{tmp_path}/store.sock"
    async with channel_to(path) as channel:
        client = client_of(channel)
        async with serving(open_store(journal), path) as server:
            waiting = asyncio.ensure_future(client.get("k"))
            await client.set("j", b"")
            await server.drain(30.0)
        async with serving(open_store(journal), path):
            await client.set("k", b"1")
            assert await waiting == b"1"


async def test_adders_over_restarts_add_up(tmp_path: Path) -> None:
    """Many adders, the service killed again and again at any point: the sum is the number of additions, and
    each addition returned another sum."""
    journal, path = TestJournal(), f"{tmp_path}/store.sock"
    adders, each = 8, 25
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(channel_to(path)) for _ in range(2)]
        clients = [client_of(channel) for channel in channels]

        async def add(number: int) -> list[int]:
            client = clients[number % len(clients)]
            return [await client.add("n", 1, round=number % 2) for _ in range(each)]

        adding: asyncio.Future[list[list[int]]] = asyncio.gather(*(add(number) for number in range(adders)))
        lives = 0
        while not adding.done():
            lives += 1
            async with serving(open_store(journal), path):
                enough: asyncio.Future[Any] = asyncio.ensure_future(journal.until_commits(8))
                await asyncio.wait([adding, enough], return_when=asyncio.FIRST_COMPLETED)
                enough.cancel()
                # Every other process ends before a commit, the others after one that was not confirmed.
                (journal.hold if lives % 2 else journal.hold_after)()
            # Commits that the dead service still held are lost.
            journal, dead = TestJournal(), journal
            journal.rows = dict(dead.rows)
            dead.fails_with = OSError("dead")
            dead.release()
        sums = await adding
    for round in (0, 1):
        seen = sorted(total for number, totals in enumerate(sums) for total in totals if number % 2 == round)
        assert seen == list(range(1, adders // 2 * each + 1))
    assert lives > 3


async def test_an_unreachable_service_is_reported_in_time(tmp_path: Path) -> None:
    async with channel_to(f"{tmp_path}/nobody.sock") as channel:
        with pytest.raises(ServiceError, match=r"gave no answer for 0\.05 s") as refused:
            await client_of(channel).add("n", 1, timeout=0.05)
    assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE")


async def test_the_service_decides_the_end_of_a_wait(tmp_path: Path) -> None:
    """This holds also for a timeout of 0: the service is called, and names the missing key."""
    path = f"{tmp_path}/store.sock"
    async with serving(open_store(TestJournal()), path), channel_to(path) as channel:
        client = client_of(channel)
        for timeout in (0.0, 0.01):
            with pytest.raises(ServiceError, match="key 'k' was not set") as refused:
                await client.get("k", timeout=timeout)
            assert refused.value.reason == "KEY_WAIT_TIMED_OUT"


async def test_a_refusal_is_not_repeated(tmp_path: Path) -> None:
    path = f"{tmp_path}/store.sock"
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async with serving(open_store(TestJournal(), Rounds({RUN: 2})), path), channel_to(path) as channel:
        client = client_of(channel, pace=Pace(sleep=sleep))
        for call in (
            client.set("k", b"", round=1),
            client.set("k", b"", writer_round=1),
            client.get("k", round=1),
            client_of(channel, "other", pace=Pace(sleep=sleep)).check(["k"]),
        ):
            with pytest.raises(ServiceError):
                await call
    assert not slept


async def test_a_full_waiting_room_is_waited_for(tmp_path: Path) -> None:
    """The client follows RetryInfo: it tries again until there is room."""
    path = f"{tmp_path}/store.sock"
    store = open_store(TestJournal(), limits=StoreLimits(waiters=1))
    slept: list[float] = []

    async with serving(store, path), channel_to(path) as channel:

        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            await client_of(channel).set("k", b"1")

        client = client_of(channel, pace=Pace(sleep=sleep, draw=lambda: 0.0))
        first = asyncio.ensure_future(client.get("k"))
        while not store._runs or not store._runs[RUN].waits.waiters:
            await client.check(["k"])  # later requests are answered later
        assert await client.get("k") == b"1"
        assert await first == b"1"
    assert slept == [1.0]


async def test_a_request_that_is_too_large_never_leaves_the_client(tmp_path: Path) -> None:
    """The check needs no service; the error names the field and the limit."""
    async with channel_to(f"{tmp_path}/nobody.sock") as channel:
        client, large = client_of(channel), b"x" * (MAX_VALUE_BYTES + 1)
        many = {f"{number}": b"x" * 500_000 for number in range(9)}
        for call, field in [
            (client.set("k", large), "value"),
            (client.append("k", large), "value"),
            (client.compare_set("k", b"x", large[1:]), "desired"),
            (client.multi_set({"a": b"", "k": large}), "entries[1].value"),
            (client.multi_set(many), "entries"),
            (client.multi_set({"a": b"", "\ud800": b""}), "entries[1].key"),
            (client.multi_get([f"{n:04}" + "k" * 1_000 for n in range(9_999)]), "keys"),
        ]:
            with pytest.raises(ServiceError) as refused:
                await call
            assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
            assert refused.value.field_violations[0][0] == field


async def test_a_write_carries_the_lease_of_its_node(tmp_path: Path) -> None:
    """It is the lease held when the write began, also in its repetitions: a write begun under an older lease is
    refused once that is lost, and isn't tried again."""
    path, leases = f"{tmp_path}/store.sock", [1]
    moving, lost = False, set[int]()

    def check_lease(run_id: str, node_id: str, lease: int, token: bytes) -> None:
        if moving:
            raise NotOwner(run_id)
        if lease in lost:
            raise LeaseLost(run_id, node_id, lease, leases[-1])

    async def sleep(seconds: float) -> None:
        nonlocal moving
        moving = False
        lost.add(1)
        leases.append(2)

    store = StoreService(TestJournal(), Rounds(check=check_lease))
    async with serving(store, path), channel_to(path) as channel:
        client = client_of(channel, writer=lambda: Writer("node", leases[-1]), pace=Pace(sleep=sleep))
        await client.add("n", 1)
        moving = True
        with pytest.raises(ServiceError) as refused:
            await client.add("n", 1)
        assert refused.value.reason == "LEASE_LOST"
        assert refused.value.metadata == {
            "run_id": RUN,
            "node_id": "node",
            "lease": "1",
            "superseded_by": "2",
        }
        assert await client.add("n", 1) == 2


async def test_keys_come_in_pages(tmp_path: Path) -> None:
    path = f"{tmp_path}/store.sock"
    async with serving(open_store(TestJournal()), path), channel_to(path) as channel:
        client = client_of(channel)
        await asyncio.gather(*(client.set(f"k/{n:04}", b"") for n in range(1_001)))
        first, page = await client.list_keys("k/")
        rest, end = await client.list_keys("k/", page)
        assert first + rest == [f"k/{n:04}" for n in range(1_001)]
        assert not end


def test_slots_are_reused_and_never_shared() -> None:
    """There are as many slots as concurrent writes, each with numbers that grow."""
    slots = OperationSlots("c")
    with slots.operation() as first:
        with slots.operation() as second:
            assert (first.slot, second.slot) == (0, 1)
        with slots.operation() as third:
            assert (third.slot, third.sequence) == (1, 2)
    with slots.operation() as fourth:
        assert (fourth.slot, fourth.sequence) == (0, 2)


def test_the_next_write_goes_through_the_slot_of_one_that_was_given_up() -> None:
    """It may still arrive: by its smaller number the service refuses it once the next has taken effect."""
    slots = OperationSlots("c")
    with slots.operation(), suppress(TimeoutError), slots.operation() as given_up:
        raise TimeoutError
    with slots.operation() as following:
        assert (following.slot, following.sequence) == (given_up.slot, 2) == (1, 2)
    with slots.operation() as last:
        assert (last.slot, last.sequence) == (0, 2)
