"""Scenarios of the watchdog's stream, `Supervise` of the timer service, for clients that know {timer}."""

from __future__ import annotations

import hashlib
from typing import Any

from grpc import StatusCode

from rallypoint.conformance.checks import HOLD
from rallypoint.conformance.client import StartedWorker
from rallypoint.conformance.rounds import rank_0
from rallypoint.conformance.scene import SHORT_INTERVAL, Scene, error, scenario
from rallypoint.conformance.server import Stream, kind_of
from rallypoint.conformance.streams import plain
from rallypoint.rpc.durations import set_seconds, to_seconds
from rallypoint.timer.v1 import timer_service_pb2 as pb

_TIMEOUT, _SHORT = 600.0, 2.0  # of the workers' timers, seconds
_STORM, _MOST_STREAMS = 8.0, 40  # seconds for which each stream is refused, and streams in that time
_TURNS, _MOST_MESSAGES = 200, 40  # a worker ends its timer and starts it again, 100 times a second
_LEASE_LOST = error(StatusCode.FAILED_PRECONDITION, "LEASE_LOST")
ENDS = {
    StatusCode.UNAVAILABLE: ("DRAINING", "TAKEOVER_UNCONFIRMED", "FIRST_MESSAGE_LATE", "UNEXPECTED_ERROR"),
    StatusCode.RESOURCE_EXHAUSTED: ("TOO_MANY_TIMERS", "TOO_MANY_REQUESTS"),
    StatusCode.INVALID_ARGUMENT: ("INVALID_ARGUMENT", "MALFORMED_MESSAGE"),
    StatusCode.PERMISSION_DENIED: ("LEASE_NOT_PROVEN", "NOT_PERMITTED"),
    StatusCode.UNAUTHENTICATED: ("NOT_IDENTIFIED",),
    StatusCode.FAILED_PRECONDITION: ("LEASE_LOST",),
    StatusCode.ABORTED: ("STREAM_REPLACED",),
}
"""The reasons of the service, by code."""


async def _guarded(
    scene: Scene, interval: float = 20.0, timeout: float = _TIMEOUT
) -> tuple[Stream, Stream, list[StartedWorker], dict[str, pb.Acquire]]:
    """Play up to workers that hold a timer each; return the node's stream, the watchdog's, the workers, the timers."""
    scene.need("timer", "the client has no watchdog")
    scene.client.plan(timer=timeout)
    stream, workers = await scene.running(interval)
    watch = await scene.watch("R60")
    _check_subscribe(scene, watch, "R60")
    await scene.message("R61", watch, "registered", "`registered` after the timers")
    return stream, watch, workers, await _timers(scene, watch, len(workers), timeout)


def _check_subscribe(scene: Scene, watch: Stream, rule: str) -> None:
    kind = kind_of(watch.first)
    scene.check(
        rule, kind == "subscribe", "a stream that begins with `subscribe`", f"it begins with `{kind}`"
    )
    subscribe = watch.first.subscribe
    wanted = {
        "run_id": scene.join.run_id,
        "node_id": scene.join.node_id,
        "lease": scene.lease.number,
        "incarnation": scene.lease.incarnation,
        "token": hashlib.sha256(b"rallypoint timers " + scene.lease.token).digest(),
    }
    wrong = [
        f"{name} is {getattr(subscribe, name)!r}, not {value!r}"
        for name, value in wanted.items()
        if getattr(subscribe, name) != value
    ]
    scene.check(rule, not wrong, "the names, and what belongs to the lease", "; ".join(wrong))


async def _timers(
    scene: Scene, watch: Stream, count: int, timeout: float = _TIMEOUT
) -> dict[str, pb.Acquire]:
    """Wait for the timers of all workers; return them by worker_id."""

    def found() -> dict[str, pb.Acquire]:
        return {each.acquire.worker_id: each.acquire for each in watch.of("acquire")}

    await scene.until("R61", lambda: len(found()) >= count, f"`acquire` of {count} timers")
    for name, timer in found().items():
        named = name.endswith("@1") and timer.scope.startswith("step")
        scene.check("R61", named, "worker_id LOCAL_RANK@ROUND, and the scope", f"{name} {timer.scope}")
        seconds, elapsed = to_seconds(timer.after), to_seconds(timer.elapsed)
        whole = abs(seconds - timeout) < 1 and 0 <= elapsed < 60
        seen = f"after {seconds:g} s, elapsed {elapsed:g} s"
        scene.check("R61", whole, f"after {timeout:g} s, elapsed less than a minute", seen)
    numbers = {each.sequence for each in found().values()}
    scene.check("R62", len(numbers) == len(found()) and 0 not in numbers, "a sequence each", str(numbers))
    return found()


@scenario("R60", "R61", "R62")
async def watchdog_returns(scene: Scene) -> None:
    """The timer service ends the stream: the next one has the same timers, older by the time between."""
    _, watch, workers, timers = await _guarded(scene)
    await scene.hold("R61", lambda: not watch.over, "the stream goes on")
    watch.send(plain(StatusCode.UNAVAILABLE))
    watch = await scene.watch("R67", "another stream of the watchdog")
    _check_subscribe(scene, watch, "R60")
    await scene.message("R61", watch, "registered")
    listed = watch.kinds[: watch.kinds.index("registered")].count("acquire")
    scene.check("R61", listed == len(workers), f"{len(workers)} `acquire` before `registered`", f"{listed}")
    for name, again in (await _timers(scene, watch, len(workers))).items():
        before = timers[name]
        same = again.sequence == before.sequence
        scene.check("R62", same, f"sequence {before.sequence} on each stream", f"{again.sequence}")
        ages = to_seconds(before.elapsed), to_seconds(again.elapsed)
        seen = f"{ages[1]:g} s after {ages[0]:g} s"
        scene.check("R61", ages[1] >= ages[0] + HOLD / 2, "an elapsed time that has grown", seen)


def _expire(watch: Stream, timer: pb.Acquire, expiry_id: int) -> None:
    expired = pb.Expired(
        expiry_id=expiry_id, worker_id=timer.worker_id, scope=timer.scope, sequence=timer.sequence
    )
    set_seconds(expired.after, _TIMEOUT)
    watch.send(_event(expired=expired))


def _event(**event: Any) -> pb.SuperviseResponse:
    return pb.SuperviseResponse(events=[pb.SuperviseEvent(**event)])


async def _acknowledged(scene: Scene, rule: str, watch: Stream, expiry_id: int) -> None:
    acknowledge = (await scene.message(rule, watch, "acknowledge", "the expiry is acknowledged")).acknowledge
    seen = acknowledge.expiry_id
    scene.check(rule, seen == expiry_id, f"expiry_id {expiry_id}", f"expiry_id {seen}")


@scenario("R63", "R65")
async def expired_timer(scene: Scene) -> None:
    """A worker's timer expires."""
    stream, watch, workers, timers = await _guarded(scene, timeout=_SHORT)
    hung = rank_0(workers)
    await scene.hold("R63", lambda: hung.alive, "the worker lives until its timer expires", _SHORT)
    _expire(watch, timers["0@1"], 7)
    await _acknowledged(scene, "R63", watch, 7)
    scene.check("R63", not hung.alive, "a dead worker when its expiry is acknowledged", "it is alive")
    failure = (
        await scene.message("R63", stream, "worker_failed", "the report of the hung worker")
    ).worker_failed
    scene.check("R63", failure.local_rank == 0, "local_rank 0", f"local_rank {failure.local_rank}")
    cleared = await scene.message("R65", watch, "clear", "`clear` of the worker that has ended")
    scene.check("R65", cleared.clear.worker_id == "0@1", "`clear` of 0@1", cleared.clear.worker_id)


@scenario("R63")
async def foreign_timer(scene: Scene) -> None:
    """A timer of AcquireTimer expires, which the agent does not know."""
    _, watch, workers, _ = await _guarded(scene)
    _expire(watch, pb.Acquire(worker_id="0@1", scope="of another program"), 8)
    await _acknowledged(scene, "R63", watch, 8)
    alive = rank_0(workers).alive
    scene.check("R63", not alive, "a dead worker after `expired` with sequence 0", "it is alive")


@scenario("R64", "R65", "R69")
async def crossed_expiry(scene: Scene) -> None:
    """The worker has another timer when the expiry comes, then none; then it changes it 100 times a second."""
    _, watch, workers, timers = await _guarded(scene)
    worker, before, count = rank_0(workers), timers["0@1"], len(watch.of("acquire"))
    worker.turn(1)
    await scene.until("R62", lambda: len(watch.of("acquire")) > count, "`acquire` of the next timer")
    newer = watch.of("acquire")[-1].acquire
    scene.check("R62", newer.sequence != before.sequence, "another sequence", f"{newer.sequence} again")
    _expire(watch, before, 9)
    await _acknowledged(scene, "R64", watch, 9)
    await scene.hold("R64", lambda: worker.alive, "the worker lives")
    worker.turn(0)

    def last() -> Any:
        return [each for _, each in watch.messages if kind_of(each) in ("acquire", "release")][-1]

    expected = "`release` of the timer of 0@1"
    await scene.until("R65", lambda: kind_of(last()) == "release", expected)
    released = last().release.worker_id
    scene.check("R65", released == "0@1", expected, released)
    _expire(watch, newer, 10)
    await _acknowledged(scene, "R64", watch, 10)
    await scene.hold("R64", lambda: worker.alive, "the worker lives")
    count, batches = len(watch.messages), scene.service.batches
    worker.turn(_TURNS)
    await scene.until("R69", lambda: len(watch.messages) > count, "changes of the timer")
    await scene.hold("R69", lambda: worker.alive, "the worker lives", 2.0)
    seen = scene.service.batches - batches
    scene.check("R69", seen <= _MOST_MESSAGES, f"at most {_MOST_MESSAGES} messages", f"{seen} in 2 s")


@scenario("R66")
async def watchdog_with_new_lease(scene: Scene) -> None:
    """The node loses its lease, and gets another one."""
    stream, watch, _, _ = await _guarded(scene)
    stream.send(_LEASE_LOST)
    stream = await scene.joined("R35", "`join` after LEASE_LOST")
    scene.grant(stream)
    await scene.run_round(stream, 2)
    while (watch := await scene.watch("R66")).first.subscribe.lease != scene.lease.number:
        pass  # it crossed the end of the lease
    _check_subscribe(scene, watch, "R66")


@scenario("R67", "R68")
async def watchdog_away(scene: Scene) -> None:
    """Each stream of the watchdog is refused for a while; then it is back."""
    stream, watch, workers, _ = await _guarded(scene, SHORT_INTERVAL)
    before = len(scene.service.watches)
    scene.service.refusal = _LEASE_LOST
    watch.send(error(StatusCode.ABORTED, "STREAM_REPLACED"))
    few = f"at most {_MOST_STREAMS} streams in {_STORM:g} s"
    await scene.hold("R67", lambda: len(scene.service.watches) - before <= _MOST_STREAMS, few, _STORM)

    def trouble() -> str:
        beats = stream.of("heartbeat")
        return beats[-1].heartbeat.watchdog_trouble if beats else ""

    await scene.until("R68", trouble, "`watchdog_trouble` in a heartbeat")
    scene.service.refusal = None
    scene.skip_watches()
    await scene.watch("R67", "another stream of the watchdog")
    await scene.until("R68", lambda: not trouble(), "heartbeats without `watchdog_trouble`")
    scene.check("R63", all(each.alive for each in workers), "workers run on without a watchdog", "one ended")


@scenario("R70")
async def watchdog_refused(scene: Scene) -> None:
    """The timer service announces its end, and then ends a stream with each of its reasons."""
    _, watch, workers, _ = await _guarded(scene)
    watch.send(_event(draining=pb.Draining()))
    for code, reason in [(code, reason) for code, reasons in ENDS.items() for reason in reasons]:
        watch.send(error(code, reason))
        watch = await scene.watch("R70", f"another stream of the watchdog after {reason}")
        _check_subscribe(scene, watch, "R70")
        alive = all(each.alive for each in workers)
        scene.check("R70", alive, f"workers run on after {reason}", "one has ended")


@scenario("R71", "R72")
async def refused_timer(scene: Scene) -> None:
    """A timer is refused; then its scope is to be forgotten, as an operator has it with ForgetScopes."""
    _, watch, workers, timers = await _guarded(scene)
    timer = timers["0@1"]
    refused = pb.Refused(worker_id=timer.worker_id, scope=timer.scope, sequence=timer.sequence)
    refused.reason = refused.message = "TOO_MANY_TIMERS"
    count = len(watch.messages)
    watch.send(_event(refused=refused))
    quiet = "the stream and the workers go on, and the timer is not sent again"
    await scene.hold(
        "R71", lambda: not watch.over and workers[0].alive and len(watch.messages) == count, quiet
    )
    watch.send(_event(learned=pb.Learned(scope=timer.scope)))
    learned = (await scene.message("R72", watch, "learned", "`learned` in reply")).learned
    seen = f"{learned.scope} {learned.count}"
    scene.check("R72", seen == f"{timer.scope} 0", f"{timer.scope} with count 0", seen)
