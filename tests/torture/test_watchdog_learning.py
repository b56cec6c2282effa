"""The learned durations of a run outlive the watchdog: by its agents alone, and by its file alone."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from rallypoint.rpc.durations import to_seconds
from rallypoint.timer.v1 import timer_service_pb2 as pb
from rallypoint.timer.v1 import timer_service_pb2_grpc as pb_grpc
from support.waiting import until
from torture.length import ordinarily
from torture.mortal_server import PATIENCE, serving
from torture.mortal_watchdog import RUN, GuardedNode, MortalWatchdog

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(5 * PATIENCE)]

SCOPE = "step"
WARM_UP = 10
FACTOR = 2.0
LEARNING = ("--learn-warm-up", f"{WARM_UP}", "--learn-factor", f"{FACTOR}", "--learn-least", "0.2")
NODES = 3
EACH = 20  # completions on each node, before the first kill
LONGEST = 0.4  # seconds of the longest of them
KILLS = ordinarily(2, in_full=10)


async def learned(channel: grpc.aio.Channel) -> pb.Scope | None:
    """Return the service's data of the scope."""
    request = pb.ListScopesRequest(run_id=RUN)
    answer = await pb_grpc.TimerServiceStub(channel).ListScopes(
        request, wait_for_ready=True, timeout=PATIENCE
    )
    return next((scope for scope in answer.scopes if scope.scope == SCOPE), None)


async def until_learned(channel: grpc.aio.Channel, count: int) -> pb.Scope:
    """Wait until the service has at least `count` completions."""
    deadline = time.monotonic() + PATIENCE
    while (scope := await learned(channel)) is None or scope.count < count:
        assert time.monotonic() < deadline, f"{count} completions were seen; the service knows: {scope}"
        await asyncio.sleep(0.02)
    return scope


def knows(node: GuardedNode) -> bool:
    """Return True if an agent has enough for the next service. Only its next stream would show it."""
    lesson = node.client._mirror._learned.get(SCOPE)
    return lesson is not None and lesson.count >= WARM_UP and lesson.longest >= LONGEST


def check_duration(scope: pb.Scope) -> None:
    """Check that the scope's timeout follows from the longest completion."""
    assert to_seconds(scope.longest) == pytest.approx(LONGEST)
    assert to_seconds(scope.after) == pytest.approx(LONGEST * FACTOR)


async def check_guarded(node: GuardedNode, worker: str) -> None:
    """Check that a worker that hangs in the scope is reported after the learned timeout and not before."""
    began = time.monotonic()
    node.client.acquire(worker, f"{SCOPE}~{worker}", 0.0, began, learned_as=SCOPE)
    await until(lambda: f"{SCOPE}~{worker}" in dict(node.reaped), "the worker to be reaped")
    assert dict(node.reaped)[f"{SCOPE}~{worker}"] - began >= LONGEST * FACTOR


async def test_agents_restore_the_learned_data_of_a_service_without_a_file(tmp_path: Path) -> None:
    """Killed again and again, it never has more completions than there were, and always enough."""
    server = MortalWatchdog(tmp_path, *LEARNING)
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(serving(server))
        nodes = [GuardedNode(f"node-{number}", server.endpoint) for number in range(NODES)]
        for node in nodes:
            stack.push_async_callback(node.close)
            node.client.observe(SCOPE, EACH, LONGEST)
        seen = NODES * EACH
        assert (await until_learned(channel, seen)).count == seen
        await until(lambda: all(map(knows, nodes)), "every agent to know")
        for kill in range(KILLS):
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            scope = await until_learned(channel, WARM_UP)
            assert scope.count <= seen
            check_duration(scope)
            await check_guarded(nodes[kill % NODES], f"{kill}@1")
            nodes[kill % NODES].client.observe(SCOPE, 1, LONGEST / 2)
            seen += 1
    assert server.complaints() == []


async def test_the_file_alone_restores_learned_data(tmp_path: Path) -> None:
    """All agents have ended when the service is killed; those of the run's next start are guarded at once."""
    file = tmp_path / "learned.json"
    server = MortalWatchdog(tmp_path / "server", *LEARNING, learned=file)
    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(serving(server))
        node = GuardedNode("node-0", server.endpoint)
        node.client.observe(SCOPE, EACH, LONGEST)
        await until_learned(channel, EACH)
        await node.close()
        await until(lambda: file.exists() and SCOPE in file.read_text(), "the file to be written")
        for kill in range(KILLS):
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            scope = await learned(channel)
            assert scope is not None
            assert scope.count == EACH
            check_duration(scope)
            node = GuardedNode(f"node-{kill + 1}", server.endpoint)
            await check_guarded(node, f"{kill}@1")
            await node.close()
    assert server.complaints() == []
