"""A client of several replicas finds one that answers, over real connections, in any state of the others."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from rallypoint.rpc import replica_client
from rallypoint.rpc.calls import RetryingCalls
from rallypoint.rpc.endpoint import ClientTLS, Plaintext, ServerOptions
from rallypoint.rpc.pace import Pace
from rallypoint.rpc.replica_client import ReplicaClient
from serving.fleet import Replica, Serve, Tiny, mute, refusing
from support.waiting import PATIENCE, until

# The fixtures' Certificates, by its fields: ca, server, server_key, client, client_key.
Certificates = Any


class Client:
    """Calls over a replica client; `pauses`: the seconds of each pause between attempts."""

    def __init__(self, stack: AsyncExitStack, *places: str, draw: float = 0.0, **board: Any) -> None:
        self.pauses: list[float] = []
        self.pace = Pace(sleep=self._sleep, draw=lambda: draw)
        self.board = ReplicaClient(",".join(places), pace=self.pace, **board)
        stack.push_async_callback(self.board.close)
        self.asking = RetryingCalls(self.board, Tiny, "tiny", self.pace)

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(seconds)

    async def ask(self, **how: Any) -> str:
        """Call; return the name of the replica that answers."""
        async with asyncio.timeout(PATIENCE):
            answer: bytes = await self.asking.call(lambda stub: stub.Ask, b"?", PATIENCE, **how)
        return answer.decode()


@pytest.fixture
async def stack() -> Any:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.mark.parametrize("absent", [refusing, mute], ids=["refuses", "mute"])
async def test_an_absent_replica_costs_no_rest(
    stack: AsyncExitStack, serve: Serve, monkeypatch: pytest.MonkeyPatch, absent: Any
) -> None:
    """The next is called as soon as the failure is clear, and later calls begin there."""
    monkeypatch.setattr(replica_client, "CONNECT_TIMEOUT", 0.2)
    keeper, nowhere = absent()
    stack.callback(keeper.close)
    here = await Replica("b").start(serve)
    client = Client(stack, nowhere, here.address)
    assert [await client.ask() for _ in range(2)] == ["b", "b"]
    assert client.pauses == []
    assert client.board._selector.ordered[0].endpoint.port == int(here.address.rpartition(":")[2])


async def test_a_replica_that_takes_calls_and_never_replies_is_left(
    stack: AsyncExitStack, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that may wait, as for a key, are not interrupted."""
    monkeypatch.setattr(replica_client, "REPLY_TIMEOUT", 0.2)
    hung, here = await Replica("a").start(serve), await Replica("b").start(serve)
    hung.pause = 3600.0
    assert await Client(stack, hung.address, here.address).ask() == "b"
    hung.pause = 1.0
    assert await Client(stack, hung.address, here.address).ask(waits=True) == "a"


async def test_a_slow_replica_can_reply_if_no_other_does(
    stack: AsyncExitStack, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take longer than the first reply timeout by any factor."""
    monkeypatch.setattr(replica_client, "REPLY_TIMEOUT", 0.1)
    keeper, nowhere = refusing()
    stack.callback(keeper.close)
    slow = await Replica("a").start(serve)
    slow.pause = 1.0
    assert await Client(stack, slow.address, nowhere).ask() == "a"


async def test_the_owner_is_followed_at_once_and_remembered(stack: AsyncExitStack, serve: Serve) -> None:
    """It need not be in the list; the replica that redirected gets no more calls."""
    first, owner = await Replica("a").start(serve), await Replica("far").start(serve)
    first.owner = owner.address
    client = Client(stack, first.address)
    assert [await client.ask() for _ in range(3)] == ["far"] * 3
    assert (client.pauses, len(first.asked)) == ([], 1)


async def test_an_owner_that_is_gone_is_looked_for_in_the_list(stack: AsyncExitStack, serve: Serve) -> None:
    """The others name it until another has taken over; then that one is found."""
    first, owner, third = [await Replica(name).start(serve) for name in "abc"]
    first.owner = third.owner = owner.address
    client = Client(stack, first.address, owner.address, third.address, draw=0.3)
    assert await client.ask() == "b"
    await owner.server.stop()
    first.called.clear()
    asking = asyncio.ensure_future(client.ask())
    async with asyncio.timeout(PATIENCE):
        await first.called.wait()
    third.owner, first.owner = None, third.address
    assert await asking == "c"


async def test_a_missing_owner_is_waited_for(stack: AsyncExitStack, serve: Serve) -> None:
    """The pause is the delay in the error, plus jitter."""
    one = await Replica("a").start(serve)
    one.owner = ""
    client = Client(stack, one.address, draw=0.5)
    asking = asyncio.ensure_future(client.ask())
    async with asyncio.timeout(PATIENCE):
        await one.called.wait()
    one.owner = None
    assert await asking == "a"
    assert min(client.pauses) > 0.1


async def test_owners_in_a_circle_cost_rests(stack: AsyncExitStack, serve: Serve) -> None:
    """They cause no storm of calls."""
    one, two = await Replica("a").start(serve), await Replica("b").start(serve)
    one.owner, two.owner = two.address, one.address
    client = Client(stack, one.address, two.address, draw=0.5)
    asking = asyncio.ensure_future(client.ask())
    async with asyncio.timeout(PATIENCE):
        while len(client.pauses) < 3:
            two.called.clear()
            await two.called.wait()
    assert len(one.asked) + len(two.asked) <= 5 * (len(client.pauses) + 1)
    one.owner = None
    assert await asking == "a"


async def test_a_name_stands_for_all_its_addresses(stack: AsyncExitStack, serve: Serve) -> None:
    """They are resolved at the first need, and again when all have failed: replicas move."""
    here = await Replica("a").start(serve, options=ServerOptions(insecure=True))
    port = int(here.address.rpartition(":")[2])
    answers = iter([["127.0.0.2", "127.0.0.3"], ["127.0.0.3", "127.0.0.1"]])
    last: list[str] = []
    asked: list[tuple[str, int]] = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append((host, port))
        last[:] = next(answers, last)
        return last

    client = Client(stack, f"rdzv.example:{port}", security=Plaintext(), resolve=resolve, draw=0.5)
    assert asked == []
    assert await client.ask() == "a"
    assert set(asked) == {("rdzv.example", port)}
    assert len(asked) >= 2


@pytest.mark.parametrize("family", ["127.0.0.1", "::1"])
async def test_localhost_is_found_at_either_address(stack: AsyncExitStack, serve: Serve, family: str) -> None:
    here = await Replica("a").start(serve, options=ServerOptions(host=family))
    port = int(here.address.rpartition(":")[2])
    both = ["::1", "127.0.0.1"]

    async def resolve(host: str, port: int) -> Sequence[str]:
        return both

    for draw in (0.0, 0.9):
        client = Client(stack, f"localhost:{port}", resolve=resolve, draw=draw)
        assert await client.ask() == "a"
        assert client.pauses == []
    assert await Client(stack, here.address).ask() == "a"


async def test_a_certificate_is_checked_for_the_given_name(
    stack: AsyncExitStack, serve: Serve, certificates: Certificates
) -> None:
    """The certificate needn't have the resolved address; a name is always checked."""
    options = dataclasses.replace(
        ServerOptions(host="127.0.0.2"), tls_cert=certificates.server, tls_key=certificates.server_key
    )
    here = await Replica("a").start(serve, options=options)
    port = int(here.address.rpartition(":")[2])
    tls = ClientTLS(ca=certificates.ca)

    async def resolve(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.3", "127.0.0.2"]

    assert await Client(stack, f"localhost:{port}", security=tls, resolve=resolve).ask() == "a"
    stranger = Client(stack, f"stranger.example:{port}", security=tls, resolve=resolve)
    with pytest.raises(Exception, match="the tiny service gave no answer"):
        await stranger.asking.call(lambda stub: stub.Ask, b"?", 2.0)
    assert here.asked == [b"?"]


async def test_an_owner_named_by_address_is_checked_for_the_listed_name(
    stack: AsyncExitStack, serve: Serve, certificates: Certificates
) -> None:
    """Its certificate has that name, but not the address."""
    options = dataclasses.replace(
        ServerOptions(host="127.0.0.2"), tls_cert=certificates.server, tls_key=certificates.server_key
    )
    owner = await Replica("b").start(serve, options=options)
    port = int(owner.address.rpartition(":")[2])
    first = await Replica("a").start(serve, options=dataclasses.replace(options, host="127.0.0.3", port=port))
    first.owner = owner.address

    async def resolve(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.3", "127.0.0.2"]

    client = Client(stack, f"localhost:{port}", security=ClientTLS(ca=certificates.ca), resolve=resolve)
    assert await client.ask() == "b"
    assert (first.asked, client.pauses) == ([b"?"], [])


async def test_many_calls_share_one_connection(stack: AsyncExitStack, serve: Serve) -> None:
    one, two = await Replica("a").start(serve), await Replica("b").start(serve)
    client = Client(stack, one.address, two.address)
    assert set(await asyncio.gather(*(client.ask() for _ in range(50)))) == {"a"}
    assert (len(one.peers), two.peers) == (1, set())


async def test_an_idle_connection_is_closed(
    stack: AsyncExitStack, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is closed after the idle timeout; the connection in use stays."""
    monkeypatch.setattr(replica_client, "IDLE_TIMEOUT", 0.05)
    first, owner = await Replica("a").start(serve), await Replica("b").start(serve)
    first.owner = owner.address
    client = Client(stack, first.address)
    assert await client.ask() == "b"
    await until(lambda: len(client.board._connections) == 1, "the other channel to be closed")
    assert [str(place) for place in client.board._connections] == [owner.address]
    assert await client.ask() == "b"


async def test_a_single_address_is_waited_for_as_by_a_channel(stack: AsyncExitStack, serve: Serve) -> None:
    """A call that begins before the service does succeeds with it, without a separate attempt for each connection."""
    keeper, address = refusing()
    client = Client(stack, address)
    asking = asyncio.ensure_future(client.ask())
    await asyncio.sleep(0)
    keeper.close()
    await Replica("a").start(serve, options=ServerOptions(port=int(address.rpartition(":")[2])))
    assert await asking == "a"
    assert client.pauses == []
