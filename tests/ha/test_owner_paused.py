"""The owner of a run is stopped past its lease, with requests in its sockets, and continues when another owns it."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from ha.cluster import PATIENCE, REPLICAS, TTL, Cluster, running_cluster
from ha.crowd import steady, watched_crowd
from ha.length import ordinarily
from ha.runs import run_everywhere
from ha.waiting import until
from rallypoint.rendezvous.base.entries import Writer
from rallypoint.rendezvous.state.client import FencedStateClient
from rallypoint.rendezvous.state.core import FencedState
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rendezvous.v1 import state_service_pb2 as state_pb
from rallypoint.rendezvous.v1 import state_service_pb2_grpc as state_grpc
from rallypoint.rendezvous.v1 import store_service_pb2 as store_pb
from rallypoint.rendezvous.v1 import store_service_pb2_grpc as store_grpc
from rallypoint.rpc.endpoint import Plaintext
from rallypoint.rpc.errors import decode
from rallypoint.rpc.replica_client import ReplicaClient
from support.joining import join_request

pytestmark = [pytest.mark.slow, pytest.mark.integration]

RUN = "paused-owners"
NODES = 8
REPEATS = ordinarily(3, in_full=50)
STORE_WRITES = 20


@pytest.mark.timeout(3 * PATIENCE + REPEATS * PATIENCE)
async def test_requests_queued_in_a_stopped_owner_have_no_effect(tmp_path: Path) -> None:
    """States, keys and joins sent to the stopped owner are refused, do not name it as owner, and have no effect."""
    loop = asyncio.get_running_loop()
    pauses: list[float] = []
    redirected: list[float] = []
    reasons: Counter[str] = Counter()
    async with (
        running_cluster(tmp_path) as cluster,
        watched_crowd(cluster.endpoints, RUN, NODES) as crowd,
        ReplicaClient(cluster.endpoints, Plaintext()) as board,
    ):
        round_ = await crowd.agree(PATIENCE)
        states = FencedStateClient(board, RUN)
        for repeat in range(REPEATS):
            owner = await cluster.owner(RUN)
            async with _channel(cluster, owner) as channel:
                sleeper = Writes(channel, f"sleeper-{repeat}", crowd.nodes[0].writer)
                token = await sleeper.current_token()
                cluster.process(owner).pause()
                paused = loop.time()
                sleeper.send(token)
                await cluster.expired(owner)
                await cluster.owner(RUN, but=[owner])
                # With the same token: if the stopped owner had set its state before, this one would not be set.
                outcome = await states.set(f"heir-{repeat}".encode(), token)
                assert outcome.has_set
                cluster.process(owner).resume()
                pauses.append(loop.time() - paused)
                for refusal in await sleeper.refusals():
                    reasons[refusal.reason] += 1
                    assert refusal.code is grpc.StatusCode.UNAVAILABLE, refusal
                    assert refusal.owner != cluster.replicas.endpoint(owner), refusal
                redirected.append(await _names_the_new_owner(cluster, owner))
                await cluster.registered(owner)
                for name in REPLICAS:
                    async with _channel(cluster, name) as reading:
                        await sleeper.has_left_nothing(reading, outcome.current)
        run = await run_everywhere(cluster, RUN)
        assert (run.phase, run.round, run.restart_count) == (pb.PHASE_FINAL, round_, 0)
        assert {node.node_id for node in run.nodes} == {node.name for node in crowd.watched}
        assert crowd.disturbances == []
        assert cluster.replicas.complaints() == []
    print(  # noqa: T201
        f"{REPEATS} owners stopped for {min(pauses):.1f} to {max(pauses):.1f} s, lease {TTL:g} s: of the "
        f"{sum(reasons.values())} requests that waited in them none landed, answered {dict(reasons)}; "
        f"awake, it named the new owner after {max(redirected):.2f} s at most"
    )


@dataclass(frozen=True, slots=True)
class Refusal:
    """The error with which a request was refused."""

    code: grpc.StatusCode
    reason: str
    owner: str


async def _state_at(states: state_grpc.StateServiceAsyncStub) -> state_pb.FencedState:
    """Read the state at one replica; it redirects a reader to the owner now and then, so that the use counts."""
    request = state_pb.GetStateRequest(run_id=RUN)
    try:
        return (await states.GetState(request, timeout=PATIENCE)).current
    except grpc.aio.AioRpcError as error:
        if not decode(error).metadata.get("owner_address"):
            raise
        return (await states.GetState(request, timeout=PATIENCE)).current


class Writes:
    """Requests of all kinds that change a run, over one connection to one replica, each sent once."""

    def __init__(self, channel: grpc.aio.Channel, name: str, writer: Writer) -> None:
        """Use a connection, a name that is part of everything written, and the lease of a node."""
        self._name = name
        self._writer = store_pb.StoreWriter(node_id=writer.node_id, lease=writer.lease, token=writer.token)
        self._states = state_grpc.StateServiceStub(channel)
        self._store = store_grpc.StoreServiceStub(channel)
        self._rendezvous = pb_grpc.RendezvousServiceStub(channel)
        self._sent: list[asyncio.Task[Any]] = []

    async def current_token(self) -> bytes | None:
        """Return the token of the present state, None if there is none. The connection is open afterwards."""
        request = state_pb.GetStateRequest(run_id=RUN)
        answer = await self._states.GetState(request, timeout=PATIENCE, wait_for_ready=True)
        return answer.current.token if answer.HasField("current") else None

    async def set_state(self, token: bytes | None) -> state_pb.SetStateResponse:
        """Replace the state that a token stands for."""
        request = state_pb.SetStateRequest(run_id=RUN, state=self._name.encode(), token=token)
        return await self._states.SetState(request, timeout=PATIENCE)

    def send(self, token: bytes | None) -> None:
        """Send requests of each kind without waiting for replies."""
        self._begin(self.set_state(token))
        for number in range(STORE_WRITES):
            request = store_pb.SetRequest(
                run_id=RUN, key=f"{self._name}/{number}", value=b"landed", writer=self._writer
            )
            self._begin(self._store.Set(request, timeout=PATIENCE))
        self._begin(self._join())

    async def refusals(self) -> list[Refusal]:
        """Return the refusals of all sent requests.

        Raises:
            AssertionError: A request was not refused.
        """
        found = []
        for answer in await asyncio.gather(*self._sent, return_exceptions=True):
            assert isinstance(answer, grpc.aio.AioRpcError), f"it was answered {answer!r}"
            error = decode(answer)
            found.append(Refusal(error.code, error.reason, error.metadata.get("owner_address", "")))
        return found

    async def has_left_nothing(self, channel: grpc.aio.Channel, state: FencedState | None) -> None:
        """Check at one replica that no request has had an effect, and that `state` is the present one.

        Raises:
            AssertionError: A request has had an effect.
        """
        states = state_grpc.StateServiceStub(channel)
        store = store_grpc.StoreServiceStub(channel)
        rendezvous = pb_grpc.RendezvousServiceStub(channel)
        current = await _state_at(states)
        assert state is not None
        assert current.token == state.token, f"{current.state!r} took the place of {state.state!r}"
        keys = (await store.ListKeys(store_pb.ListKeysRequest(run_id=RUN), timeout=PATIENCE)).keys
        assert not [key for key in keys if key.startswith(self._name)], keys
        run = (await rendezvous.GetRun(pb.GetRunRequest(run_id=RUN), timeout=PATIENCE)).run
        assert self._name not in {node.node_id for node in run.nodes}

    def _begin(self, call: Any) -> None:
        self._sent.append(asyncio.ensure_future(_answer(call)))

    async def _join(self) -> Any:
        stream = self._rendezvous.Join(timeout=PATIENCE)
        await stream.write(join_request(RUN, self._name, steady(NODES), local_world_size=2))
        return await stream.read()


async def _answer(call: Any) -> Any:
    return await call


def _channel(cluster: Cluster, name: str) -> grpc.aio.Channel:
    """Open a connection to one replica without retries: requests wait in the socket of a stopped process."""
    return grpc.aio.insecure_channel(
        cluster.replicas.endpoint(name),
        options=[("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)],
    )


async def _names_the_new_owner(cluster: Cluster, sleeper: str) -> float:
    """Wait until the former owner names the new one to a client, or owns the run again; return the seconds taken."""
    began = asyncio.get_running_loop().time()

    async def look() -> str:
        if (new_owner := await cluster.owner(RUN)) == sleeper:
            return ""
        async with _channel(cluster, sleeper) as channel:
            try:
                watching = pb_grpc.RendezvousServiceStub(channel).WatchRun(
                    pb.WatchRunRequest(run_id=RUN), timeout=10
                )
                await watching.read()
            except grpc.aio.AioRpcError as failure:
                error = decode(failure)
                told = error.metadata.get("owner_address", "")
                return (
                    ""
                    if told == cluster.replicas.endpoint(new_owner)
                    else f"{error!r}, owner {told or 'not named'}"
                )
            return f"{sleeper} still streams"

    await until(f"{sleeper} to name the owner", look)
    return asyncio.get_running_loop().time() - began
