"""Reports, for people and in the log, how long a node still waits for other nodes, and for how many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

from rallypoint.agent.config.job import JobConfig
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.calls import call_any
from rallypoint.rpc.durations import to_seconds
from rallypoint.rpc.errors import ServiceError
from rallypoint.rpc.logs import get_logger, show_progress
from rallypoint.rpc.replica_client import ReplicaClient

_REPORT_INTERVAL = 30.0
"""Seconds between two log lines while nothing changes."""

# Seconds between two requests for the state of the run. In a run of many nodes they are longer, so that all nodes
# together send some hundred requests a second at most; a request costs the service a quarter of a millisecond.
_ASK_INTERVAL = 2.0
_ASK_INTERVAL_PER_NODE = 0.01

_MOST_NAMES = 4

_log = get_logger("rallypoint.agent")


def is_waiting(run: pb.Run) -> bool:
    """Return True if a run waits for nodes."""
    return run.phase == pb.PHASE_JOINABLE


def _in_last_call(run: pb.Run) -> bool:
    return run.node_count >= run.settings.min_nodes


def _names(run: pb.Run) -> list[str]:
    return [node.node_id for node in run.nodes[:_MOST_NAMES]]


def describe_waiting(run: pb.Run, now: datetime) -> str:
    """Return the sentence for people about a run that waits for nodes; `now`: local time."""
    if not _in_last_call(run):
        names = _names(run)
        more = f" and {run.node_count - len(names)} more" if run.node_count > len(names) else ""
        line = f"waiting for nodes: {run.node_count} of {run.settings.min_nodes} here"
        line += f" ({', '.join(names)}{more})" if names else ""
        if not run.HasField("join_time_left"):  # of an older service
            return line
        return f"{line}; gives up at {now + run.join_time_left.ToTimedelta():%H:%M:%S}"
    if not (left := to_seconds(run.last_call_left)):
        return f"waiting for the round to form: {run.node_count} nodes here"
    return f"last call: starts in {left:.0f} s at the latest, at once with {run.settings.max_nodes}"


class WaitReports:
    """Reports the wait of a node for a round, from `begin` to `end`.

    A line is logged at once, when a node comes or goes, and at intervals. On a terminal there is one line below the log
    instead, which is renewed.
    """

    def __init__(self, config: JobConfig, rendezvous: ReplicaClient) -> None:
        """Set up; nothing is reported yet."""
        self._config = config
        self._rendezvous = rendezvous
        self._task: asyncio.Task[None] | None = None

    def begin(self, begin: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        """Report from now on. `begin`: runs a coroutine in the background."""
        if self._task is None:
            self._task = begin(self._report())

    def end(self) -> None:
        """Report no longer."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _report(self) -> None:
        clock = asyncio.get_running_loop().time
        last, next_report = None, 0.0
        try:
            while True:
                run = await self._ask()
                if run is not None:
                    line = describe_waiting(run, datetime.now(UTC).astimezone())
                    seen = (run.node_count, _in_last_call(run))
                    if not show_progress(line) and (seen != last or clock() >= next_report):
                        _log_wait(run, line)
                        last, next_report = seen, clock() + _REPORT_INTERVAL
                here = run.node_count if run is not None else 0
                await asyncio.sleep(min(max(_ASK_INTERVAL, here * _ASK_INTERVAL_PER_NODE), _REPORT_INTERVAL))
        finally:
            show_progress("")

    async def _ask(self) -> pb.Run | None:
        """Return the state of the run; None if it waits no longer, or can't be read: the membership reports why."""
        request = pb.GetRunRequest(run_id=self._config.run_id, owner_only=True, most_nodes=_MOST_NAMES)
        try:
            async with asyncio.timeout(_REPORT_INTERVAL):
                response = await call_any(
                    self._rendezvous, pb_grpc.RendezvousServiceStub, lambda stub: stub.GetRun(request)
                )
        except (TimeoutError, ServiceError):
            return None
        return response.run if is_waiting(response.run) else None


def _log_wait(run: pb.Run, line: str) -> None:
    times = {"join_time_left": run.join_time_left, "last_call_left": run.last_call_left}
    _log.info(
        "last call" if _in_last_call(run) else "waiting for nodes",
        here=run.node_count,
        nodes=_names(run),
        min_nodes=run.settings.min_nodes,
        max_nodes=run.settings.max_nodes,
        **{name: round(to_seconds(left), 3) for name, left in times.items() if run.HasField(name)},  # type: ignore[arg-type]
        sentence=line,
    )
