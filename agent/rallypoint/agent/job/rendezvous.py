"""This node's membership of its run: the core hears what the run says, the run what the core decides."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from rallypoint.agent.config.job import JobConfig
from rallypoint.agent.core import core
from rallypoint.agent.failures.failure import WorkerFailure
from rallypoint.agent.job.result import assignment_value, failure_message, phase_value, refusal_of
from rallypoint.rendezvous.client import Admitted, Event, Membership, MembershipReset, RendezvousUnreachable
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.errors import ServiceError, tls_advice
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.replica_client import Where
from rallypoint.serving.requests import SENTENCE_BYTES

HEARD_TIMEOUT = 1.0
"""Seconds that a node runs on for its run to hear that it goes, which takes a millisecond where nothing is broken."""

_log = get_logger("rallypoint.agent")


class NodeMembership:
    """Joins the job's run, and is its voice there.

    Attributes:
        lease: The latest lease that the node was given; 0: none yet.
        incarnation: Of the run, whose lease that is.
        run_end: How the run ended, once it has.
        refusal: Why the rendezvous service would not have this node, if it would not.
    """

    def __init__(
        self,
        config: JobConfig,
        rendezvous: Where,
        tell: Callable[[core.Event], None],
        *,
        ran: Callable[[], bool],
        going: Callable[[], bool],
    ) -> None:
        """Set up; nothing is joined yet.

        Args:
            config: The job.
            rendezvous: Where the rendezvous service is.
            tell: Called with everything that the core must know.
            ran: Whether workers were ever started here.
            going: Whether the node is on its way out, so that nobody cares what it waits for.
        """
        self.lease = 0
        self.incarnation = ""
        self.run_end: pb.RunEnd | None = None
        self.refusal: str | None = None
        self._config = config
        self._publish = tell
        self._ran = ran
        self._leaving = going
        self._being_member: asyncio.Task[None] | None = None
        # Whether the run need not be waited for any more: its round has ended, or this node is out.
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
        """Join, in the background; be a member until that is over. The core hears of it then."""
        self._being_member = begin(self._run())
        # Not by the task itself: one that is cancelled before its first step has no last one either.
        self._being_member.add_done_callback(self._ended)

    def _ended(self, _: asyncio.Task[None]) -> None:
        self._round_over.set()
        self._publish(core.MembershipEnded(self.refusal or ""))

    def abandon(self) -> None:
        """Be a member no longer, without telling anybody: the lease ends by itself."""
        if self._being_member is not None:
            self._being_member.cancel()

    async def _run(self) -> None:
        try:
            await self._membership.run()
        except RendezvousUnreachable as error:
            advice = tls_advice(str(error), self._config.rendezvous.tls)
            advice = advice or "is it running, and is --rdzv-endpoint right?"
            self.refusal = str(error) if self.lease else f"{error}; {advice}"
        except ServiceError as error:
            if error.reason == "RUN_CLOSED" and self._ran():
                # It was closed while this node was away for so long that it lost its lease.
                outcome = pb.Outcome.Value(f"OUTCOME_{error.metadata['outcome']}")
                self.run_end = pb.RunEnd(outcome=outcome, detail=error.message)
            else:
                self.refusal = refusal_of(self._config.rendezvous.endpoint, error)
                if error.reason == "NODE_EVICTED" and error.metadata.get("by") == "service":
                    # Its workers failed too often, and those of other nodes did not: elsewhere they may do better.
                    self._publish(core.NodeUnhealthy(self.refusal))

    def confirm(self, round_: int, master_port: int) -> None:
        """Say that no worker of an earlier round is alive here, and at which port of this host workers may meet."""
        self._membership.confirm(round_, master_port)

    def report_failure(self, failure: WorkerFailure, round_: int) -> None:
        """Say that a worker failed."""
        self._membership.report_failure(failure_message(failure, round_, time.monotonic()))

    def report_success(self, round_: int) -> None:
        """Say that all workers here succeeded."""
        self._membership.report_success(round_)

    def report_watchdog(self, trouble: str) -> None:
        """Say why no watchdog guards the workers here; "": one does."""
        self._membership.report_watchdog(sentence(trouble))

    def depart(self, reason: str) -> None:
        """Say that the node stops its workers in order to leave."""
        self._membership.depart(sentence(reason))

    async def round_over(self) -> None:
        """Returns when the run has ended the round of this node, which has said that it goes; or after a moment.

        Workers that are stopped before make those of other nodes fail, and the run would take that for the cause.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(HEARD_TIMEOUT):
                await self._round_over.wait()

    def hurry(self) -> None:
        """Nobody waits for `round_over` any more."""
        self._round_over.set()

    async def leave(self, reason: str, timeout: float) -> None:
        """Give the lease back; returns when the service has taken it, or can't be reached in time.

        A service that is away must not keep this node from going.

        Args:
            reason: For people.
            timeout: Seconds to try for.
        """
        assert self._being_member is not None, "who leaves was in"
        if self._membership.lease:
            self._membership.leave(sentence(reason))
            done, _ = await asyncio.wait({self._being_member}, timeout=timeout)
            if done:
                return
            _log.warning("the rendezvous service did not take the lease back", timeout=timeout)
        self.abandon()

    def _on_event(self, event: Event) -> None:
        match event:
            case Admitted():
                if event.resumed:
                    _log.info("resumed", lease=event.lease, at=event.at)
                else:
                    _log.info("joined", lease=event.lease, **self._min_nodes())
                self.lease, self.incarnation = event.lease, event.incarnation
            case MembershipReset():
                _log.warning("lease lost, joining anew", reason=event.reason)
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
        if update.HasField("run_end"):
            self.run_end = update.run_end
        # Where no worker runs, whoever looks must find out what for.
        elif update.phase == pb.PHASE_JOINABLE and update.HasField("held_back") and not self._leaving():
            seconds = update.held_back.ToNanoseconds() / 1e9
            detail = update.last_round_end.detail
            _log.warning(
                "rounds fail soon one after the other: the restart waits", seconds=seconds, reason=detail
            )
        elif update.phase == pb.PHASE_JOINABLE and not self._leaving():
            _log.info("waiting for nodes", **self._min_nodes())
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


def sentence(text: str) -> str:
    """What the service takes of a text: a node must not be refused for the words in which it says why it goes."""
    line = "".join(character if character.isprintable() else " " for character in text)
    return line.encode()[:SENTENCE_BYTES].decode(errors="ignore")


def _join_request(config: JobConfig) -> pb.JoinRun:
    return pb.JoinRun(
        run_id=config.run_id,
        node_id=config.node_id,
        settings=config.settings,
        address=config.address,
        local_world_size=config.local_world_size,
        role=config.role,
        topology=config.topology,
    )
