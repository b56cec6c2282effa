"""A whole attack, and what must be true of the server while it lasts and when it is over."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from hostile.attacker import Attacker
from hostile.bystander import Bystander
from hostile.contract import documented_reasons
from hostile.requests import hostile_request
from hostile.target import MOST_NODES, MOST_RUNS, Target
from hostile.verdict import fault
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import Plaintext
from support.waiting import PATIENCE

_CONNECTIONS = 8
_SENDERS = 64
_PARTS = 10
# Errors for which an attack is broken off: the rest would be more of the same.
_MOST_FAULTS = 10


@dataclass(slots=True)
class Report:
    """What an attack found."""

    seed: int
    sent: int = 0
    seconds: float = 0.0
    server_cpu: float = 0.0
    faults: list[str] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)
    """How often each method answered with a message."""
    refused: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """How often each service refused with each code and reason."""
    memory: list[int] = field(default_factory=list)
    """Bytes that the server had in RAM after each tenth."""
    runs: int = 0
    """Runs that there were at the end."""
    slowest_round: float = 0.0
    """Seconds that the bystanders' rounds took to form, at most."""


async def attack(server: Target, seed: int, count: int) -> Report:
    """Send that many hostile requests, with two jobs of others beside them, and look at the server afterwards.

    Raises:
        AssertionError: The server is not as it must be. What is wrong with single answers is in the report.
    """
    report = Report(seed)
    bystander, newcomer = (Bystander(server.address, name) for name in ("bystander", "newcomer"))
    await bystander.begin()
    began, cpu = time.monotonic(), server.cpu_seconds()
    for part in range(_PARTS):
        await _barrage(server, report, range(count * part // _PARTS, count * (part + 1) // _PARTS))
        report.memory.append(server.resident_bytes())
        bystander.check()
    report.seconds, report.server_cpu = time.monotonic() - began, server.cpu_seconds() - cpu
    await _check_healthy(server)
    await _check_round_forms(report, bystander)
    await _check_limits(report, bystander)
    await _clear_up(bystander)
    await newcomer.begin()
    await newcomer.close()
    await newcomer.hang_up()
    await bystander.close()
    await _until_expired(bystander, 0)
    await bystander.hang_up()
    return report


def memory_growth(report: Report) -> int:
    """By how much the least in the second half of an attack exceeds the least in its first half, bytes.

    The least, because it goes up and down by some 15 MiB: gRPC leaves cycles of objects behind with every call, which
    are freed when the garbage collector comes by.
    """
    half = len(report.memory) // 2
    return min(report.memory[half:]) - min(report.memory[:half])


def log_faults(server: Target) -> list[str]:
    """What a server that has ended says about itself that it must not: bugs, and calls that nobody made any more."""
    faults = [
        f"in the server's log: {record}"
        for record in server.records()
        if record["level"] not in ("info", "warning") or "Traceback" in str(record)
    ]
    draining = next(record for record in server.records() if record["event"] == "draining")
    if draining["open_calls"]:
        faults.append(f"{draining['open_calls']} calls were still open when everybody had gone")
    return faults


async def _barrage(server: Target, report: Report, numbers: range) -> None:
    attacker = Attacker(server.address, _CONNECTIONS)
    waiting = iter(numbers)
    documented = documented_reasons()

    async def send_one_after_another(numbers: Iterator[int]) -> None:
        for number in numbers:
            if len(report.faults) >= _MOST_FAULTS or server.process.poll() is not None:
                return
            request = hostile_request(report.seed, number)
            try:
                outcome = await attacker.send(request)
            except TimeoutError:
                report.faults.append(f"it never ended\n{request}")
                continue
            report.sent += 1
            if (wrong := fault(request, outcome, documented)) is not None:
                report.faults.append(f"{wrong}\n{request}")
            if outcome.answers:
                report.answered[request.path] += 1
            if outcome.reason:
                service = request.path.split("/")[1]
                report.refused[service, outcome.code.name, outcome.reason] += 1

    # All take from the same iterator, so that none is sent twice.
    await asyncio.gather(*(send_one_after_another(waiting) for _ in range(_SENDERS)))
    await attacker.close()
    if server.process.poll() is not None:
        report.faults.append(f"the server ended with exit code {server.process.returncode}")


async def _check_healthy(server: Target) -> None:
    async with open_channel(server.address, Plaintext()) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "RendezvousService", "StoreService", "StateService"):
            service = f"rallypoint.rendezvous.v1.{name}" if name else ""
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, service


async def _check_round_forms(report: Report, bystander: Bystander) -> None:
    for _ in range(3):
        began = time.monotonic()
        await bystander.stub.RestartRun(pb.RestartRunRequest(run_id=bystander.run_id), timeout=PATIENCE)
        await bystander.formed()
        report.slowest_round = max(report.slowest_round, time.monotonic() - began)


async def _check_limits(report: Report, bystander: Bystander) -> None:
    """Whatever names were made up: no more runs and nodes than there may be, and nobody left who watches."""
    runs = await _all_runs(bystander)
    report.runs = len(runs)
    assert report.runs <= MOST_RUNS
    assert max(run.node_count for run in runs) <= MOST_NODES
    for run in runs:
        watching = bystander.stub.WatchRun(pb.WatchRunRequest(run_id=run.run_id), timeout=PATIENCE)
        with suppress(grpc.aio.AioRpcError):
            assert await watching.read() is not grpc.aio.EOF
        assert not watching.done() or await watching.code() in (
            grpc.StatusCode.OK,
            grpc.StatusCode.NOT_FOUND,
        ), run
        watching.cancel()


async def _clear_up(bystander: Bystander) -> None:
    """An operator ends what the attack began; then it expires."""
    for run in await _all_runs(bystander):
        if run.run_id != bystander.run_id:
            with suppress(grpc.aio.AioRpcError):  # it expired meanwhile
                await bystander.stub.CloseRun(pb.CloseRunRequest(run_id=run.run_id), timeout=PATIENCE)
    await _until_expired(bystander, 1)


async def _until_expired(bystander: Bystander, left: int) -> None:
    """Wait until only so many runs are left; those without nodes expire."""
    began = time.monotonic()
    while len(runs := await _all_runs(bystander)) > left:
        assert time.monotonic() - began < PATIENCE, runs
        await asyncio.sleep(0.05)


async def _all_runs(bystander: Bystander) -> list[pb.Run]:
    runs: list[pb.Run] = []
    token = ""
    while True:
        request = pb.ListRunsRequest(page_token=token)
        page = await bystander.stub.ListRuns(request, timeout=PATIENCE)
        runs += page.runs
        token = page.next_page_token
        if not token:
            return runs
