"""Reports, for people and in the log, how long a node still waits for other nodes, and for how many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
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


@dataclass(frozen=True, slots=True)
class Waiting:
    """The state of a run that waits for nodes.

    Attributes:
        here: Number of nodes that have joined.
        names: Names of the first ones.
        join_time_left: Seconds until the run gives up the wait for min_nodes; None: unknown, or they are here.
        last_call_left: Seconds until the round forms with the nodes that are here; None: unknown, or too few are here.
    """

    here: int
    names: Sequence[str]
    min_nodes: int
    max_nodes: int
    join_time_left: float | None = None
    last_call_left: float | None = None

    @property
    def in_last_call(self) -> bool:
        """True if there are enough nodes for a round."""
        return self.here >= self.min_nodes


def waiting_of(run: pb.Run) -> Waiting | None:
    """Return what a run waits for; None if it does not wait for nodes."""
    if run.phase != pb.PHASE_JOINABLE:
        return None
    join_time, last_call = run.HasField("join_time_left"), run.HasField("last_call_left")
    return Waiting(
        here=run.node_count,
        names=[node.node_id for node in run.nodes[:_MOST_NAMES]],
        min_nodes=run.settings.min_nodes,
        max_nodes=run.settings.max_nodes,
        join_time_left=to_seconds(run.join_time_left) if join_time else None,
        last_call_left=to_seconds(run.last_call_left) if last_call else None,
    )


def describe_waiting(waiting: Waiting, now: datetime) -> str:
    """Return the sentence for people; `now`: local time."""
    if not waiting.in_last_call:
        more = waiting.here - len(waiting.names)
        names = ", ".join(waiting.names) + (f" and {more} more" if more > 0 else "")
        line = f"waiting for nodes: {waiting.here} of {waiting.min_nodes} here" + (
            f" ({names})" if names else ""
        )
        if waiting.join_time_left is None:
            return line
        return f"{line}; gives up at {now + timedelta(seconds=waiting.join_time_left):%H:%M:%S}"
    if not waiting.last_call_left:
        return f"waiting for the round to form: {waiting.here} nodes here"
    seconds = f"{waiting.last_call_left:.0f} s at the latest"
    return f"last call: starts in {seconds}, at once with {waiting.max_nodes}"


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
                waiting = await self._ask()
                if waiting is not None:
                    line = describe_waiting(waiting, datetime.now(UTC).astimezone())
                    seen = (waiting.here, waiting.in_last_call)
                    if not show_progress(line) and (seen != last or clock() >= next_report):
                        _log_wait(waiting, line)
                        last, next_report = seen, clock() + _REPORT_INTERVAL
                here = waiting.here if waiting is not None else 0
                await asyncio.sleep(min(max(_ASK_INTERVAL, here * _ASK_INTERVAL_PER_NODE), _REPORT_INTERVAL))
        finally:
            show_progress("")

    async def _ask(self) -> Waiting | None:
        """Return the state of the run; None if it waits no longer, or can't be read: the membership reports why."""
        request = pb.GetRunRequest(run_id=self._config.run_id, owner_only=True, most_nodes=_MOST_NAMES)
        try:
            async with asyncio.timeout(_REPORT_INTERVAL):
                response = await call_any(
                    self._rendezvous, pb_grpc.RendezvousServiceStub, lambda stub: stub.GetRun(request)
                )
        except (TimeoutError, ServiceError):
            return None
        return waiting_of(response.run)


def _log_wait(waiting: Waiting, line: str) -> None:
    times = {"join_time_left": waiting.join_time_left, "last_call_left": waiting.last_call_left}
    _log.info(
        "last call" if waiting.in_last_call else "waiting for nodes",
        here=waiting.here,
        nodes=waiting.names,
        min_nodes=waiting.min_nodes,
        max_nodes=waiting.max_nodes,
        **{name: round(seconds, 3) for name, seconds in times.items() if seconds is not None},
        sentence=line,
    )
