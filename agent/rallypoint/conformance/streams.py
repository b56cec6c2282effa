"""Scenarios of broken streams and of errors: resuming, back-off, redirects and refusals."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from itertools import pairwise
from typing import TypeAlias

from grpc import StatusCode

from rallypoint.conformance.checks import HOLD, NotOffered, Scenario
from rallypoint.conformance.client import StartedWorker
from rallypoint.conformance.rounds import FINAL, FROZEN, JOINABLE, close, failed, let_go, rank_0, succeed
from rallypoint.conformance.scene import SCENARIOS, SHORT_INTERVAL, Scene, error, scenario
from rallypoint.conformance.server import HOST, Stream, new_authority
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import to_seconds
from rallypoint.rpc.errors import GONE, ServiceError

_Refused: TypeAlias = Callable[[Scene, str, ServiceError], Awaitable[None]]

_STORM = 8.0  # seconds for which each stream is refused
_MOST_STREAMS = 40  # with pauses from 0 to 1 s there are 16 on average
_MOST_REDIRECTED = 200  # five streams for each pause: 90 on average
_DELAY = 2.0  # RetryInfo.retry_delay, seconds
_LONG_DELAY = 20.0  # the same, where the client must not wait
_AWAY = 4.0  # seconds without the service: more than twice the lease's time to live


def plain(code: StatusCode) -> ServiceError:
    """Return an error of gRPC or of a proxy, without a reason of ours."""
    return ServiceError(code, "", "scripted")


def _same_workers(scene: Scene, workers: list[StartedWorker]) -> bool:
    return {each.pid for each in scene.client.workers} == {each.pid for each in workers} and all(
        each.alive for each in workers
    )


async def _go_on(scene: Scene, stream: Stream, workers: list[StartedWorker]) -> None:
    """Confirm a resume with the state of the run; the workers must run on."""
    scene.again(stream)
    scene.update(stream, FINAL, 1, revision=scene.revision)
    await scene.hold("R23", lambda: _same_workers(scene, workers), "the workers run on", HOLD / 2)


async def _broken(
    scene: Scene, rule: str, stream: Stream, workers: list[StartedWorker], end: ServiceError
) -> Stream:
    """End a stream with an error, and wait for the next one, which must resume."""
    stream.send(end)
    again = await scene.resumed(rule, f"a stream that resumes after {end.reason or end.code.name}")
    await _go_on(scene, again, workers)
    return again


@scenario("R33", "R24", "R25", "R23")
async def broken_streams(scene: Scene) -> None:
    """Streams end with UNAVAILABLE and CANCELLED: the node resumes, with the highest of its revisions."""
    stream, workers = await scene.running()
    stream = await _broken(scene, "R33", stream, workers, plain(StatusCode.UNAVAILABLE))
    stream = await _broken(scene, "R33", stream, workers, plain(StatusCode.CANCELLED))
    highest = scene.revision
    scene.update(stream, FINAL, 1)
    scene.update(stream, FINAL, 1, revision=highest)
    await _broken(scene, "R25", stream, workers, plain(StatusCode.UNAVAILABLE))


@scenario("R33")
async def newcomer_retries(scene: Scene) -> None:
    """The first streams end with errors of gRPC or of a proxy, before a lease."""
    stream = await scene.begin()
    for code in (*GONE, StatusCode.DEADLINE_EXCEEDED):
        stream.send(plain(code))
        stream = await scene.joined("R33", f"another `join` after {code.name}")
    scene.grant(stream)
    await scene.run_round(stream, 1)


@scenario("R23", "R24")
async def service_restarts(scene: Scene) -> None:
    """The service closes all connections and is away for longer than a lease lives."""
    stream, workers = await scene.running(SHORT_INTERVAL)
    await scene.service.stop()
    await scene.hold("R23", lambda: _same_workers(scene, workers), "the workers run on", _AWAY)
    await scene.service.start()
    stream = await scene.resumed("R24")
    await _go_on(scene, stream, workers)
    close(scene, stream, pb.OUTCOME_SUCCEEDED)
    await scene.ended("R08", "OUTCOME_SUCCEEDED", success=True)


@scenario("R48", "R23", "R25")
async def reset_connection(scene: Scene) -> None:
    """The connection is reset in the middle of an update, twice."""
    stream, workers = await scene.running()
    for _ in range(2):
        highest = scene.revision
        scene.service.relays[0].cutting = True
        scene.update(stream, FINAL, 1)
        scene.revision = highest
        stream = await scene.resumed("R48", "a stream that resumes after a reset")
        await _go_on(scene, stream, workers)


@scenario("R55")
async def silent_replica(scene: Scene) -> None:
    """One replica accepts the stream and sends nothing; the other one replies."""
    scene.need("addresses", "the client knows one replica")
    silent = await scene.begin()
    stream = await scene.stream("R55", "a stream to the other replica")
    scene.check("R55", stream.replica != silent.replica, "the other replica", "the same one again")
    late = stream.opened_at - silent.opened_at
    scene.check("R55", late > 3.0, "about 4 s for the first reply", f"{late:.1f} s")
    scene.grant(stream)
    await scene.run_round(stream, 1)


@scenario("R56")
async def goaway(scene: Scene) -> None:
    """The server is replaced: GOAWAY comes, and the stream goes on for a while, then it ends."""
    stream, workers = await scene.running()
    await scene.service.replace()
    before = scene.service.relays[0].connections
    scene.update(stream, FINAL, 1)

    def calm() -> bool:
        return not stream.over and _same_workers(scene, workers)

    await scene.hold("R56", calm, "the stream and the workers go on after GOAWAY", 2 * HOLD)
    stream = await _broken(scene, "R56", stream, workers, plain(StatusCode.UNAVAILABLE))
    another = scene.service.relays[0].connections > before
    scene.check("R56", another, "another connection", "a stream on the connection with GOAWAY")


@scenario("R50")
async def wrong_certificate(scene: Scene) -> None:
    """The server has a certificate of another authority, then one of another name, then the right one."""
    service = scene.service
    scene.need("ca", "the connection is plaintext")
    assert service.authority is not None
    relay = service.relays[0]
    for wrong, issuer, name in (
        ("of another authority", new_authority(), HOST),
        ("for another name", service.authority, "another.example"),
    ):
        await service.stop()
        await service.start(issuer, name)
        if not relay.connections:
            await scene.client.start()
        before = relay.connections
        expected = f"an attempt to connect to a server with a certificate {wrong}"
        await scene.until("R50", lambda before=before: relay.connections > before, expected)  # type: ignore[misc]
        await scene.hold(
            "R50", lambda: not service.streams, f"no stream with a certificate {wrong}", 2 * HOLD
        )
    await service.stop()
    await service.start()
    stream = await scene.joined("R50", "`join` to the right server")
    scene.grant(stream)
    await scene.run_round(stream, 1)


@scenario("R34")
async def draining(scene: Scene) -> None:
    """The service drains: with the message and the reason, and with the reason alone."""
    drained = error(StatusCode.UNAVAILABLE, "DRAINING")
    stream, workers = await scene.running()
    stream.send(pb.JoinResponse(draining=pb.Draining(revision=scene.revision)))
    stream = await _broken(scene, "R34", stream, workers, drained)
    await _broken(scene, "R34", stream, workers, drained)


async def _resumed(scene: Scene, stream: Stream, rule: str = "R24", expected: str = "`resume`") -> Stream:
    """Break a stream; return the next one, with its lease."""
    stream.send(plain(StatusCode.UNAVAILABLE))
    stream = await scene.resumed(rule, expected)
    scene.again(stream)
    return stream


@scenario("R26")
async def failure_repeated(scene: Scene) -> None:
    """The stream breaks after the report of a failure."""
    stream, workers = await scene.running()
    rank_0(workers).end(3)
    first = await failed(scene, stream, 3)
    stream = await _resumed(scene, stream)
    scene.update(stream, FINAL, 1, revision=scene.revision)
    expected = "the failure once more"
    again = (await scene.message("R26", stream, "worker_failed", expected, round_=1)).worker_failed
    ages = to_seconds(first.age), to_seconds(again.age)
    seen = f"round {again.round}, exit_code {again.exit_code}, age {ages[1]:g} s after {ages[0]:g} s"
    same = (again.round, again.exit_code) == (first.round, first.exit_code)
    scene.check("R26", same and ages[1] > ages[0], "the same failure, with an age that has grown", seen)


async def _started(scene: Scene, stream: Stream) -> None:
    await scene.service.changed.until(lambda: bool(stream.of("started")) or stream.over, 2 * HOLD)
    if not stream.of("started"):
        raise NotOffered("the client does not report the start of a round")


@scenario("R51")
async def start_repeated(scene: Scene) -> None:
    """The stream breaks after the report of the start, which a client may leave out."""
    stream, _ = await scene.running()
    await _started(scene, stream)
    first = (await scene.message("R51", stream, "started")).started
    scene.check("R51", first.round == 1, "`started` of round 1", f"of round {first.round}")
    stream = await _resumed(scene, stream)
    scene.update(stream, FINAL, 1, revision=scene.revision)
    again = (await scene.message("R51", stream, "started", "the start once more", round_=1)).started
    ages = to_seconds(first.age), to_seconds(again.age)
    scene.check("R51", ages[1] > ages[0], "an age that has grown", f"{ages[1]:g} s after {ages[0]:g} s")


@scenario("R58")
async def start_recorded(scene: Scene) -> None:
    """The service has recorded the start when the stream breaks."""
    stream, workers = await scene.running()
    await _started(scene, stream)
    scene.update(stream, FINAL, 1, start_recorded=True)
    rank_0(workers).end(3)
    await failed(scene, stream, 3)
    stream = await _resumed(scene, stream)
    await scene.message("R26", stream, "worker_failed", "the failure once more", round_=1)
    await scene.hold("R58", lambda: not stream.of("started"), "no `started` after `start_recorded`")


@scenario("R57")
async def order_after_resume(scene: Scene) -> None:
    """The stream breaks when a failure was reported, and the next round confirmed."""
    stream, workers = await scene.running()
    rank_0(workers).end(3)
    await failed(scene, stream, 3)
    end = pb.RoundEnd(round=1, detail="scripted")
    scene.update(stream, FROZEN, 2, last_round_end=end)
    await scene.confirmed(stream, 2)
    stream = await _resumed(scene, stream)
    scene.update(stream, FROZEN, 2, revision=scene.revision, last_round_end=end)
    await scene.message("R26", stream, "worker_failed", "the failure once more", round_=1)
    await scene.message("R28", stream, "confirm", "the confirmation once more", round_=2)
    kinds = stream.kinds
    ordered = kinds.index("worker_failed") < kinds.index("confirm")
    scene.check("R57", ordered, "`worker_failed` before `confirm`", ", ".join(kinds))


@scenario("R27")
async def success_repeated(scene: Scene) -> None:
    """The stream breaks after the report of success."""
    stream, _ = await scene.running()
    await succeed(scene, stream)
    stream = await _resumed(scene, stream)
    scene.update(stream, FINAL, 1, revision=scene.revision)
    await scene.message("R27", stream, "succeeded", "the success once more", round_=1)


@scenario("R28")
async def confirmation_repeated(scene: Scene) -> None:
    """The stream breaks after the confirmation, and after `leave`."""
    stream = await scene.begin()
    scene.grant(stream)
    scene.update(stream, FROZEN, 1)
    await scene.confirmed(stream, 1)
    stream = await _resumed(scene, stream)
    scene.update(stream, FROZEN, 1, revision=scene.revision)
    await scene.confirmed(stream, 1, "R28")
    scene.client.terminate()
    await scene.message("R22", stream, "leave")
    stream = await _resumed(scene, stream, "R28", "a stream that resumes, for the `leave` that may be lost")
    scene.update(stream, JOINABLE, revision=scene.revision)
    await scene.message("R28", stream, "leave", "`leave` once more")
    let_go(scene, stream)
    await scene.ended("R22", "after `leave` the stream ended with OK")


async def _storm(scene: Scene, rule: str, refusal: ServiceError, most: int) -> None:
    """Refuse all streams for a while, and until there are three; count those of the first while."""
    scene.service.script[0] = [refusal]
    before = len(scene.service.streams)
    begun = scene.now
    while scene.now < begun + _STORM and len(scene.service.streams) - before <= 2 * most:
        await scene.service.changed.since(scene.service.changed.count, 0.1)
    count = len(scene.service.streams) - before
    expected = f"streams while each is refused, at most {most} in {_STORM:g} s"
    scene.check(rule, count <= most, expected, f"{count} in {scene.now - begun:.1f} s")
    await scene.until(rule, lambda: len(scene.service.streams) - before >= 3, expected)
    scene.service.script = [[], []]
    scene.forget_streams()


@scenario("R29")
async def back_off(scene: Scene) -> None:
    """Each stream is refused for a while; then the service is back, and the node resumes."""
    stream, workers = await scene.running()
    before = len(scene.service.streams)
    scene.service.script[0] = [plain(StatusCode.UNAVAILABLE)]
    stream.send(plain(StatusCode.UNAVAILABLE))
    await _storm(scene, "R29", plain(StatusCode.UNAVAILABLE), _MOST_STREAMS)
    times = [each.opened_at for each in scene.service.streams[before:]]
    late = [after - first for first, after in pairwise(times)][4:]
    if len(late) >= 3:
        seen = f"pauses of {', '.join(f'{each:.2f}' for each in late)} s"
        scene.check("R29", max(late) - min(late) > 0.1 * max(late), "random pauses", seen)
    resumed = await scene.resumed("R24")
    await _go_on(scene, resumed, workers)


@scenario("R30")
async def retry_delay(scene: Scene) -> None:
    """A newcomer is refused with TOO_MANY_NODES and RetryInfo, a node with TOO_MANY_REQUESTS and NOT_OWNER."""
    stream = await scene.begin()

    async def waited(refusal: ServiceError, kind: str) -> Stream:
        begun = scene.now
        stream.send(refusal)
        following = await scene.stream("R30", f"a stream with `{kind}` after {refusal.reason}")
        late = following.opened_at - begun
        scene.check(
            "R30", late >= 0.95 * _DELAY, f"a pause of {_DELAY:g} s after {refusal.reason}", f"{late:.2f} s"
        )
        seen = str(following.first.WhichOneof("message"))
        scene.check("R30", seen == kind, f"`{kind}` after {refusal.reason}", f"`{seen}`")
        return following

    stream = await waited(error(StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_NODES", retry_after=_DELAY), "join")
    scene.grant(stream)
    workers = await scene.run_round(stream, 1)
    for code, reason in (
        (StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS"),
        (StatusCode.UNAVAILABLE, "NOT_OWNER"),
    ):
        stream = await waited(error(code, reason, retry_after=_DELAY), "resume")
        await _go_on(scene, stream, workers)


def _moved(address: str, reason: str = "NOT_OWNER", delay: float | None = None) -> ServiceError:
    metadata = {"run_id": "r", "owner_address": address}
    return error(StatusCode.UNAVAILABLE, reason, metadata=metadata, retry_after=delay)


@scenario("R31")
async def redirects(scene: Scene) -> None:
    """Another replica owns the run: for a newcomer, and for a node whose stream ends with OWNERSHIP_LOST."""
    addresses = scene.service.addresses
    stream = await scene.begin()
    for replica, reason, first in ((1, "NOT_OWNER", "join"), (0, "OWNERSHIP_LOST", "resume")):
        begun = scene.now
        stream.send(_moved(addresses[replica], reason, _LONG_DELAY))
        stream = await scene.stream("R31", f"a stream to the owner after {reason}")
        seen = f"`{stream.first.WhichOneof('message')}` to replica {stream.replica}"
        scene.check("R31", seen == f"`{first}` to replica {replica}", f"`{first}` to replica {replica}", seen)
        late = scene.now - begun
        scene.check(
            "R31", late < _LONG_DELAY, f"a redirect is followed at once after {reason}", f"{late:.1f} s"
        )
        if first == "join":
            scene.grant(stream)
            workers = await scene.run_round(stream, 1)
        else:
            scene.check_resume("R31", stream, "a stream that resumes")
            await _go_on(scene, stream, workers)


@scenario("R32")
async def endless_redirects(scene: Scene) -> None:
    """Two replicas name each other as the owner for a while."""
    stream, workers = await scene.running()
    there, back = (_moved(address) for address in reversed(scene.service.addresses))
    scene.service.script[1] = [back]
    stream.send(there)
    await _storm(scene, "R32", there, _MOST_REDIRECTED)
    stream = await scene.resumed("R24")
    await _go_on(scene, stream, workers)


async def _rejoins(scene: Scene, rule: str, refusal: ServiceError) -> None:
    """Refuse a resume; the node stops its workers and joins again, a run whose revisions begin at 1."""
    scene.revision = 100
    stream, workers = await scene.running()
    stream.send(plain(StatusCode.UNAVAILABLE))
    stream = await scene.resumed("R24")
    settings = scene.join.settings
    stream.send(refusal)
    stream = await scene.joined(rule, f"`join` after {refusal.reason}")
    scene.check(rule, scene.join.settings == settings, "the same settings", "other settings")
    former, incarnation = scene.join.former_incarnation, scene.lease.incarnation
    scene.check("R53", former == incarnation, f"former_incarnation {incarnation!r}", f"{former!r}")
    scene.revision = 0
    scene.grant(stream, phase=None)
    gone = f"the workers stop after {refusal.reason}"
    await scene.until(rule, lambda: not any(each.alive for each in workers), gone)
    scene.update(stream, JOINABLE)
    await scene.run_round(stream, 2)
    stream.send(plain(StatusCode.UNAVAILABLE))
    await scene.resumed(rule)


async def _newcomer_ends(scene: Scene, rule: str, refusal: ServiceError) -> None:
    await _gives_up(scene, rule, refusal, await scene.begin())


async def _waiting_ends(scene: Scene, rule: str, refusal: ServiceError) -> None:
    stream = await scene.begin()
    scene.grant(stream)
    await _gives_up(scene, rule, refusal, stream)


async def _running_ends(scene: Scene, rule: str, refusal: ServiceError) -> None:
    stream, _ = await scene.running()
    await _gives_up(scene, rule, refusal, stream)


async def _gives_up(scene: Scene, rule: str, refusal: ServiceError, stream: Stream) -> None:
    """End the stream of a node with a refusal for good."""
    scene.service.script[0] = [refusal]
    stream.send(refusal)
    await scene.ended(rule, refusal.reason, success=False)
    count = len(scene.service.streams)
    # Two: an error of gRPC may have taken the place of the first refusal.
    scene.check(rule, count <= 2, f"no other stream after {refusal.reason}", f"{count - 1} other streams")


_WHO: dict[_Refused, str] = {
    _rejoins: "A resume",
    _newcomer_ends: "A newcomer",
    _waiting_ends: "A waiting node",
    _running_ends: "A running node",
}


def _refusal(name: str, rules: tuple[str, ...], play: _Refused, refusal: ServiceError) -> None:
    """Register a scenario of a refusal; the first of `rules` demands the reaction."""
    summary = f"{_WHO[play]} is refused with {refusal.reason}."
    SCENARIOS[name] = Scenario(name, summary, rules, lambda scene: play(scene, rules[0], refusal))


_FAILED = partial(error, StatusCode.FAILED_PRECONDITION)
_refusal("lease-lost", ("R35", "R53"), _rejoins, _FAILED("LEASE_LOST"))
_refusal("lease-not-proven", ("R37",), _rejoins, error(StatusCode.PERMISSION_DENIED, "LEASE_NOT_PROVEN"))
_refusal("run-not-found", ("R38",), _rejoins, error(StatusCode.NOT_FOUND, "RUN_NOT_FOUND"))
_refusal("revision-ahead", ("R39", "R25"), _rejoins, error(StatusCode.OUT_OF_RANGE, "REVISION_AHEAD"))
_refusal("superseded", ("R36", "R09"), _running_ends, _FAILED("LEASE_LOST", metadata={"superseded_by": "9"}))
_refusal("evicted", ("R41",), _running_ends, _FAILED("NODE_EVICTED", metadata={"by": "operator"}))
_refusal("run-closed", ("R42",), _running_ends, _FAILED("RUN_CLOSED", metadata={"outcome": "FAILED"}))
_refusal("join-timed-out", ("R49",), _waiting_ends, _FAILED("JOIN_TIMED_OUT"))
for _lasting in (
    error(StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", field_violations=[("join.role", "scripted")]),
    error(StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE"),
    error(StatusCode.PERMISSION_DENIED, "NODE_ID_TAKEN"),
    error(StatusCode.UNAUTHENTICATED, "NOT_IDENTIFIED"),
    error(StatusCode.PERMISSION_DENIED, "NOT_PERMITTED"),
    _FAILED("RUN_ENDING"),
):
    _refusal(_lasting.reason.lower().replace("_", "-"), ("R44",), _newcomer_ends, _lasting)


@scenario("R43")
async def settings_differ(scene: Scene) -> None:
    """The run has other settings."""
    stream = await scene.begin()
    text = "the run has max_restarts 7, scripted"
    stream.send(_FAILED("SETTINGS_DIFFER", text, metadata={"max_restarts": "7"}))
    await scene.ended("R43", "SETTINGS_DIFFER", success=False)
    shown = text in scene.client.output
    scene.check("R43", shown, f"the output has the message {text!r}", scene.client.last_lines)


@scenario("R40")
async def stream_replaced(scene: Scene) -> None:
    """Each stream ends with STREAM_REPLACED for a while."""
    stream, workers = await scene.running()
    replaced = error(StatusCode.ABORTED, "STREAM_REPLACED")
    scene.service.script[0] = [replaced]
    stream.send(replaced)
    before = len(scene.service.streams)

    def calm() -> bool:
        return len(scene.service.streams) - before <= _MOST_STREAMS and _same_workers(scene, workers)

    await scene.hold("R40", calm, f"the workers run on, at most {_MOST_STREAMS} streams in 4 s", _STORM / 2)


@scenario("R45")
async def other_errors(scene: Scene) -> None:
    """Errors come that end no membership: of a newer service, of a broken run, of a wrong server."""
    stream, workers = await scene.running()
    for code, reason in (
        (StatusCode.FAILED_PRECONDITION, "REASON_OF_A_NEWER_SERVICE"),
        (StatusCode.FAILED_PRECONDITION, "RUN_BROKEN"),
        (StatusCode.UNAVAILABLE, "UNEXPECTED_ERROR"),
        (StatusCode.UNAVAILABLE, "ETCD_UNAVAILABLE"),
        (StatusCode.UNAVAILABLE, "FIRST_MESSAGE_LATE"),
        (StatusCode.UNAVAILABLE, "JOURNAL_BROKEN"),
        (StatusCode.UNAVAILABLE, "SUBSCRIBER_TOO_SLOW"),
        (StatusCode.PERMISSION_DENIED, "NOT_ALLOWED"),
    ):
        stream = await _broken(scene, "R45", stream, workers, error(code, reason))
