"""A small agent that keeps every rule of docs/protocol.md; each `--bug` makes it break one.

Usage: reference_client.py ADDRESSES RUN_ID NODE_ID WORKER TIMER [BUG [CA]]
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from cryptography import x509

from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.durations import set_seconds, to_seconds
from rallypoint.rpc.errors import ServiceError, decode
from rallypoint.timer.v1 import timer_service_pb2 as timer_pb
from rallypoint.timer.v1 import timer_service_pb2_grpc as timer_grpc

BUGS = {
    "starts-while-frozen": "R01",
    "runs-as-spare": "R01",
    "keeps-workers-in-joinable": "R02",
    "keeps-workers-as-spare": "R02",
    "never-starts": "R03",
    "second-worker-on-repeated-update": "R04",
    "two-rounds-at-once": "R05",
    "unknown-phase-is-closed": "R06",
    "ignores-closed": "R07",
    "exit-code-0-always": "R08",
    "leaves-workers-behind": "R09",
    "starts-unconfirmed": "R52",
    "leaves-closed-run-at-once": "R54",
    "joins-without-address": "R10",
    "no-heartbeat": "R11",
    "heartbeat-flood": "R11",
    "ignores-settling": "R12",
    "confirms-before-workers-ended": "R13",
    "leaves-grandchildren": "R14",
    "no-sigkill": "R15",
    "sigkill-at-once": "R15",
    "no-port": "R16",
    "keeps-the-port": "R16",
    "no-failure-report": "R17",
    "failure-without-age": "R17",
    "reports-a-taken-port-in-doubt": "R73",
    "leaves-after-success": "R18",
    "done-after-success": "R19",
    "fails-at-exit-barrier": "R20",
    "no-depart": "R21",
    "leaves-before-workers-ended": "R21",
    "ends-without-leave": "R22",
    "stops-workers-with-the-stream": "R23",
    "resumes-without-token": "R24",
    "resumes-with-last-revision": "R25",
    "keeps-revision-of-lost-run": "R25",
    "failure-once": "R26",
    "age-does-not-grow": "R26",
    "success-once": "R27",
    "confirm-once": "R28",
    "storm": "R29",
    "no-jitter": "R29",
    "ignores-retry-delay": "R30",
    "ignores-owner": "R31",
    "follows-redirects-for-ever": "R32",
    "gives-up-when-cancelled": "R33",
    "reset-is-the-end": "R48",
    "draining-is-the-end": "R34",
    "lease-lost-is-the-end": "R35",
    "keeps-workers-without-lease": "R35",
    "ignores-superseded-by": "R36",
    "resumes-unproven-lease": "R37",
    "resumes-lost-run": "R38",
    "resumes-with-revision-ahead": "R39",
    "forgets-incarnation": "R53",
    "stream-replaced-storm": "R40",
    "joins-after-eviction": "R41",
    "joins-closed-run": "R42",
    "joins-after-join-timeout": "R49",
    "silent-refusal": "R43",
    "repeats-invalid-join": "R44",
    "unknown-reason-is-the-end": "R45",
    "trusts-any-server": "R50",
    "local-rank-missing": "R46",
    "leaks-credentials": "R47",
    "start-once": "R51",
    "age-of-start-does-not-grow": "R51",
    "starts-another-round": "R51",
    "waits-for-a-silent-replica": "R55",
    "leaves-at-goaway": "R56",
    "confirms-before-the-failure": "R57",
    "starts-again": "R58",
    "subscribes-without-token": "R60",
    "registers-before-timers": "R61",
    "renumbers-timers": "R62",
    "ignores-expiry": "R63",
    "acknowledges-before-the-kill": "R63",
    "kills-on-crossed-expiry": "R64",
    "no-clear": "R65",
    "subscribes-with-old-lease": "R66",
    "watchdog-storm": "R67",
    "hides-trouble": "R68",
    "message-for-each-change": "R69",
    "no-watchdog-after-refusal": "R70",
    "repeats-refused-timers": "R71",
    "remembers-forgotten-scopes": "R72",
}
"""Each bug, and the rule that it breaks."""

_KILL_AFTER = 3.0  # seconds from SIGTERM to SIGKILL
_FIRST, _LONGEST, _REDIRECTS = 0.1, 1.0, 4
_PATIENCE = 4.0  # for the first reply of one of several replicas
_LONGEST_OF_WATCHDOG, _GATHERED, _TROUBLED_AFTER = 5.0, 0.2, 5.0
_LEASE_ENDED = {"LEASE_LOST", "LEASE_NOT_PROVEN", "RUN_NOT_FOUND", "REVISION_AHEAD"}
_FINAL_REASONS = {"RUN_CLOSED", "SETTINGS_DIFFER", "NODE_EVICTED", "JOIN_TIMED_OUT"}
_RESUMES_AFTER = {
    "LEASE_NOT_PROVEN": "resumes-unproven-lease",
    "RUN_NOT_FOUND": "resumes-lost-run",
    "REVISION_AHEAD": "resumes-with-revision-ahead",
}
_REJOINS_AFTER = {
    "NODE_EVICTED": "joins-after-eviction",
    "RUN_CLOSED": "joins-closed-run",
    "JOIN_TIMED_OUT": "joins-after-join-timeout",
    "INVALID_ARGUMENT": "repeats-invalid-join",
}
_RETRYABLE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class End(Exception):
    """The membership is over; the argument is the exit code."""


class Node:
    """One node, with one worker."""

    def __init__(
        self, addresses: str, run_id: str, node_id: str, worker: str, timer: str, *, bug: str, ca: str
    ) -> None:
        self.homes = addresses.split(",")
        self.address = self.homes[0]
        self.ca = ca
        self.watchdog = Watchdog(self, timer)
        self.worker, self.bug = worker, bug
        settings = pb.RunSettings(min_nodes=1, max_nodes=1, max_restarts=3)
        self.join = pb.JoinRun(
            run_id=run_id,
            node_id=node_id,
            settings=settings,
            address="" if bug == "joins-without-address" else "127.0.0.1",
            local_world_size=1,
            role="default",
            stays_until_gone=True,
        )
        self.lease = pb.Lease()
        self.admitted = False
        self.revision = 0
        self.update = pb.NodeUpdate(phase=pb.PHASE_JOINABLE)
        self.process: asyncio.subprocess.Process | None = None
        self.round = self.confirmed = self.succeeded = 0
        self.stopping = False
        self.failure: tuple[pb.WorkerFailure, float] | None = None
        self.started: float | None = None
        self.last: pb.JoinRequest | None = None
        self.leaving = self.over = self.heard = self.dropped = False
        self.departed = self.left = False
        self.port: socket.socket | None = None
        self.outbox: asyncio.Queue[pb.JoinRequest] = asyncio.Queue()
        self.changed = asyncio.Event()

    # ---- Streams

    async def run(self) -> int:
        """Stay a member until the end; return the exit code."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.leave)
        acting = asyncio.create_task(self.act())
        serving = asyncio.create_task(self.watchdog.serve())
        try:
            await self.streams()
        except End as end:
            code = int(end.args[0])
        else:
            code = 0
        acting.cancel()
        serving.cancel()
        if self.bug != "leaves-workers-behind":
            await self.stop()
        return 0 if self.bug == "exit-code-0-always" else code

    async def streams(self) -> None:
        """Open one stream after the other."""
        bound, hops = _FIRST, 0
        while True:
            self.heard = self.dropped = False
            try:
                await self.one_stream()
                refused = ServiceError(grpc.StatusCode.UNAVAILABLE, "", "the stream is over")
            except grpc.aio.AioRpcError as raw:
                refused = decode(raw)
            except asyncio.CancelledError:
                if not self.dropped:
                    raise
                refused = ServiceError(grpc.StatusCode.UNAVAILABLE, "", "the client ended the stream")
            if self.heard:
                bound, hops = _FIRST, 0
            if self.bug == "stops-workers-with-the-stream":
                await self.stop()
            self.judge(refused)
            owner = refused.metadata.get("owner_address", "")
            if owner and self.bug != "ignores-owner":
                self.address = owner
                hops += 1
                if hops <= _REDIRECTS or self.bug == "follows-redirects-for-ever":
                    continue
                hops = 0
            elif not self.heard:
                silent = self.homes.index(self.address) if self.address in self.homes else -1
                self.address = self.homes[(silent + 1) % len(self.homes)]
            await asyncio.sleep(self.pause(bound, refused))
            bound = min(2 * bound, _LONGEST)

    def pause(self, bound: float, refused: ServiceError) -> float:
        """Return the seconds until the next stream."""
        drawn = bound if self.bug == "no-jitter" else random.uniform(0, bound)
        if self.bug == "storm" or (
            self.bug == "stream-replaced-storm" and refused.reason == "STREAM_REPLACED"
        ):
            drawn = 0.0
        asked = 0.0 if self.bug == "ignores-retry-delay" else refused.retry_after or 0.0
        return max(drawn, asked)

    async def one_stream(self) -> None:
        """Use one stream until it ends; raises End after OK."""
        async with self.channel() as channel:
            call = pb_grpc.RendezvousServiceStub(channel).Join()
            sender: asyncio.Task[None] | None = None
            try:
                with suppress(asyncio.InvalidStateError):  # it is over: the reader gets the error
                    await call.write(self.first_message())
                if len(self.homes) > 1 and self.bug != "waits-for-a-silent-replica":
                    loop = asyncio.get_running_loop()
                    loop.call_later(_PATIENCE, self.drop_if_silent, call)
                if self.bug == "leaves-at-goaway":
                    away = channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
                    leaving = asyncio.ensure_future(away)
                    leaving.add_done_callback(lambda _: self.drop(call))
                async for response in call:
                    self.heard = True
                    if response.HasField("lease"):
                        self.lease, self.admitted = response.lease, True
                        self.repeat()
                        self.watchdog.renew()
                        sender = asyncio.create_task(self.send(call))
                    if response.HasField("update"):
                        self.take(response.update)
            finally:
                if sender is not None:
                    sender.cancel()
                call.cancel()
        if self.bug != "ignores-closed":
            raise End(self.exit_code())

    def drop(self, call: Any) -> None:
        """End a stream, to open another one."""
        self.dropped = True
        call.cancel()

    def drop_if_silent(self, call: Any) -> None:
        """End a stream on which no message came."""
        if not self.heard:
            self.drop(call)

    def channel(self, address: str = "") -> grpc.aio.Channel:
        """Return a separate channel, over TLS if there is a CA certificate."""
        address = address or self.address
        options: list[tuple[str, Any]] = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]
        if not self.ca:
            return grpc.aio.insecure_channel(address, options=options)
        trusted = Path(self.ca).read_bytes()
        if self.bug == "trusts-any-server":
            host, _, port = address.partition(":")
            trusted = ssl.get_server_certificate((host, int(port))).encode()
            certificate = x509.load_pem_x509_certificate(trusted)
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            options += [("grpc.ssl_target_name_override", str(next(iter(names)).value))]
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(trusted), options=options)

    def first_message(self) -> pb.JoinRequest:
        """Return `resume`, or `join` without a lease."""
        if not self.lease.number:
            return pb.JoinRequest(join=self.join)
        resume = pb.ResumeRun(
            run_id=self.join.run_id,
            node_id=self.join.node_id,
            lease=self.lease.number,
            after_revision=self.revision,
            token=b"" if self.bug == "resumes-without-token" else self.lease.token,
            stays_until_gone=True,
        )
        return pb.JoinRequest(resume=resume)

    def judge(self, refused: ServiceError) -> None:
        """Decide about an error; raises End."""
        reason, bug = refused.reason, self.bug
        ends = {"draining-is-the-end": reason == "DRAINING"}
        ends["gives-up-when-cancelled"] = refused.code is grpc.StatusCode.CANCELLED
        ends["reset-is-the-end"] = "reset" in refused.message
        if ends.get(bug):
            raise End(1)
        if "superseded_by" in refused.metadata and bug != "ignores-superseded-by":
            raise End(1)
        if reason in _LEASE_ENDED and self.lease.number:
            if bug == "lease-lost-is-the-end":
                raise End(1)
            if bug == _RESUMES_AFTER.get(reason):
                return
            if bug != "forgets-incarnation":
                self.join.former_incarnation = self.lease.incarnation
            self.lease = pb.Lease()
            if bug != "keeps-revision-of-lost-run":
                self.revision = 0
            self.last = self.failure = self.started = None
            self.succeeded = self.confirmed = 0
            self.update = pb.NodeUpdate(phase=pb.PHASE_JOINABLE)
            self.changed.set()
            return
        if bug == _REJOINS_AFTER.get(reason):
            return
        if self.admitted and bug == "unknown-reason-is-the-end" and refused.code not in _RETRYABLE:
            raise End(1)
        if reason in _FINAL_REASONS if self.admitted else refused.code not in _RETRYABLE:
            if bug != "silent-refusal":
                print(f"refused: {refused.message}", file=sys.stderr)  # noqa: T201
            raise End(1)

    def exit_code(self) -> int:
        """Return the exit code after a stream that ended with OK."""
        if self.update.phase == pb.PHASE_CLOSED:
            return 0 if self.update.run_end.outcome == pb.OUTCOME_SUCCEEDED else 1
        if self.succeeded and not self.leaving:
            return 1 if self.bug == "fails-at-exit-barrier" else 0
        return 143

    def repeat(self) -> None:
        """Queue again the messages that the service may have missed."""
        self.outbox = asyncio.Queue()
        if self.last is not None and self.bug == "confirms-before-the-failure":
            self.outbox.put_nowait(self.last)
        if self.started is not None and self.bug != "start-once":
            self.report_start(grown=self.bug != "age-of-start-does-not-grow")
        if self.failure is not None and self.bug != "failure-once":
            self.report(grown=self.bug != "age-does-not-grow")
        if self.succeeded and self.bug != "success-once":
            self.outbox.put_nowait(pb.JoinRequest(succeeded=pb.ReportSuccess(round=self.succeeded)))
        if self.last is not None and self.bug != "confirm-once":
            self.outbox.put_nowait(self.last)

    def report_start(self, *, grown: bool = True) -> None:
        """Queue the start of the round."""
        assert self.started is not None
        round_ = self.round + (self.bug == "starts-another-round")
        message = pb.ReportStart(round=round_)
        set_seconds(message.age, time.monotonic() - self.started if grown else 0.0)
        self.outbox.put_nowait(pb.JoinRequest(started=message))

    def report(self, *, grown: bool = True) -> None:
        """Queue the failure."""
        assert self.failure is not None
        failure, since = self.failure
        message = pb.WorkerFailure()
        message.CopyFrom(failure)
        if self.bug != "failure-without-age":
            set_seconds(message.age, time.monotonic() - since if grown else 0.0)
        self.outbox.put_nowait(pb.JoinRequest(worker_failed=message))

    async def send(self, call: Any) -> None:
        """Send messages as they come, and heartbeats."""
        interval = to_seconds(self.lease.keep_alive_interval)
        if self.bug == "heartbeat-flood":
            interval /= 20
        while True:
            beat = pb.Heartbeat(watchdog_trouble=self.watchdog.trouble)
            message = pb.JoinRequest(heartbeat=beat)
            try:
                message = await asyncio.wait_for(self.outbox.get(), interval)
            except TimeoutError:
                if self.bug == "no-heartbeat":
                    continue
            try:
                await call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return

    def queue(self, message: pb.JoinRequest) -> None:
        """Send `confirm`, `depart` or `leave`."""
        self.last = message
        self.outbox.put_nowait(message)

    # ---- Rounds

    def take(self, update: pb.NodeUpdate) -> None:
        last = self.bug == "resumes-with-last-revision"
        self.revision = update.revision if last else max(self.revision, update.revision)
        if update.phase > pb.PHASE_CLOSED:
            if self.bug == "unknown-phase-is-closed":
                raise End(1)
            update.phase = pb.PHASE_JOINABLE
        if self.bug == "second-worker-on-repeated-update" and update == self.update and self.process:
            subprocess.Popen([self.worker], env=self.environment(update.assignment))
        if update.start_recorded and self.bug != "starts-again":
            self.started = None
        if update.settling and self.bug != "ignores-settling":
            self.outbox.put_nowait(pb.JoinRequest(heartbeat=pb.Heartbeat()))
        self.update = update
        self.changed.set()

    def leave(self) -> None:
        """Handle SIGTERM."""
        if self.bug == "ends-without-leave":
            os._exit(143)
        self.leaving = True
        self.changed.set()

    async def act(self) -> None:
        """Act on the last update, after each change."""
        while True:
            await self.changed.wait()
            self.changed.clear()
            if self.update.phase == pb.PHASE_CLOSED and self.bug == "ignores-closed":
                continue
            if self.leaving:
                await self.go()
            else:
                await self.follow()

    async def go(self) -> None:
        """Leave in good order."""
        if self.process is not None and not self.departed and self.bug != "no-depart":
            self.departed = True
            self.queue(pb.JoinRequest(depart=pb.DepartRun(reason="SIGTERM")))
        if self.bug == "leaves-before-workers-ended":
            self.queue(pb.JoinRequest(leave=pb.LeaveRun(reason="SIGTERM")))
        await self.stop()
        if not self.left:
            self.left = True
            self.queue(pb.JoinRequest(leave=pb.LeaveRun(reason="SIGTERM")))

    async def follow(self) -> None:
        """Act on the last update."""
        update, bug = self.update, self.bug
        phase, round_ = update.phase, update.assignment.round
        wanted = self.wanted(phase, round_)
        if bug == "leaves-closed-run-at-once" and phase == pb.PHASE_CLOSED:
            self.queue(pb.JoinRequest(leave=pb.LeaveRun(reason="the run is closed")))
        if self.process is not None and wanted != self.round and not self.kept(phase, round_, wanted):
            if bug == "confirms-before-workers-ended" and phase == pb.PHASE_FROZEN:
                self.confirm(round_)
            await self.stop()
        if self.succeeded != round_ and phase != pb.PHASE_CLOSED:
            self.succeeded = 0
        if phase == pb.PHASE_CLOSED and not self.left:
            self.left = True
            self.queue(pb.JoinRequest(leave=pb.LeaveRun(reason="the run is closed")))
        if self.succeeded and update.exit_barrier_passed:
            if bug == "fails-at-exit-barrier":
                os._exit(1)
            self.queue(pb.JoinRequest(leave=pb.LeaveRun(reason="the exit barrier is over")))
        if bug == "done-after-success" and self.over:
            return
        if phase == pb.PHASE_FROZEN and round_ and self.confirmed != round_:
            self.confirm(round_)
        if wanted and (self.process is None or bug == "two-rounds-at-once") and self.may_start(wanted):
            await self.start(wanted)

    def wanted(self, phase: int, round_: int) -> int:
        """Return the round whose worker must run; 0: none."""
        if self.bug == "starts-while-frozen" and phase == pb.PHASE_FROZEN:
            return round_
        if self.bug == "runs-as-spare" and phase == pb.PHASE_FINAL and not round_:
            return self.round or 1
        return round_ if phase == pb.PHASE_FINAL else 0

    def may_start(self, round_: int) -> bool:
        """True if the worker of a round was not started; a careful client needs the confirmation too."""
        careless = {"starts-unconfirmed", "starts-while-frozen", "runs-as-spare", "two-rounds-at-once"}
        return self.round != round_ and (self.confirmed == round_ or self.bug in careless)

    def kept(self, phase: int, round_: int, wanted: int) -> bool:
        """True if a bug keeps workers that must stop."""
        return (
            (self.bug == "keeps-workers-in-joinable" and phase == pb.PHASE_JOINABLE)
            or (self.bug == "keeps-workers-as-spare" and phase == pb.PHASE_FINAL and not round_)
            or (self.bug == "keeps-workers-without-lease" and not self.update.revision)
            or (self.bug == "two-rounds-at-once" and wanted > 0)
        )

    def confirm(self, round_: int) -> None:
        """Confirm a round, with a port that is kept."""
        self.confirmed = round_
        if self.port is not None:
            self.port.close()
        self.port = socket.socket()
        self.port.bind(("", 0))
        port = 0 if self.bug == "no-port" else self.port.getsockname()[1]
        self.queue(pb.JoinRequest(confirm=pb.ConfirmRound(round=round_, master_port=port)))

    def environment(self, assignment: pb.Assignment) -> dict[str, str]:
        """Return the environment of the worker."""
        secret = ("RALLYPOINT_RUN_SECRET", "RALLYPOINT_TLS_", "RALLYPOINT_TOKEN_")
        kept = {
            name: value
            for name, value in os.environ.items()
            if self.bug == "leaks-credentials" or not name.startswith(secret)
        }
        variables = {
            "RANK": assignment.base_rank,
            "LOCAL_RANK": 0,
            "ROLE_RANK": assignment.base_role_rank,
            "GROUP_RANK": assignment.group_rank,
            "WORLD_SIZE": assignment.world_size,
            "LOCAL_WORLD_SIZE": 1,
            "ROLE_WORLD_SIZE": assignment.role_world_size,
            "GROUP_WORLD_SIZE": assignment.group_world_size,
            "ROLE_NAME": self.join.role,
            "MASTER_ADDR": assignment.master_address,
            "MASTER_PORT": assignment.master_port,
            "TORCHELASTIC_RESTART_COUNT": self.update.restart_count,
            "TORCHELASTIC_MAX_RESTARTS": self.join.settings.max_restarts,
            "TORCHELASTIC_RUN_ID": self.join.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": False,
            "TORCHELASTIC_ERROR_FILE": "error.json",
            "RALLYPOINT_RUN_ID": self.join.run_id,
            "RALLYPOINT_NODE": self.join.node_id,
            "RALLYPOINT_ROUND": assignment.round,
            "RALLYPOINT_FENCING_TOKEN": assignment.fencing_token,
            "RALLYPOINT_TIMER_SOCKET": self.watchdog.path,
        }
        if self.bug == "local-rank-missing":
            del variables["LOCAL_RANK"]
        return {**kept, **{name: str(value) for name, value in variables.items()}}

    async def start(self, round_: int) -> None:
        """Start the worker of a round."""
        if self.bug == "never-starts":
            return
        self.round, self.stopping = round_, False
        self.failure = None
        if self.port is not None and self.bug != "keeps-the-port":
            self.port.close()
        self.process = await asyncio.create_subprocess_exec(
            self.worker, env=self.environment(self.update.assignment), start_new_session=True
        )
        self.started = time.monotonic()
        self.report_start()
        self.watching = asyncio.create_task(self.watch(self.process))

    async def watch(self, process: asyncio.subprocess.Process) -> None:
        """Report the end of the worker."""
        code = await process.wait()
        self.watchdog.clear(f"0@{self.round}")
        if self.stopping or process is not self.process:
            return
        self.process = None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if code == 0:
            self.succeeded = self.round
            self.outbox.put_nowait(pb.JoinRequest(succeeded=pb.ReportSuccess(round=self.round)))
            self.over = True
            if self.bug == "leaves-after-success":
                self.queue(pb.JoinRequest(leave=pb.LeaveRun(reason="done")))
        elif self.bug != "no-failure-report":
            failure = pb.WorkerFailure(
                round=self.round, rank=0, local_rank=0, exit_code=code, pid=process.pid
            )
            if self.bug == "reports-a-taken-port-in-doubt":
                failure.kind = pb.FAILURE_KIND_PORT_TAKEN
            self.failure = failure, time.monotonic()
            self.report()
        self.changed.set()

    async def stop(self) -> None:
        """Stop the worker, and its child processes."""
        process, self.stopping = self.process, True
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL if self.bug == "sigkill-at-once" else signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), None if self.bug == "no-sigkill" else _KILL_AFTER)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        with suppress(ProcessLookupError):
            while self.bug != "leaves-grandchildren":  # a killed process may live on for a moment
                os.killpg(process.pid, signal.SIGKILL)
                await asyncio.sleep(0.01)
        self.process = None


class Timer(NamedTuple):
    """A timer of the worker."""

    worker_id: str
    scope: str
    seconds: float
    since: float
    sequence: int

    def acquire(self) -> timer_pb.SuperviseAction:
        """Return the action that registers it."""
        acquire = timer_pb.Acquire(worker_id=self.worker_id, scope=self.scope, sequence=self.sequence)
        set_seconds(acquire.after, self.seconds)
        set_seconds(acquire.elapsed, time.monotonic() - self.since)
        return timer_pb.SuperviseAction(acquire=acquire)


class Watchdog:
    """The timers of the node's worker: its socket, and the stream to the timer service."""

    def __init__(self, node: Node, address: str) -> None:
        self.node, self.address = node, address
        self.path = os.path.join(os.environ["TMPDIR"], "timer")
        self.timers: dict[int, Timer] = {}
        self.sequence = random.randrange(1, 2**40)
        self.trouble = ""
        self.renewed = False
        self.lease = pb.Lease()
        self.changes: asyncio.Queue[timer_pb.SuperviseAction] = asyncio.Queue()
        self.alarm: asyncio.TimerHandle | None = None
        self.call: Any = None
        self.bound = _FIRST
        self.tasks: list[asyncio.Task[Any]] = []

    def renew(self) -> None:
        """Use the node's present lease."""
        if self.lease.number == self.node.lease.number:
            return
        if self.lease.number and self.node.bug == "subscribes-with-old-lease":
            return
        self.lease = self.node.lease
        if self.call is not None:
            self.renewed = True
            self.call.cancel()
        else:
            self.tasks.append(asyncio.create_task(self.streams()))

    async def serve(self) -> None:
        """Accept the worker's connections."""
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.setblocking(False)
            listener.bind(self.path)
            listener.listen()
            while True:
                connection, _ = await loop.sock_accept(listener)
                self.tasks.append(asyncio.create_task(self.read(connection)))

    async def read(self, connection: socket.socket) -> None:
        """Receive one connection's messages."""
        worker_id = f"0@{self.node.round}"
        while data := await asyncio.get_running_loop().sock_recv(connection, 288):
            (token,) = struct.unpack_from("<Q", data, 8)
            if data[0] == 1:
                nanoseconds = struct.unpack_from("<QQ", data, 16)
                since, seconds = (each / 1e9 for each in nanoseconds)
                self.sequence += 1
                timer = Timer(worker_id, data[32:].decode(), seconds, since, self.sequence)
                self.timers[token] = timer
                self.changes.put_nowait(timer.acquire())
            elif (ended := self.timers.pop(token, None)) is not None:
                release = timer_pb.Release(worker_id=worker_id, scope=ended.scope)
                self.changes.put_nowait(timer_pb.SuperviseAction(release=release))

    def clear(self, worker_id: str) -> None:
        """Drop the timers of a worker that has ended."""
        self.timers.clear()
        if self.node.bug != "no-clear":
            clear = timer_pb.ClearWorker(worker_id=worker_id)
            self.changes.put_nowait(timer_pb.SuperviseAction(clear=clear))

    async def streams(self) -> None:
        """Open one stream after the other."""
        while True:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                try:
                    await self.one_stream()
                except grpc.aio.AioRpcError as error:
                    if (
                        self.node.bug == "no-watchdog-after-refusal"
                        and error.code() is grpc.StatusCode.PERMISSION_DENIED
                    ):
                        return
                except asyncio.CancelledError:  # of the call, for a new lease; or of this task
                    if not self.renewed:
                        raise
                    self.renewed = False
            if self.alarm is None:
                self.alarm = asyncio.get_running_loop().call_later(_TROUBLED_AFTER, self.alert)
            if self.node.bug != "watchdog-storm":
                await asyncio.sleep(random.uniform(self.bound / 2, self.bound))
            self.bound = min(2 * self.bound, _LONGEST_OF_WATCHDOG)

    def alert(self) -> None:
        """Report that no watchdog guards the worker."""
        if self.node.bug != "hides-trouble":
            self.trouble = "no timer service"

    def first_message(self) -> timer_pb.SuperviseRequest:
        """Return the request with all present timers."""
        token = hashlib.sha256(b"rallypoint timers " + self.lease.token).digest()
        subscribe = timer_pb.Subscribe(
            run_id=self.node.join.run_id,
            node_id=self.node.join.node_id,
            lease=self.lease.number,
            incarnation=self.lease.incarnation,
            token=b"" if self.node.bug == "subscribes-without-token" else token,
        )
        if self.node.bug == "renumbers-timers":
            self.sequence += 1_000
            self.timers = {
                token: timer._replace(sequence=self.sequence + token) for token, timer in self.timers.items()
            }
        self.changes = asyncio.Queue()
        actions = [timer.acquire() for timer in self.timers.values()]
        registered = timer_pb.SuperviseAction(registered=timer_pb.Registered())
        actions.insert(0 if self.node.bug == "registers-before-timers" else len(actions), registered)
        return timer_pb.SuperviseRequest(actions=[timer_pb.SuperviseAction(subscribe=subscribe), *actions])

    async def one_stream(self) -> None:
        """Use one stream until it ends."""
        async with self.node.channel(self.address) as channel:
            self.call = timer_grpc.TimerServiceStub(channel).Supervise()
            await self.call.write(self.first_message())
            sender = asyncio.create_task(self.send(self.call))
            try:
                async for response in self.call:
                    for event in response.events:
                        if event.HasField("subscribed"):
                            self.guarded()
                        elif event.HasField("expired"):
                            self.tasks.append(asyncio.create_task(self.expired(event.expired)))
                        elif event.HasField("refused") and self.node.bug == "repeats-refused-timers":
                            for timer in self.timers.values():
                                self.changes.put_nowait(timer.acquire())
                        elif event.HasField("learned") and self.node.bug != "remembers-forgotten-scopes":
                            self.changes.put_nowait(timer_pb.SuperviseAction(learned=event.learned))
            finally:
                sender.cancel()

    def guarded(self) -> None:
        """Use short pauses again."""
        self.bound, self.trouble = _FIRST, ""
        if self.alarm is not None:
            self.alarm.cancel()
            self.alarm = None

    async def send(self, call: Any) -> None:
        """Send changes in batches."""
        while True:
            actions = [await self.changes.get()]
            if self.node.bug != "message-for-each-change":
                await asyncio.sleep(_GATHERED)
                while not self.changes.empty():
                    actions.append(self.changes.get_nowait())
            await call.write(timer_pb.SuperviseRequest(actions=actions))

    async def expired(self, event: timer_pb.Expired) -> None:
        """Kill the worker if it still holds the timer; acknowledge."""
        bug, process = self.node.bug, self.node.process
        held = not event.sequence or event.sequence in {each.sequence for each in self.timers.values()}
        acknowledge = timer_pb.Acknowledge(expiry_id=event.expiry_id)
        action = timer_pb.SuperviseAction(acknowledge=acknowledge)
        if bug == "acknowledges-before-the-kill":
            self.changes.put_nowait(action)
            await asyncio.sleep(1.0)
        if process is not None and (held or bug == "kills-on-crossed-expiry") and bug != "ignores-expiry":
            process.kill()
            await asyncio.wait({self.node.watching})
        if bug != "acknowledges-before-the-kill":
            self.changes.put_nowait(action)


def main() -> None:
    """Run one node."""
    addresses, run_id, node_id, worker, timer, bug, ca = (*sys.argv[1:], "", "")[:7]
    assert not bug or bug in BUGS, bug
    sys.exit(asyncio.run(Node(addresses, run_id, node_id, worker, timer, bug=bug, ca=ca).run()))


if __name__ == "__main__":
    main()
