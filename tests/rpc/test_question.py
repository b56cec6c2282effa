"""A question goes to each replica until one answers; what must not be done twice is asked twice of nobody."""

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


async def ask(*places: str, repeatable: bool = True) -> str:
    """Who answers, asking in this order."""
    async with ReplicaClient(",".join(places)) as board, asyncio.timeout(PATIENCE):
        board._selector._start = 0
        answer: bytes = await call_any(board, Tiny, lambda stub: stub.Ask(b"?"), repeatable=repeatable)
    return answer.decode()


@pytest.mark.parametrize("repeatable", [True, False])
async def test_who_is_not_there_is_passed_over(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, repeatable: bool
) -> None:
    """Nothing was sent to one that accepts no connection, so anything may be asked of the next."""
    monkeypatch.setattr(replica_client, "CONNECT_TIMEOUT", 0.2)
    keeper, silent = mute()
    here = await Replica("a").start(serve)
    with keeper:
        assert await ask(silent, here.address, repeatable=repeatable) == "a"


@pytest.mark.parametrize("repeatable", [True, False])
async def test_the_owner_is_followed(serve: Serve, repeatable: bool) -> None:
    """Whoever names it did nothing."""
    first, owner = await Replica("a").start(serve), await Replica("b").start(serve)
    first.owner = owner.address
    assert await ask(first.address, repeatable=repeatable) == "b"


@pytest.mark.parametrize("repeatable", [True, False])
async def test_a_run_without_an_owner_is_waited_for(serve: Serve, repeatable: bool) -> None:
    one = await Replica("a").start(serve)
    one.owner = ""
    asking = asyncio.ensure_future(ask(one.address, repeatable=repeatable))
    async with asyncio.timeout(PATIENCE):
        await one.called.wait()
    one.owner = None
    assert await asking == "a"


@pytest.mark.parametrize("owner", ["named", ""])
async def test_an_owner_that_changed_on_the_way_is_followed_by_what_may_be_repeated(
    serve: Serve, owner: str
) -> None:
    """At once where the next one is known. Anything else may have been done: it is not asked again."""
    first, second = await Replica("a").start(serve), await Replica("b").start(serve)
    first.reason, first.owner = "OWNERSHIP_LOST", owner and second.address
    with pytest.raises(ServiceError) as refused:
        await ask(first.address, repeatable=False)
    assert refused.value.reason == "OUTCOME_UNKNOWN"
    assert second.asked == []
    first.called.clear()
    asking = asyncio.ensure_future(ask(first.address, repeatable=True))
    async with asyncio.timeout(PATIENCE):
        await first.called.wait()
    if not owner:
        first.owner = None
    assert await asking == ("b" if owner else "a")
    assert len(second.asked) == bool(owner)


@pytest.mark.parametrize("repeatable", [True, False])
async def test_what_was_under_way_at_one_that_died(serve: Serve, repeatable: bool) -> None:
    """Is asked of another only if it may be done twice."""
    dying, here = await Replica("a").start(serve), await Replica("b").start(serve)
    dying.pause = 3600.0
    asking = asyncio.ensure_future(ask(dying.address, here.address, repeatable=repeatable))
    async with asyncio.timeout(PATIENCE):
        await dying.called.wait()
    await dying.server.stop()
    if repeatable:
        assert await asking == "b"
    else:
        with pytest.raises(ServiceError) as caught:
            await asking
        assert caught.value.reason == "OUTCOME_UNKNOWN"
        assert "so it may have been done" in caught.value.message
    assert len(here.asked) == repeatable


async def test_silence_is_left_only_by_what_may_be_repeated(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_client, "REPLY_TIMEOUT", 0.2)
    slow, here = await Replica("a").start(serve), await Replica("b").start(serve)
    slow.pause = 1.0
    assert await ask(slow.address, here.address) == "b"
    assert await ask(slow.address, here.address, repeatable=False) == "a"


@pytest.mark.parametrize("first", ["there", "gone"])
async def test_what_is_wrong_is_told_as_those_have_it_who_are_there(serve: Serve, first: str) -> None:
    """Whichever was asked last: that another one is gone is not why there is no answer."""
    there = await Replica("a").start(serve)
    there.reason, there.owner = "ETCD_UNAVAILABLE", ""
    nobody, gone = refusing()
    places = [there.address, gone] if first == "there" else [gone, there.address]
    with nobody, pytest.raises(ServiceError) as refused:
        await ask(*places)
    assert refused.value.reason == "ETCD_UNAVAILABLE"


async def test_nobody_there_is_told_at_once() -> None:
    """After each was asked: nobody waits who asked at a terminal."""
    (one, first), (two, second) = refusing(), refusing()
    with one, two, pytest.raises(ServiceError, match="Connection refused"):
        await ask(first, second)


async def test_a_refusal_is_the_answer(serve: Serve, refused: Callable[[Serve], Awaitable[str]]) -> None:
    """Another replica would say the same."""
    here = await Replica("b").start(serve)
    with pytest.raises(ServiceError) as caught:
        await ask(await refused(serve), here.address)
    assert caught.value.reason == "RUN_CLOSED"
    assert here.asked == []


@pytest.fixture
def refused() -> Callable[[Serve], Awaitable[str]]:
    """A replica that refuses; its address."""

    async def answer(request: bytes, context: object) -> bytes:
        raise ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "RUN_CLOSED", "it is closed")

    async def start(serve: Serve) -> str:
        return (await serve({"Ask": grpc.unary_unary_rpc_method_handler(answer)})).address

    return start
