"""This node's membership of its run: it forwards updates of the run to the core, and reports of the core to the run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from rallypoint.agent.config.job import JobConfig
from rallypoint.agent.core import core
from rallypoint.agent.failures.failure import WorkerFailure
from rallypoint.agent.job.result import assignment_value, failure_message, phase_value, refusal_of
from rallypoint.agent.job.waiting import WaitReports
from rallypoint.rendezvous.client import (
    Admitted,
    Event,
    HeldLease,
    Membership,
    MembershipReset,
    RendezvousUnreachable,
)
from rallypoint.rendezvous.core.state import LONGEST
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import to_duration, to_seconds
from rallypoint.rpc.errors import ServiceError, tls_advice
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.replica_client import Where, replica_client
from rallypoint.rpc.text import one_line
from rallypoint.serving.requests import SENTENCE_BYTES

DEPARTURE_TIMEOUT = 1.0
"""Seconds that a leaving node waits for the run to end its round, which takes a millisecond if nothing is broken."""

_log = get_logger("rallypoint.agent")


class NodeMembership:
    """Joins the job's run, and sends this node's reports.

    Attributes:
        lease: The node's latest lease; None: none yet.
        run_end: The end of the run; None while it lasts.
        last_round_end: The end of the latest round that has ended; None before the first.
        refusal: Reason for which the rendezvous service refused this node; None if it did not.
        error: The error behind `refusal`, for programs.
        had_succeeded: True if that was because the run had succeeded before this node came.
        ran: True once workers were started here; the job sets it.
    """

    def __init__(self, config: JobConfig, rendezvous: Where, publish: Callable[[core.Event], None]) -> None:
        """Set up; do not join yet.

        Args:
            publish: Receives the events for the core.
        """
        self.lease: HeldLease | None = None
        self.run_end: pb.RunEnd | None = None
        self.last_round_end: pb.RoundEnd | None = None
        self.refusal: str | None = None
        self.error: RendezvousUnreachable | ServiceError | None = None
        self.had_succeeded = False
        self.ran = False
        self._config = config
        self._publish = publish
        self._being_member: asyncio.Task[None] | None = None
        self._begin: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
        self._wait_reports = WaitReports(config, replica_client(rendezvous))
        # Set when there is nothing to wait for: the round has ended, or this node is no longer a member.
        self._round_over = asyncio.Event()
        self._membership = Membership(
            rendezvous,
            config.rendezvous.endpoint,
            _join_request(config),
            self._on_event,
            connect_timeout=config.connect_timeout,
            lost_timeout=config.lost_timeout,
        )

    def join(self, begin: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]) -> None:
        """Join in the background. The core receives MembershipEnded at the end of the membership."""
        self._begin = begin
        self._being_member = begin(self._run())
        # Not in the task itself: a task that is cancelled before its first step runs no code at all.
        self._being_member.add_done_callback(self._ended)

    def _ended(self, _: asyncio.Task[None]) -> None:
        self._round_over.set()
        self._wait_reports.end()
        self._publish(core.MembershipEnded(self.refusal or ""))

    def abandon(self) -> None:
        """End the membership without a message to the service: the lease expires."""
        if self._being_member is not None:
            self._being_member.cancel()

    async def _run(self) -> None:
        try:
            await self._membership.run()
        except RendezvousUnreachable as error:
            self.error = error
            advice = tls_advice(str(error), self._config.rendezvous.security)
            advice = advice or "check that it is running and that --rdzv-endpoint is right"
            self.refusal = str(error) if self.lease else f"{error}; {advice}"
        except ServiceError as error:
            self.error = error
            if error.reason == "RUN_CLOSED" and self.ran:
                # The run was closed while this node was disconnected for so long that it lost its lease.
                outcome = pb.Outcome.Value(f"OUTCOME_{error.metadata['outcome']}")
                self.run_end = pb.RunEnd(outcome=outcome, detail=error.message)
            else:
                self.refusal = refusal_of(self._config.rendezvous.endpoint, error)
                closed = error.reason == "RUN_CLOSED" and self.lease is None
                self.had_succeeded = closed and error.metadata.get("outcome") == "SUCCEEDED"
                if error.reason == "NODE_EVICTED" and error.metadata.get("by") == "service":
                    # Its workers failed too often, and those of other nodes did not: the host may be the cause.
                    self._publish(core.NodeUnhealthy(self.refusal))

    def confirm(self, round_: int, master_port: int) -> None:
        """Confirm that no worker of an earlier round is alive here, and send the port at which workers can meet."""
        self._membership.confirm(round_, master_port)

    def report_failure(self, failure: WorkerFailure, round_: int) -> None:
        """Report that a worker failed."""
        self._membership.report_failure(failure_message(failure, round_, time.monotonic()))

    def report_start(self, round_: int, parts: Mapping[str, float]) -> None:
        """Report that all workers here have started; `parts`: seconds of each part of the recovery, by name."""
        durations = {part: to_duration(min(seconds, LONGEST)) for part, seconds in parts.items()}
        self._membership.report_start(pb.ReportStart(round=round_, parts=pb.RecoveryParts(**durations)))

    def report_success(self, round_: int) -> None:
        """Report that all workers here succeeded."""
        self._membership.report_success(round_)

    def report_watchdog(self, trouble: str) -> None:
        """Report why no watchdog guards the workers here; "": one does."""
        self._membership.report_watchdog(one_line(trouble, SENTENCE_BYTES))

    def depart(self, reason: str) -> None:
        """Announce that the node stops its workers in order to leave."""
        self._membership.depart(one_line(reason, SENTENCE_BYTES))

    async def round_over(self) -> None:
        """Wait until the run has ended the round of this node, which has announced that it leaves; bounded.

        Workers that are stopped earlier make those of other nodes fail, and the run would take that for the cause.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(DEPARTURE_TIMEOUT):
                await self._round_over.wait()

    def hurry(self) -> None:
        """End the wait of `round_over`."""
        self._round_over.set()

    async def leave(self, reason: str, timeout: float) -> bool:
        """Give the lease back; return True when the service has taken it, False if it could not be reached in time.

        An unreachable service must not prevent this node from leaving.

        Args:
            timeout: Limit in seconds.
        """
        assert self._being_member is not None, "leave() follows join()"
        if self._membership.lease:
            self._membership.leave(one_line(reason, SENTENCE_BYTES))
            done, _ = await asyncio.wait({self._being_member}, timeout=timeout)
            if done:
                return True
            log = _log.warning if self.run_end is None else _log.debug
            log("the rendezvous service did not take the lease back", timeout=timeout)
        taken = not self._membership.lease
        self.abandon()
        return taken

    def _on_event(self, event: Event) -> None:
        match event:
            case Admitted():
                if event.resumed:
                    _log.info("resumed", lease=event.lease, at=event.at)
                else:
                    _log.info("joined", lease=event.lease, **self._min_nodes())
                    self._wait_reports.begin(self._begin)
                self.lease = event.held
            case MembershipReset():
                _log.warning("lease lost, joining again", reason=event.reason)
                self._publish(core.LeaseEnded(event.reason))
            case _:
                self._on_update(event.update)

    def _min_nodes(self) -> dict[str, int]:
        settings = self._config.settings
        return {"min_nodes": settings.min_nodes, "max_nodes": settings.max_nodes}

    def _on_update(self, update: pb.NodeUpdate) -> None:
        if update.phase == pb.PHASE_FINAL and update.HasField("assignment"):
            self._round_over.clear()
        else:
            self._round_over.set()
        if update.HasField("last_round_end"):
            self.last_round_end = update.last_round_end
        waits = update.phase == pb.PHASE_JOINABLE and not self._membership.departing
        # While no worker runs, the log must show the reason.
        if waits:
            self._wait_reports.begin(self._begin)
        else:
            self._wait_reports.end()
        if update.HasField("run_end"):
            self.run_end = update.run_end
        elif waits and update.HasField("held_back"):
            seconds = to_seconds(update.held_back)
            detail = update.last_round_end.detail
            _log.warning("restart delayed (back-off after repeated failures)", seconds=seconds, reason=detail)
        elif update.phase == pb.PHASE_FINAL and not update.HasField("assignment"):
            _log.info("waiting for a place in the next round")
        self._publish(
            core.RunUpdated(
                phase=phase_value(update.phase),
                assignment=assignment_value(update.assignment) if update.HasField("assignment") else None,
                restart_count=update.restart_count,
                detail=update.last_round_end.detail,
                exit_barrier_passed=update.exit_barrier_passed,
                settling=update.settling,
            )
        )


def _join_request(config: JobConfig) -> pb.JoinRun:
    return pb.JoinRun(
        run_id=config.run_id,
        node_id=config.node_id,
        settings=config.settings,
        address=config.address,
        local_world_size=config.local_world_size,
        role=config.role,
        topology=config.topology,
        supervisor_address=config.supervisor_address,
        stays_until_gone=True,
    )
