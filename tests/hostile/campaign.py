"""A whole attack, and the conditions that the server must meet during it and after it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from hostile.attacker import Attacker
from hostile.contract import documented_reasons
from hostile.insider import Insider
from hostile.kinds import Kind
from hostile.others import others_of
from hostile.requests import hostile_request
from hostile.target import Target
from hostile.verdict import fault
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import Plaintext
from support.waiting import PATIENCE

_CONNECTIONS = 8
_SENDERS = 64
_PARTS = 10
# Levels of log records that a server may write about itself.
_LEVELS = frozenset({"info", "warning"})
# An attack stops after so many errors: the rest would be more of the same.
_MOST_FAULTS = 10


@dataclass(slots=True)
class Report:
    """The results of an attack."""

    seed: int
    sent: int = 0
    seconds: float = 0.0
    server_cpu: float = 0.0
    faults: list[str] = field(default_factory=list)
    answered: Counter[str] = field(default_factory=Counter)
    """Number of calls that each method answered with a message."""
    refused: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Number of refusals of each service by code and reason."""
    memory: list[int] = field(default_factory=list)
    """Bytes that the server had in RAM after each tenth."""
    beside: str = ""
    """Results of the clients that are not part of the attack."""


async def attack(server: Target, kind: Kind, seed: int, count: int) -> Report:
    """Send that many hostile requests, beside clients that must not notice, and check the server afterwards.

    Raises:
        AssertionError: The server is not as it must be. Wrong single answers are in the report.
    """
    report, insider = Report(seed), Insider()
    others = others_of(kind, server.address)
    await others.begin()
    began, cpu = time.monotonic(), server.cpu_seconds()
    for part in range(_PARTS):
        numbers = range(count * part // _PARTS, count * (part + 1) // _PARTS)
        await barrage(
            server.address,
            kind,
            report,
            insider,
            numbers,
            has_ended=lambda: server.process.poll() is not None,
        )
        if (code := server.process.poll()) is not None:
            report.faults.append(f"the server ended with exit code {code}")
            return report
        report.memory.append(server.resident_bytes())
        await others.check()
    report.seconds, report.server_cpu = time.monotonic() - began, server.cpu_seconds() - cpu
    await _check_healthy(server, kind)
    report.beside = await others.finish()
    return report


def memory_growth(report: Report) -> int:
    """Return by how much the least in the second half of an attack exceeds the least in its first half, bytes.

    The least, because it goes up and down by about 15 MiB: gRPC leaves cycles of objects behind with every call,
    which are freed by the next garbage collection.
    """
    half = len(report.memory) // 2
    return min(report.memory[half:]) - min(report.memory[:half])


def log_faults(server: Target, kind: Kind) -> list[str]:
    """Return faults in the log of a server that has ended: bugs, and calls that stayed open without a client."""
    faults = [
        f"in the server's log: {record}"
        for record in server.records()
        if record["level"] not in _levels(kind, record) or "Traceback" in str(record)
    ]
    # An agent contains servers; each logs that it drains.
    draining = [record["open_calls"] for record in server.records() if "open_calls" in record]
    if not draining or any(draining):
        faults.append(f"{draining} calls were still open when everybody had gone")
    return faults


def _levels(kind: Kind, record: Mapping[str, Any]) -> Collection[str]:
    """Return the levels that a record of a server's log may have: a job has errors of its own."""
    return _LEVELS | {"error"} if kind.runs_jobs and {"run_id", "rank"} & record.keys() else _LEVELS


async def barrage(
    address: str,
    kind: Kind,
    report: Report,
    insider: Insider,
    numbers: range,
    *,
    has_ended: Callable[[], bool] = lambda: False,
) -> None:
    """Send the requests of those numbers, many at a time, and check the answers; return early once `has_ended`."""
    attacker = Attacker(address, _CONNECTIONS, insider)
    waiting = iter(numbers)
    documented = documented_reasons()

    async def send_one_after_another(numbers: Iterator[int]) -> None:
        for number in numbers:
            if len(report.faults) >= _MOST_FAULTS or has_ended():
                return
            request = hostile_request(report.seed, number, kind)
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


async def _check_healthy(server: Target, kind: Kind) -> None:
    async with open_channel(server.address, Plaintext()) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", *kind.services):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, service
