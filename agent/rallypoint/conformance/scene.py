"""One play of a scenario: the scripted service, the client, and the checks of rules."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rallypoint.conformance.checks import POLL, Checks, ClientFailed, NotOffered, Scenario, register_in
from rallypoint.conformance.client import StartedWorker, TestedClient
from rallypoint.conformance.server import ScriptedService, Stream, kind_of, new_authority
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import set_seconds
from rallypoint.rpc.errors import ServiceError
from rallypoint.timer.v1 import timer_service_pb2 as timer_pb

INTERVAL = 20.0
"""keep_alive_interval of the leases, seconds; time_to_live is three times that. Long: a client whose heartbeat crosses
the end of its stream may get an error of gRPC in place of the service's."""

SHORT_INTERVAL = 0.5
"""The same, where a scenario is about heartbeats or the time to live."""

FENCING_TOKEN = 77
_RUN_ID = "conformance"

SEVERAL_ADDRESSES = "silent-replica"
"""The scenario in which {addresses} has both replicas; in others, as {address}, the first."""


class Scene(Checks):
    """A scenario that is played.

    Attributes:
        service: The scripted service.
        client: The client.
        revision: The last revision that was sent.
        lease: The last lease that was granted.
        join: The last `join` of the client.
        port: The port of its last `confirm`.
    """

    def __init__(
        self, service: ScriptedService, client: TestedClient, values: dict[str, str], timeout: float
    ) -> None:
        """`timeout`: seconds to wait for each expected action of the client."""
        super().__init__(client, service.changed, timeout)
        self.service = service
        self.client: TestedClient = client
        self.revision = 0
        self.lease = pb.Lease()
        self.join = pb.JoinRun()
        self.port = 0
        self._values = values
        self._next_stream = self._next_watch = 0
        self._messages_read: dict[tuple[int, str], int] = {}

    def state(self) -> str:
        """Describe the client's present state, for people."""
        workers = self.client.workers
        alive = sum(each.alive for each in workers)
        parts = [
            f"{len(workers)} workers started, {alive} alive",
            f"{len(self.service.streams)} streams opened",
        ]
        if self.service.streams:
            stream = self.service.streams[-1]
            parts.append(f"messages of the last: {', '.join([kind_of(stream.first), *stream.kinds[-4:]])}")
            if stream.over:
                parts.append("it is over")
        if self.client.exit_code is not None:
            parts.append(f"exit code {self.client.exit_code}; last lines: {self.client.last_lines}")
        return "; ".join(parts)

    # ---- Streams

    async def stream(self, rule: str, expected: str) -> Stream:
        """Return the next stream that the client opens."""
        await self.until(rule, lambda: len(self.service.streams) > self._next_stream, expected)
        self._next_stream += 1
        return self.service.streams[self._next_stream - 1]

    async def watch(self, rule: str, expected: str = "a stream of the watchdog") -> Stream:
        """Return the next stream to the timer service that the client opens; confirm it."""
        await self.until(rule, lambda: len(self.service.watches) > self._next_watch, expected)
        self._next_watch += 1
        stream = self.service.watches[self._next_watch - 1]
        subscribed = timer_pb.SuperviseEvent(subscribed=timer_pb.Subscribed())
        set_seconds(subscribed.subscribed.reoffer_interval, 60.0)
        stream.send(timer_pb.SuperviseResponse(events=[subscribed]))
        return stream

    def skip_watches(self) -> None:
        """Leave out streams of the watchdog that the service has refused by itself."""
        self._next_watch = len(self.service.watches)

    def need(self, placeholder: str, lacking: str) -> None:
        """End the scenario if the client's command does not have a placeholder."""
        if placeholder not in self.client.given:
            raise NotOffered(f"the command has no {{{placeholder}}}: {lacking}")

    def forget_streams(self) -> None:
        """Leave out streams that the service has refused by itself."""
        self._next_stream = len(self.service.streams)

    async def begin(self) -> Stream:
        """Start the client; return its first stream.

        Raises:
            ClientFailed: The client ended before it opened one.
        """
        await self.client.start()
        end = self.now + self.timeout
        while not self.service.streams and self.client.exit_code is None and self.now < end:
            await self.service.changed.since(self.service.changed.count, POLL)
        if not self.service.streams and self.client.exit_code is not None:
            raise ClientFailed(
                f"the client ended with exit code {self.client.exit_code} before it opened a stream; its last "
                f"lines: {self.client.last_lines}"
            )
        return await self.joined("R10", "a stream that begins with `join`, within 10 s of its beginning")

    async def joined(self, rule: str, expected: str) -> Stream:
        """Return the next stream, which must begin with a complete `join`; `rule` demands it."""
        stream = await self.stream(rule, expected)
        kind = kind_of(stream.first)
        self.check(rule, kind == "join", expected, f"the stream begins with `{kind}`")
        self.join = join = stream.first.join
        wrong = [
            f"{name} is {value!r}, not {self._values[name]!r}"
            for name, value in (("run_id", join.run_id), ("node_id", join.node_id))
            if value != self._values[name]
        ]
        if not 1 <= join.settings.min_nodes <= join.settings.max_nodes:
            wrong.append(f"settings has {join.settings.min_nodes} to {join.settings.max_nodes} nodes")
        wrong += [f"{name} is missing" for name in ("address", "local_world_size") if not getattr(join, name)]
        self.check("R10", not wrong, "a complete `join`", "; ".join(wrong))
        return stream

    async def resumed(self, rule: str, expected: str = "a stream that begins with `resume`") -> Stream:
        """Return the next stream, which must resume the lease; `rule` demands it."""
        stream = await self.stream(rule, expected)
        self.check_resume(rule, stream, expected)
        return stream

    def check_resume(self, rule: str, stream: Stream, expected: str) -> None:
        """Check the first message of a stream that resumes."""
        kind = kind_of(stream.first)
        self.check(rule, kind == "resume", expected, f"the stream begins with `{kind}`")
        resume = stream.first.resume
        seen = [
            (name, getattr(resume, name), value)
            for name, value in (*self._names(), ("lease", self.lease.number), ("token", self.lease.token))
            if getattr(resume, name) != value
        ]
        wrong = "; ".join(f"{name} is {got!r}, not {value!r}" for name, got, value in seen)
        self.check("R24", not seen, "a `resume` with the names, the lease and its token", wrong)
        after = resume.after_revision
        self.check(
            "R25", after == self.revision, f"after_revision {self.revision}", f"after_revision {after}"
        )

    def _names(self) -> list[tuple[str, Any]]:
        return [("run_id", self._values["run_id"]), ("node_id", self._values["node_id"])]

    async def message(
        self, rule: str, stream: Stream, kind: str, expected: str = "", *, round_: int = 0
    ) -> Any:
        """Return the next message of a kind on a stream.

        With `round_`, those of other rounds are left out: a client may send each message twice.
        """
        expected = expected or f"`{kind}`"
        key = (id(stream), kind)

        def found() -> Any:
            for message in stream.of(kind)[self._messages_read.get(key, 0) :]:
                if not round_ or getattr(message, kind).round == round_:
                    return message
            return None

        await self.until(rule, lambda: found() or stream.over, expected)
        message = found()
        self.check(rule, message is not None, expected, self.state())
        assert message is not None
        self._messages_read[key] = stream.of(kind).index(message) + 1
        return message

    # ---- Messages of the service

    def grant(
        self, stream: Stream, *, interval: float = INTERVAL, phase: int | None = pb.PHASE_JOINABLE
    ) -> None:
        """Send a new lease; and an update with `phase`, unless it is None."""
        self.lease = pb.Lease(
            number=self.lease.number + 1,
            revision=self.revision,
            incarnation="i1",
            token=secrets.token_bytes(16),
        )
        self.again(stream, interval=interval)
        if phase is not None:
            self.update(stream, phase)

    def again(self, stream: Stream, *, interval: float = INTERVAL) -> None:
        """Send the lease that the client holds, as after a resume."""
        set_seconds(self.lease.keep_alive_interval, interval)
        set_seconds(self.lease.time_to_live, 3 * interval)
        stream.send(pb.JoinResponse(lease=self.lease))

    def update(
        self, stream: Stream, phase: int, round_: int = 0, *, revision: int | None = None, **fields: Any
    ) -> pb.NodeUpdate:
        """Send an update; with an assignment if it has a round. The revision grows unless it is given."""
        if revision is None:
            revision = self.revision = self.revision + 1
        update = pb.NodeUpdate(revision=revision, restart_count=0)
        update.MergeFrom(pb.NodeUpdate(**fields))
        update.phase = phase  # type: ignore[assignment]
        if round_:
            update.assignment.CopyFrom(self.assignment(round_))
            if phase != pb.PHASE_FINAL:
                update.assignment.master_port = 0
        stream.send(pb.JoinResponse(update=update))
        return update

    def assignment(self, round_: int) -> pb.Assignment:
        """Return the assignment of a round with this node alone."""
        workers = self.join.local_world_size
        return pb.Assignment(
            round=round_,
            group_rank=0,
            group_world_size=1,
            base_rank=0,
            world_size=workers,
            base_role_rank=0,
            role_world_size=workers,
            master_address="127.0.0.1",
            master_port=self.port,
            fencing_token=FENCING_TOKEN + round_,
        )

    # ---- Rounds

    async def confirmed(self, stream: Stream, round_: int, rule: str = "R13") -> pb.ConfirmRound:
        """Wait for the confirmation of a round, and check it."""
        expected = f"`confirm` of round {round_}"
        confirm: pb.ConfirmRound = (
            await self.message(rule, stream, "confirm", expected, round_=round_)
        ).confirm
        alive = self.client.alive
        early = [each for each in alive if each.round == str(round_)]
        self.check("R01", not early, "no worker in FROZEN", self.state())
        self.check("R13", not alive, "no worker of an earlier round when the node confirms", self.state())
        if children := len(self.client.children):
            self.check("R14", False, "no grandchild when the node confirms", f"{children} alive")
        port = confirm.master_port
        self.check("R16", 0 < port < 65_536, "a port in `confirm`", f"master_port {port}")
        self.port = port
        return confirm

    async def run_round(self, stream: Stream, round_: int) -> list[StartedWorker]:
        """Play FROZEN and FINAL; return the workers once all have started."""
        self.update(stream, pb.PHASE_FROZEN, round_)
        await self.confirmed(stream, round_)
        self.update(stream, pb.PHASE_FINAL, round_)
        return await self.started(round_)

    async def started(self, round_: int, rule: str = "R03") -> list[StartedWorker]:
        """Wait until all workers of a round have started; return them."""
        wanted = self.join.local_world_size

        def workers() -> list[StartedWorker]:
            return [each for each in self.client.alive if each.round == str(round_)]

        expected = f"{wanted} workers of round {round_}, by RALLYPOINT_ROUND"
        await self.until(rule, lambda: len(workers()) >= wanted, expected)
        bound = [each.bound for each in workers() if each.bound is not None]
        if bound:
            self.check("R16", all(bound), f"workers can bind port {self.port}", "it is taken")
        return workers()

    async def running(self, interval: float = INTERVAL) -> tuple[Stream, list[StartedWorker]]:
        """Start the client and play up to running workers of round 1; return its stream and them."""
        stream = await self.begin()
        self.grant(stream, interval=interval)
        return stream, await self.run_round(stream, 1)

    async def stopped(self, rule: str, reason: str) -> None:
        """Wait until no worker is alive."""
        await self.until(rule, lambda: not self.client.alive, f"no worker after {reason}", running=False)

    async def ended(self, rule: str, reason: str, *, success: bool | None = None) -> None:
        """Wait for the end of the client; its exit code must be 0 or another one, unless `success` is None."""
        await self.until(
            rule, lambda: self.client.exit_code is not None, f"the client ends: {reason}", running=False
        )
        alive = len(self.client.alive)
        self.check("R09", not alive, "no worker after the end of the client", f"{alive} alive")
        if success is not None:
            code = self.client.exit_code
            expected = "exit code 0" if success else "an exit code other than 0"
            self.check(rule, (code == 0) == success, f"{expected}: {reason}", f"exit code {code}")


def error(code: Any, reason: str, message: str = "scripted", **more: Any) -> ServiceError:
    """Return an error of the scripted service; `more`: its metadata and retry_after."""
    return ServiceError(code, reason, message, **more)


@asynccontextmanager
async def open_scene(words: list[str], folder: Path, name: str, timeout: float) -> AsyncIterator[Scene]:
    """Open a scene for one scenario: see `Kit`."""
    authority = new_authority() if any("{ca}" in word for word in words) else None
    async with ScriptedService(authority) as service:
        values = {"address": service.addresses[0], "run_id": _RUN_ID, "node_id": f"node-{name}"}
        ca = folder / "ca.pem"
        several = service.addresses if name == SEVERAL_ADDRESSES else service.addresses[:1]
        more = {"addresses": ",".join(several), "timer": service.addresses[0], "ca": str(ca)}
        client = TestedClient(words, folder, values | more)
        if authority is not None:
            ca.write_bytes(authority.root())
        try:
            yield Scene(service, client, values, timeout)
        finally:
            await client.kill()


SCENARIOS: dict[str, Scenario] = {}
"""All scenarios for agents by name, in the order of their files; `report` imports these."""

scenario = partial(register_in, SCENARIOS)
"""Register a function as a scenario for agents: see `register_in`."""
