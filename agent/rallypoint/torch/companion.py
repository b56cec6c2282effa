"""The process beside a torchrun that is this host's node in the run: it loads gRPC, which torchrun may not.

torchrun forks (`--start-method fork`), and gRPC does not survive that. So `rallypoint.torch.handler` starts this module
in a process of its own. To the run it is an agent like any other: the membership, the decisions and the reserved
MASTER_PORT are those of `rallypoint run`; only the workers are torchrun's. torchrun stops and starts them, so "stop the
workers" is a message to the handler, and its next call of `next_rendezvous` means that none is alive.

The two exchange lines of JSON over a socket pair. (For `rallypoint.torch.backend` the companion is a client of fenced
state instead, and for `rallypoint.torch.store` a store; see `_serve_state` and `_StoreNode`.) From the handler, `do` is
one of:

    start       the first line: backend parameters of torchrun; replied to with `ready`, or `ended`
    rendezvous  no worker is alive here, form the next round; `failed`: the workers failed, it was not the round's end
    succeeded   all workers here succeeded, and torchrun waits at its exit barrier
    close       close the run for all nodes; replied to with `closed`
    shutdown    leave the run, and end; replied to with `left`. `result`: "succeeded", "failed" (with `failure`: no
                restart is left), or "stopped"

From here, `is` is one of:

    ready       the settings are valid; `store`: path of the store's socket; `patience`, `close_timeout`: seconds
    waiting     no round with this node is formed yet; `spare`: there is a round, and no place in it
    formed      a round with this node: `round`, `rank`, `world_size`, `address`, `port`, `token`
    over        that round is over, stop the workers; `detail`: why
    ended       the membership is over for good; `how`: one of the keys of `process.ERRORS`; `detail`: why
    closed      the reply to `close`; `error`: empty if it worked
    left        the reply to `shutdown`; `noted`: the service took note of it

If the handler's end of the socket closes without `shutdown`, torchrun is dead, maybe not its workers: this process ends
without leaving, and the node is lost after its disconnect grace, as the node of a killed agent is.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
import time
from base64 import b64decode, b64encode
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from rallypoint.agent.addresses import MasterPort
from rallypoint.agent.config.job import JobConfig
from rallypoint.agent.config.settings import RunSettingError, rendezvous_conf
from rallypoint.agent.core import core
from rallypoint.agent.failures.failure import WorkerFailure
from rallypoint.agent.job.rendezvous import NodeMembership
from rallypoint.agent.job.sync import Background
from rallypoint.agent.sockets.store import StoreSocket, StoreSocketError
from rallypoint.agent.sockets.tcp_store import TCPStorePort
from rallypoint.agent.sockets.worker_sockets import roomy_folder
from rallypoint.agent.spawner.spawner import PR_SET_PDEATHSIG, prctl
from rallypoint.launcher.backends import split_conf
from rallypoint.rendezvous.client import RendezvousUnreachable
from rallypoint.rendezvous.core.state import FailureKind, Phase, RunSettings
from rallypoint.rendezvous.state.client import FencedStateClient
from rallypoint.rendezvous.store.client import StoreClient, Writer
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.calls import RetryingCalls
from rallypoint.rpc.durations import to_seconds
from rallypoint.rpc.endpoint import SettingError
from rallypoint.rpc.errors import ServiceError
from rallypoint.rpc.logs import configure_logs, get_logger
from rallypoint.rpc.loop import run as run_loop
from rallypoint.rpc.pace import Pace
from rallypoint.rpc.replica_client import ReplicaClient
from rallypoint.rpc.text import one_line
from rallypoint.serving.requests import SENTENCE_BYTES
from rallypoint.torch.settings import NodeSettings, endpoint_of, node_settings, security_of

_log = get_logger("rallypoint.torch")

# Reasons of refusals for which the rendezvous is closed to this node.
_CLOSING = ("RUN_CLOSED", "NODE_EVICTED", "LEASE_LOST")
# Seconds beyond the disconnect grace until a loss of another node is known here.
_NOTICE = 1.0
_SUCCEEDED = "its workers have succeeded"
_STORE_PREFIX = "store/"
# Seconds to give the lease of a store's node back; without that, it expires.
_STORE_LEAVING = 2.0
# Longest line from torch's process, bytes: a state of the greatest size, in base64.
_LONGEST_LINE = 8 << 20


@dataclass(frozen=True, slots=True)
class _HandlerRequest:
    """A line from the handler."""

    fields: Mapping[str, Any]


class _HandlerGone:
    """torchrun is dead, or has closed its end of the socket."""


@dataclass(frozen=True, slots=True)
class _LastFailure:
    """No restart of torchrun is left after this failure, and the wait for its cause is over."""

    failure: WorkerFailure


_Queued: TypeAlias = core.Event | _HandlerRequest | _HandlerGone | _LastFailure | BaseException


def _send(writer: asyncio.StreamWriter, kind: str, **fields: object) -> None:
    """Send a message to the handler."""
    writer.write(json.dumps({"is": kind, **fields}).encode() + b"\n")


class _Companion:
    """The node of one torchrun, from its start to its end."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._send = partial(_send, writer)
        self._events: asyncio.Queue[_Queued] = asyncio.Queue()
        self._background = Background(self._events.put_nowait)
        self._state = core.AgentState()
        self._master_port = MasterPort()
        self._failure: WorkerFailure | None = None
        # torchrun's workers succeeded: they are not started again, in no round.
        self._done = False
        self._round_over = asyncio.Event()
        self._shutting_down = False
        # False if the service could not be reached to let this node go.
        self._noted = True
        self._joined = False
        self._spare = False
        self._node: NodeSettings
        self._replicas: ReplicaClient
        self._membership: NodeMembership

    async def run(self, start: Mapping[str, Any], reader: asyncio.StreamReader) -> None:
        """Be the node until torchrun shuts it down, or is gone."""
        async with AsyncExitStack() as stack:
            stack.callback(self._master_port.close)
            try:
                self._node = await node_settings(start)
                config = self._node.config
                self._replicas = ReplicaClient(config.rendezvous.endpoint, config.rendezvous.security)
            except SettingError as error:
                self._send("ended", how="setting", detail=str(error))
                return
            stack.push_async_callback(self._replicas.close)
            self._membership = NodeMembership(config, self._replicas, self._events.put_nowait)
            stack.push_async_callback(self._background.end)
            store = await self._serve_store(stack)
            self._background.begin(self._read(reader))
            self._send(
                "ready",
                node=config.node_id,
                store=str(store),
                patience=self._node.patience,
                close_timeout=config.close_timeout,
            )
            while not await self._take(await self._events.get()):
                pass
            self._membership.abandon()

    async def _serve_store(self, stack: AsyncExitStack) -> Path:
        folder = tempfile.TemporaryDirectory(prefix="rallypoint_sockets_", dir=roomy_folder())
        path = Path(stack.enter_context(folder)) / "store"
        client = StoreClient(
            self._replicas,
            self._node.config.run_id,
            writer=lambda: _writer_of(self._node.config, self._membership),
        )
        served = StoreSocket(path, client)
        await served.start()
        stack.push_async_callback(served.stop)
        return path

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await _next_line(reader):
            self._events.put_nowait(_HandlerRequest(json.loads(line)))
        self._events.put_nowait(_HandlerGone())

    async def _take(self, event: _Queued) -> bool:
        """Handle an event; return True at the end."""
        match event:
            case _HandlerGone():
                return True
            case _HandlerRequest(fields):
                self._take_request(fields)
            case _LastFailure(failure):
                self._end_with(failure)
            case BaseException():
                _log.exception("internal error", error=event)
                self._send("ended", how="connection", detail=f"internal error of the companion: {event!r}")
                return True
            case core.RunUpdated() if self._done and not self._stands(event):
                # torchrun can't start workers again that have succeeded: the others continue without this node.
                self._decide(core.StopRequested(_SUCCEEDED))
                self._decide(event)
            case core.LeaseEnded() if self._done:
                self._decide(core.StopRequested(_SUCCEEDED))
                self._decide(event)
            case _:
                self._decide(event)
        if isinstance(event, core.RunUpdated) and event.phase is not Phase.CLOSED:
            self._spare = event.phase is Phase.FINAL and event.assignment is None
            if self._state.workers is core.Workers.ABSENT:
                self._send("waiting", spare=self._spare)
        # The node stays in a closed run until torchrun's workers are gone, but nothing more comes for it.
        closed = isinstance(event, core.RunUpdated) and event.phase is Phase.CLOSED
        if closed or isinstance(event, core.MembershipEnded):
            how, detail = self._end_of_membership()
            self._send("ended", how=how, detail=detail)
        if self._shutting_down and (self._state.out or not self._joined):
            self._send("left", noted=self._noted)
            return True
        return False

    def _stands(self, update: core.RunUpdated) -> bool:
        """True if the round in which the workers here succeeded is not over, or the run is closed."""
        round_ = update.assignment.round if update.assignment is not None else 0
        return update.phase is Phase.CLOSED or (
            update.phase is Phase.FINAL and round_ == self._state.succeeded
        )

    def _take_request(self, fields: Mapping[str, Any]) -> None:
        match fields["do"]:
            case "rendezvous":
                if not self._joined:
                    self._joined = True
                    self._membership.join(self._background.begin)
                if fields["failed"]:
                    self._failure = self._unknown_failure()
                    self._decide(core.GroupFailed())
                self._decide(core.GroupStopped())
            case "succeeded":
                self._done = True
                self._decide(core.GroupSucceeded())
            case "close":
                self._background.begin(self._close(str(fields["reason"])))
            case "shutdown":
                self._shutting_down = True
                self._shut_down(str(fields["result"]), fields.get("failure"))

    def _shut_down(self, result: str, failure: Mapping[str, Any] | None) -> None:
        if result == "succeeded":
            self._decide(core.GroupSucceeded())
            self._decide(core.GroupStopped())
            # As a drain: if the success still counts, the round goes on without this node.
            self._decide(core.DrainRequested("torchrun has ended"))
        elif failure is not None and self._state.workers is not core.Workers.ABSENT:
            self._background.begin(self._await_cause(self._reported_failure(failure)))
        else:
            self._leave_others_alone()

    def _leave_others_alone(self) -> None:
        """Leave; the others form a round without this node."""
        self._decide(core.GroupStopped())
        self._decide(core.StopRequested("torchrun was stopped"))

    async def _await_cause(self, failure: WorkerFailure) -> None:
        """Wait until the round is over, or the service would know by now that another node is lost."""
        settings = self._node.config.settings
        grace = RunSettings().disconnect_grace
        if settings.HasField("disconnect_grace"):
            grace = to_seconds(settings.disconnect_grace)
        assignment = self._state.assignment
        if assignment is None or assignment.group_world_size > 1:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(grace + _NOTICE, self._node.config.close_timeout / 2)):
                    await self._round_over.wait()
        self._events.put_nowait(_LastFailure(failure))

    def _end_with(self, failure: WorkerFailure) -> None:
        """End the run for all, as torchrun's own rendezvous does, unless the failure follows from a loss.

        After a loss only this torchrun ends: the run stays open, for the others and for one that is started again.
        """
        end, started = self._membership.last_round_end, self._state.started
        failed = end is not None and end.round == started and end.cause == pb.ROUND_END_CAUSE_WORKER_FAILED
        if self._state.workers is core.Workers.RUNNING or failed:
            # The end of the run is the next update.
            self._failure = failure
            self._decide(core.GroupFailed())
        else:
            self._leave_others_alone()

    def _unknown_failure(self) -> WorkerFailure:
        assignment = self._state.assignment
        return WorkerFailure(
            local_rank=0,
            rank=assignment.base_rank if assignment is not None else 0,
            role=self._node.config.role,
            host=socket.gethostname(),
            pid=0,
            exit_code=1,
            time=time.time(),
            message="torchrun restarts the workers of this host after a failure; its log has more",
        )

    def _reported_failure(self, failure: Mapping[str, Any]) -> WorkerFailure:
        return replace(
            self._unknown_failure(),
            **{name: failure[name] for name in ("local_rank", "rank", "pid", "exit_code", "time")},
            message=one_line(f"no restart of torchrun is left: {failure['message']}", SENTENCE_BYTES),
            kind=FailureKind.SIGNAL if failure["exit_code"] < 0 else FailureKind.EXIT_CODE,
            permanent=True,
        )

    async def _close(self, reason: str) -> None:
        request = pb.CloseRunRequest(run_id=self._node.config.run_id, reason=reason)
        calls = RetryingCalls(self._replicas, pb_grpc.RendezvousServiceStub, "rendezvous", Pace())
        error = ""
        try:
            await calls.call(lambda stub: stub.CloseRun, request, self._node.config.close_timeout)
        except ServiceError as refusal:
            error = refusal.message
        self._send("closed", error=error)

    def _end_of_membership(self) -> tuple[str, str]:
        """How the membership ended, as a key of `process.ERRORS`, and why."""
        if (end := self._membership.run_end) is not None:
            graceful = end.outcome == pb.OUTCOME_SUCCEEDED and self._spare
            return "graceful" if graceful else "closed", f"the run is closed: {end.detail}"
        detail = self._membership.refusal or "this node has left the run"
        error = self._membership.error
        if isinstance(error, RendezvousUnreachable):
            return "connection", detail
        if error is None or error.reason in _CLOSING:
            return "closed", detail
        return {"JOIN_TIMED_OUT": "timeout", "SETTINGS_DIFFER": "state"}.get(
            error.reason, "connection"
        ), detail

    def _decide(self, event: core.Event) -> None:
        self._state, effects = core.decide(self._state, event)
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: core.Effect) -> None:
        match effect:
            case core.StartWorkers(assignment):
                self._round_over.clear()
                self._master_port.hand_over()
                self._membership.ran = True
                self._send(
                    "formed",
                    round=assignment.round,
                    rank=assignment.group_rank,
                    world_size=assignment.group_world_size,
                    address=assignment.master_address,
                    port=assignment.master_port,
                    token=assignment.fencing_token,
                )
            case core.StopWorkers(detail):
                self._round_over.set()
                self._send("over", detail=detail)
            case core.SendConfirm(round_):
                self._membership.confirm(round_, self._master_port.reserve())
            case core.SendFailure(round_):
                assert self._failure is not None, "GroupFailed comes after it"
                self._membership.report_failure(self._failure, round_)
            case core.SendSuccess(round_):
                self._membership.report_success(round_)
            case core.SendDeparture(detail):
                self._membership.depart(detail)
            case core.SendLeave(detail):
                self._background.begin(self._leave(detail))

    async def _leave(self, detail: str) -> None:
        self._noted = await self._membership.leave(detail, self._node.config.close_timeout)


def _writer_of(config: JobConfig, membership: NodeMembership) -> Writer:
    lease = membership.lease
    assert lease is not None, "no round is formed before"
    return Writer(config.node_id, lease.number, lease.token)


# ---- Fenced state for `rallypoint.torch.backend`.


async def _serve_state(
    start: Mapping[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Reply to calls, one after the other: with `state` and `token` in base64, or with `ended` if a call failed."""
    send = partial(_send, writer)
    given: dict[str, str] = dict(start["conf"])
    try:
        security = security_of(given)
        endpoint = endpoint_of(start["endpoint"])
        timeout = rendezvous_conf(split_conf(given, "rallypoint")[0].settings, (1, 1), 0).read_timeout
        replicas = ReplicaClient(endpoint, security)
        client = FencedStateClient(replicas, start["run_id"])
    except (SettingError, RunSettingError, ServiceError) as error:
        send("ended", how="setting", detail=str(error))
        return
    async with replicas:
        send("ready", read_timeout=timeout)
        while line := await _next_line(reader):
            call, deadline = json.loads(line), time.monotonic() + timeout
            try:
                if call["do"] == "get_state":
                    current, has_set = await client.get(timeout=timeout), False
                else:
                    token = None if call["token"] is None else b64decode(call["token"])
                    outcome = await client.set(b64decode(call["state"]), token, timeout=timeout)
                    current, has_set = outcome.current, outcome.has_set
                    if has_set:
                        # If others set too, torch's handler would see their states only after a second.
                        with suppress(ServiceError):
                            current = await client.get(after_turns=True, timeout=deadline - time.monotonic())
            except ServiceError as error:
                send("ended", how="connection", detail=error.message)
                continue
            state, token = (None, None) if current is None else (current.state, current.token)
            send("state", state=_base64(state), token=_base64(token), has_set=has_set)


def _base64(content: bytes | None) -> str | None:
    return None if content is None else b64encode(content).decode()


# ---- A store for `rallypoint.torch.store`.


class _StoreNode:
    """A node of a store's own run: the run's space 0 has the keys, and this node's lease admits its writes.

    A store needs nothing else of the run: it has one place, so the first node forms a round, and the others are spares.
    """

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._send = partial(_send, writer)
        self._events: asyncio.Queue[core.Event | BaseException | None] = asyncio.Queue()
        self._background = Background(self._events.put_nowait)
        self._confirmed = 0
        self._ready = False

    async def run(self, start: Mapping[str, Any], reader: asyncio.StreamReader) -> None:
        """Serve the store until its program has ended."""
        async with AsyncExitStack() as stack:
            try:
                # A job of the same name has another run.
                run_id = _STORE_PREFIX + start["name"]
                node = await node_settings({**start, "run_id": run_id, "min_nodes": 1, "max_nodes": 1})
                replicas = ReplicaClient(node.config.rendezvous.endpoint, node.config.rendezvous.security)
                stack.push_async_callback(replicas.close)
                membership = NodeMembership(node.config, replicas, self._events.put_nowait)
                client = StoreClient(replicas, run_id, writer=lambda: _writer_of(node.config, membership))
                store = TCPStorePort(client)
                port = await store.start()
            except (SettingError, StoreSocketError) as error:
                self._send("ended", how="setting", detail=str(error))
                return
            stack.push_async_callback(store.stop)
            stack.push_async_callback(self._background.end)
            membership.join(self._background.begin)
            self._background.begin(self._until_closed(reader))
            while await self._take(await self._events.get(), membership, port):
                pass
            await membership.leave("its program has ended", _STORE_LEAVING)
            membership.abandon()

    async def _take(
        self, event: core.Event | BaseException | None, membership: NodeMembership, port: int
    ) -> bool:
        match event:
            case None:
                return False
            case core.RunUpdated(phase=Phase.FROZEN, assignment=core.Assignment(round=round_)):
                if round_ > self._confirmed:
                    self._confirmed = round_
                    membership.confirm(round_, 0)
            case core.RunUpdated(phase=Phase.FINAL) if not self._ready:
                self._ready = True
                self._send("ready", port=port)
            case core.MembershipEnded() | BaseException():
                detail = repr(event) if isinstance(event, BaseException) else membership.refusal
                if self._ready:
                    _log.error("the store is lost", reason=detail or "its run is closed")
                self._send("ended", how="connection", detail=detail or "its run is closed")
                return False
        return True

    async def _until_closed(self, reader: asyncio.StreamReader) -> None:
        await _next_line(reader)
        self._events.put_nowait(None)


# ---- The process.


async def _next_line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readline()
    except ConnectionError:  # the handler died before it had read everything
        return b""


async def _run(fd: int, parent: int) -> None:
    connection = socket.socket(fileno=fd)
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=_LONGEST_LINE)

    def parent_died() -> None:
        if os.getppid() != parent:  # otherwise the signal comes from a user, or a scheduler
            reader.feed_eof()

    # A fork of torchrun may outlive it, and has the other end of the socket: there would be no end of the stream.
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, parent_died)
    prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() == parent and (line := await _next_line(reader)):
        start = json.loads(line)
        if start["do"] == "open_state":
            await _serve_state(start, reader, writer)
        elif start["do"] == "open_store":
            await _StoreNode(writer).run(start, reader)
        else:
            await _Companion(writer).run(start, reader)
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


def main(fd: int, parent: int) -> None:
    """Run the process that the handler has started; `fd`: its end of the socket, `parent`: the handler's process."""
    # Ctrl-C and the signals of a scheduler are for torchrun, which ends this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    configure_logs(os.environ.get("RALLYPOINT_LOG_LEVEL", "warning"), "auto")
    run_loop(_run(fd, parent))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
