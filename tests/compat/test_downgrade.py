"""The latest release replaces this version and reads its journal: new decisions have a form that it can read."""

from __future__ import annotations

import subprocess
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from clients.members import Service
from compat.golden_journal import RUN, Served, differences
from house.source import ROOT
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import store_service_pb2 as store_pb
from support.refusals import refusal
from support.waiting import PATIENCE

AGAIN_FAILED = "failed twice"


@pytest.fixture(scope="module")
def released() -> Path:
    """The `rallypoint` of the latest release."""
    built = subprocess.run([ROOT / ".ci" / "build-revision"], check=False, capture_output=True, text=True)
    if built.returncode:
        pytest.skip(f"the release can't be built: {built.stderr[-500:]}")
    return Path(built.stdout.strip())


class Node:
    """The only node of a run."""

    def __init__(self, service: Served, run: str) -> None:
        self._service, self._run = service, run
        self._lease = pb.Lease()
        self._stream: Any = None

    async def join(self) -> pb.NodeUpdate:
        """Join; return the update with which a round begins."""
        settings = pb.RunSettings(min_nodes=1, max_nodes=1, max_restarts=0)
        settings.keep_alive_interval.FromSeconds(20)  # it sends no heartbeats: a lease lives for a minute
        self._stream = self._service.runs.Join(timeout=10 * PATIENCE)
        await self._send(
            join=pb.JoinRun(
                run_id=self._run,
                node_id="a",
                settings=settings,
                address="a",
                local_world_size=1,
                stays_until_gone=True,
            )
        )
        round_ = (await self._update(pb.PHASE_FROZEN)).assignment.round
        await self._send(confirm=pb.ConfirmRound(round=round_, master_port=1))
        return await self._update(pb.PHASE_FINAL)

    async def resume(self, service: Served) -> pb.NodeUpdate:
        """Resume at another process; return the state of the round."""
        self._service = service
        self._stream = service.runs.Join(timeout=10 * PATIENCE)
        lease = self._lease
        resume = pb.ResumeRun(run_id=self._run, node_id="a", lease=lease.number, token=lease.token)
        await self._send(resume=resume)
        return await self._update(pb.PHASE_FINAL)

    async def fail(self, round_: int) -> None:
        """Report a failure, after which no restart is left; leave when the run is closed."""
        failure = pb.WorkerFailure(round=round_, rank=0, local_rank=0, exit_code=1)
        failure.age.FromSeconds(1)
        await self._send(worker_failed=failure)
        await self._closed()

    async def succeed(self, round_: int) -> None:
        """Report success; leave when the run is closed."""
        await self._send(succeeded=pb.ReportSuccess(round=round_))
        await self._closed()

    async def add(self, round_: int) -> int:
        """Add 1 to a key, in the space of the run and in that of a round; return the sum."""
        writer = store_pb.StoreWriter(node_id="a", lease=self._lease.number, token=self._lease.token)
        for space in (0, round_):
            request = store_pb.AddRequest(run_id=self._run, round=space, key="sum", amount=1, writer=writer)
            value: int = (await self._service.store.Add(request, timeout=PATIENCE)).value
        return value

    async def _closed(self) -> None:
        await self._update(pb.PHASE_CLOSED)
        with suppress(grpc.aio.AioRpcError):  # the release ends the stream at once
            await self._send(leave=pb.LeaveRun(reason="the run is over"))
            await self._stream.read()

    async def _send(self, **message: Any) -> None:
        await self._stream.write(pb.JoinRequest(**message))

    async def _update(self, phase: int) -> pb.NodeUpdate:
        while (received := await self._stream.read()) is not grpc.aio.EOF:
            if received.HasField("lease"):
                self._lease = received.lease
            if received.HasField("draining"):
                raise AssertionError(received)
            if received.update.phase == phase:
                update: pb.NodeUpdate = received.update
                return update
            if received.update.settling:
                await self._send(heartbeat=pb.Heartbeat())
        raise AssertionError("the stream is over")


def _differences(now: dict[str, Any], of_release: dict[str, Any]) -> list[str]:
    """Return the differences, without the setting that the release does not have."""
    return [each for each in differences(now, of_release) if "/settings/reopen: " not in each]


async def _reopened(service: Served, run: str) -> tuple[Node, int]:
    """Let a run fail, and join it again; return the node and its round."""
    first = Node(service, run)
    round_ = (await first.join()).assignment.round
    assert await first.add(round_) == 1
    await first.fail(round_)
    again = Node(service, run)
    return again, (await again.join()).assignment.round


@pytest.mark.slow
@pytest.mark.timeout(1_200)
async def test_a_reopened_run_goes_on_at_the_release_and_back(tmp_path: Path, released: Path) -> None:
    """One runs, with its store, and one is closed again: for the release, that one is closed for good."""
    process = Service(tmp_path)
    # A channel stays open until its process is killed: the service keeps a node without a stream only two seconds.
    async with AsyncExitStack() as stack:
        stack.push_async_callback(process.kill)

        async def start(*program: Path) -> Served:
            await process.kill()
            await process.start(*program)
            return Served(await stack.enter_async_context(grpc.aio.insecure_channel(process.endpoint)))

        service = await start()
        running, round_ = await _reopened(service, RUN)
        assert await running.add(round_) == 1, "the store is that of a new run"
        closed, last = await _reopened(service, AGAIN_FAILED)
        await closed.fail(last)
        before = await service.contents()

        service = await start(released)
        update = await running.resume(service)
        assert (update.assignment.round, update.restart_count) == (round_, 0)
        assert _differences(before, await service.contents()) == []
        assert await running.add(round_) == 2
        assert (await refusal(Node(service, AGAIN_FAILED).join())).reason == "RUN_CLOSED"
        await running.succeed(round_)
        found = await service.contents()

        service = await start()
        assert _differences(await service.contents(), found) == []
        assert (await Node(service, AGAIN_FAILED).join()).assignment.round > last
