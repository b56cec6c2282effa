"""A call goes to each replica until one answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest

from rallypoint.rpc import replica_client
from rallypoint.rpc.calls import call_any
from rallypoint.rpc.errors import ServiceError
from rallypoint.rpc.replica_client import ReplicaClient
from serving.fleet import Replica, Serve, Tiny, mute, refusing
from support.waiting import PATIENCE


async def ask(*places: str) -> str:
    """Call replicas in this order; return the name of the one that answers."""
    async with ReplicaClient(",".join(places)) as board, asyncio.timeout(PATIENCE):
        board._selector._start = 0
        answer: bytes = await call_any(board, Tiny, lambda stub: stub.Ask(b"?"))
    return answer.decode()


async def test_an_absent_replica_is_skipped(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_client, "CONNECT_TIMEOUT", 0.2)
    keeper, silent = mute()
    here = await Replica("a").start(serve)
    with keeper:
        assert await ask(silent, here.address) == "a"


async def test_the_owner_is_followed(serve: Serve) -> None:
    """The replica that names it has not carried out the call."""
    first, owner = await Replica("a").start(serve), await Replica("b").start(serve)
    first.owner = owner.address
    assert await ask(first.address) == "b"


async def test_a_run_without_an_owner_is_waited_for(serve: Serve) -> None:
    one = await Replica("a").start(serve)
    one.owner = ""
    asking = asyncio.ensure_future(ask(one.address))
    async with asyncio.timeout(PATIENCE):
        await one.called.wait()
    one.owner = None
    assert await asking == "a"


@pytest.mark.parametrize("owner", ["named", ""])
async def test_an_owner_that_changed_on_the_way_is_followed(serve: Serve, owner: str) -> None:
    """The next one is called at once if it is known."""
    first, second = await Replica("a").start(serve), await Replica("b").start(serve)
    first.reason, first.owner = "OWNERSHIP_LOST", owner and second.address
    asking = asyncio.ensure_future(ask(first.address))
    async with asyncio.timeout(PATIENCE):
        await first.called.wait()
    if not owner:
        first.owner = None
    assert await asking == ("b" if owner else "a")
    assert len(second.asked) == bool(owner)


async def test_a_call_open_at_a_replica_that_died_goes_to_another(serve: Serve) -> None:
    dying, here = await Replica("a").start(serve), await Replica("b").start(serve)
    dying.pause = 3600.0
    asking = asyncio.ensure_future(ask(dying.address, here.address))
    async with asyncio.timeout(PATIENCE):
        await dying.called.wait()
    await dying.server.stop()
    assert await asking == "b"
    assert len(here.asked) == 1


async def test_a_silent_replica_is_left(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_client, "REPLY_TIMEOUT", 0.2)
    slow, here = await Replica("a").start(serve), await Replica("b").start(serve)
    slow.pause = 1.0
    assert await ask(slow.address, here.address) == "b"


@pytest.mark.parametrize("first", ["there", "gone"])
async def test_the_reported_error_is_that_of_a_running_replica(serve: Serve, first: str) -> None:
    """The order does not matter: another replica that is gone is not the reason for the failure."""
    there = await Replica("a").start(serve)
    there.reason, there.owner = "ETCD_UNAVAILABLE", ""
    nobody, gone = refusing()
    places = [there.address, gone] if first == "there" else [gone, there.address]
    with nobody, pytest.raises(ServiceError) as refused:
        await ask(*places)
    assert refused.value.reason == "ETCD_UNAVAILABLE"


async def test_missing_replicas_are_reported_at_once() -> None:
    """Each is called once: a user at a terminal should not wait."""
    (one, first), (two, second) = refusing(), refusing()
    with one, two, pytest.raises(ServiceError, match="Connection refused"):
        await ask(first, second)


async def test_a_refusal_is_the_answer(serve: Serve, refused: Callable[[Serve], Awaitable[str]]) -> None:
    """Another replica would reply the same."""
    here = await Replica("b").start(serve)
    with pytest.raises(ServiceError) as caught:
        await ask(await refused(serve), here.address)
    assert caught.value.reason == "RUN_CLOSED"
    assert here.asked == []


@pytest.fixture
def refused() -> Callable[[Serve], Awaitable[str]]:
    """Start a replica that refuses; return its address."""

    async def answer(request: bytes, context: object) -> bytes:
        raise ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "RUN_CLOSED", "it is closed")

    async def start(serve: Serve) -> str:
        return (await serve({"Ask": grpc.unary_unary_rpc_method_handler(answer)})).address

    return start
