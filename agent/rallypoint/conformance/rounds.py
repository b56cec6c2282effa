"""Scenarios of a node's life: rounds, workers, reports, and the ways to leave."""

from __future__ import annotations

import os
import re
import signal
from itertools import pairwise

from grpc import StatusCode

from rallypoint.conformance.checks import HOLD, NotOffered
from rallypoint.conformance.client import PLANTED_SECRET, StartedWorker
from rallypoint.conformance.scene import FENCING_TOKEN, SHORT_INTERVAL, Scene, error, scenario
from rallypoint.conformance.server import Stream
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import to_duration, to_seconds

JOINABLE, FROZEN, FINAL, CLOSED = (pb.PHASE_JOINABLE, pb.PHASE_FROZEN, pb.PHASE_FINAL, pb.PHASE_CLOSED)
_NEWER = 9  # a phase, or an outcome, that no client knows
_SECRETS = re.compile("RALLYPOINT_(RUN_SECRET|TLS_|TOKEN_)")


def close(scene: Scene, stream: Stream, outcome: int) -> None:
    """Close the run as the service does: the update, then the end of the stream."""
    end = pb.RunEnd(outcome=outcome, detail="scripted")  # type: ignore[arg-type]
    update = scene.update(stream, CLOSED, run_end=end)
    stream.send(None)
    scene.service.script = [[pb.JoinResponse(lease=scene.lease, update=update), None]] * 2


def let_go(scene: Scene, stream: Stream) -> None:
    """End the stream with OK, as the service does after `leave`."""
    stream.send(None)
    scene.service.script = [[error(StatusCode.FAILED_PRECONDITION, "LEASE_LOST")]] * 2


@scenario("R01", "R10")
async def waiting(scene: Scene) -> None:
    """Join; while the run is JOINABLE, held back, and FROZEN, no worker starts."""
    stream = await scene.begin()
    scene.grant(stream)
    await scene.hold("R01", lambda: not scene.client.workers, "no worker in JOINABLE")
    scene.update(stream, JOINABLE, held_back=to_duration(2.0))
    await scene.hold("R01", lambda: not scene.client.workers, "no worker in JOINABLE with held_back")
    scene.update(stream, FROZEN, 1)
    await scene.confirmed(stream, 1)
    await scene.hold("R01", lambda: not scene.client.workers, "no worker in FROZEN")


@scenario("R01", "R02")
async def spare(scene: Scene) -> None:
    """Without an assignment, in FROZEN or FINAL, the node waits; a running one stops its workers."""
    stream = await scene.begin()
    scene.grant(stream)
    scene.update(stream, FROZEN)
    scene.update(stream, FINAL)
    await scene.hold("R01", lambda: not scene.client.workers, "no worker without an assignment")
    await scene.run_round(stream, 2)
    scene.update(stream, FINAL)
    await scene.stopped("R02", "FINAL without an assignment")


@scenario("R02", "R03", "R05", "R13", "R16")
async def re_forming(scene: Scene) -> None:
    """The round ends, and the next forms; its confirmation waits for workers that take 1 s to stop."""
    stream = await scene.begin()
    scene.client.plan(slow=1.0)
    scene.grant(stream)
    await scene.run_round(stream, 1)
    scene.update(stream, JOINABLE, last_round_end=pb.RoundEnd(round=1, detail="scripted"))
    await scene.stopped("R02", "JOINABLE")
    await scene.run_round(stream, 2)
    scene.update(stream, FROZEN, 3)
    await scene.confirmed(stream, 3)
    scene.update(stream, FROZEN, 4)
    await scene.confirmed(stream, 4, "R05")
    scene.update(stream, FINAL, 4)
    await scene.started(4)


@scenario("R05", "R52")
async def skipping(scene: Scene) -> None:
    """From FINAL of round 1 directly to FINAL of round 2: the old workers stop, and no new one starts."""
    stream, old = await scene.running()
    scene.update(stream, FINAL, 2)
    expected = "the workers of round 1 end, and none of round 2 starts beside them"

    def apart() -> bool:
        return len({each.round for each in scene.client.alive}) <= 1

    await scene.until("R05", lambda: not any(each.alive for each in old) or not apart(), expected)
    await scene.hold("R05", apart, expected)
    unconfirmed = "no worker of a round that the node has not confirmed"
    await scene.hold("R52", lambda: all(each.round == "1" for each in scene.client.workers), unconfirmed)


@scenario("R15", "R13")
async def stubborn_workers(scene: Scene) -> None:
    """The workers ignore SIGTERM: the client kills them, and confirms afterwards."""
    stream = await scene.begin()
    scene.client.plan(stubborn=True)
    scene.grant(stream)
    old = await scene.run_round(stream, 1)
    scene.update(stream, FROZEN, 2)
    await scene.until(
        "R15", lambda: not any(each.alive for each in old), "SIGKILL for workers that ignore SIGTERM"
    )
    scene.check("R15", all(each.terminated for each in old), "SIGTERM before SIGKILL", "no SIGTERM")
    await scene.confirmed(stream, 2)


@scenario("R14")
async def grandchildren(scene: Scene) -> None:
    """The workers have child processes, which ignore SIGTERM: they are gone when the node confirms."""
    stream = await scene.begin()
    scene.client.plan(child=True)
    scene.grant(stream)
    await scene.run_round(stream, 1)
    await scene.until("R14", lambda: scene.client.children, "the child process of a worker starts")
    scene.update(stream, FROZEN, 2)
    await scene.confirmed(stream, 2)


@scenario("R04")
async def repeated_update(scene: Scene) -> None:
    """FINAL comes three times, with the same and with a newer revision: the same workers run on."""
    stream, first = await scene.running()
    scene.update(stream, FINAL, 1, revision=scene.revision)
    scene.update(stream, FINAL, 1)
    pids = {each.pid for each in first}
    expected = "the same workers after a repeated update"
    await scene.hold("R04", lambda: {each.pid for each in scene.client.workers} == pids, expected)
    await scene.hold("R04", lambda: all(each.alive for each in first), expected, 0.1)


@scenario("R06")
async def unknown_phase(scene: Scene) -> None:
    """A phase of a newer service comes: no worker may run; the agent stays, and goes on with the next round."""
    stream, _ = await scene.running()
    scene.update(stream, _NEWER)
    await scene.stopped("R06", "an unknown phase")
    await scene.hold(
        "R06", lambda: scene.client.exit_code is None and not stream.over, "the node stays in the run"
    )
    scene.update(stream, FROZEN, 2)
    await scene.confirmed(stream, 2, "R06")


@scenario("R06")
async def unknown_fields(scene: Scene) -> None:
    """Messages have fields that the client does not know."""
    field = b"\xca\x3e\x05newer"  # field 1001, with 5 bytes
    stream = await scene.begin()
    scene.grant(stream, phase=None)
    lease = pb.JoinResponse(lease=scene.lease)
    assert lease.ByteSize()
    scene.revision += 1
    update = pb.NodeUpdate(revision=scene.revision, phase=FROZEN, assignment=scene.assignment(1))
    update.MergeFromString(field)
    response = pb.JoinResponse(update=update)
    response.MergeFromString(field)
    stream.send(pb.JoinResponse.FromString(field))
    stream.send(response)
    await scene.confirmed(stream, 1, "R06")
    scene.update(stream, FINAL, 1)
    await scene.started(1, "R06")


@scenario("R11")
async def heartbeats(scene: Scene) -> None:
    """For 6 intervals nothing happens but heartbeats."""
    interval = 2 * SHORT_INTERVAL
    stream = await scene.begin()
    scene.grant(stream, interval=interval)
    begun = scene.now
    await scene.hold("R11", lambda: not stream.over, "the stream stays open", 6 * interval)
    times = [begun, *(at for at, _ in stream.messages), scene.now]
    longest = max(after - before for before, after in pairwise(times))
    expected = f"a message every {interval:g} s, never {3 * interval:g} s without one"
    scene.check("R11", longest < 3 * interval, expected, f"{longest:.2f} s without a message")
    count = len(stream.of("heartbeat"))
    scene.check("R11", count <= 14, f"{expected}: at most 14 in {6 * interval:g} s", f"{count} heartbeats")


@scenario("R12")
async def settle_window(scene: Scene) -> None:
    """An update with `settling` comes while heartbeats are 20 s apart."""
    stream, _ = await scene.running(interval=20.0)
    await scene.hold("R03", lambda: bool(scene.client.alive), "workers run")
    count = len(stream.messages)
    begun = scene.now
    scene.update(stream, FINAL, 1, settling=True)
    await scene.until("R12", lambda: len(stream.messages) > count, "a message at once")
    late = scene.now - begun
    scene.check("R12", late < 5, "a message at once, not at the next heartbeat", f"after {late:.1f} s")


@scenario("R46", "R47")
async def environment(scene: Scene) -> None:
    """The node is the second of three; each worker has the ranks and addresses of the page."""
    stream = await scene.begin()
    scene.grant(stream)
    join, here = scene.join, scene.join.local_world_size
    scene.update(stream, FROZEN, 6)
    await scene.confirmed(stream, 6)
    assignment = scene.assignment(6)
    assignment.group_rank, assignment.group_world_size = 1, 3
    assignment.base_rank, assignment.world_size = 4, here + 9
    assignment.base_role_rank, assignment.role_world_size = 2, here + 5
    assignment.master_address = "192.0.2.7"
    scene.update(stream, FINAL, assignment=assignment, restart_count=2)
    workers = await scene.started(6)
    for worker in workers:
        text = worker.environment.get("LOCAL_RANK", "")
        scene.check("R46", text.isdigit(), "LOCAL_RANK is a number", repr(text))
        local = int(text)
        wanted = {
            "RANK": 4 + local,
            "ROLE_RANK": 2 + local,
            "GROUP_RANK": 1,
            "WORLD_SIZE": here + 9,
            "LOCAL_WORLD_SIZE": here,
            "ROLE_WORLD_SIZE": here + 5,
            "GROUP_WORLD_SIZE": 3,
            "ROLE_NAME": join.role,
            "MASTER_ADDR": "192.0.2.7",
            "MASTER_PORT": scene.port,
            "TORCHELASTIC_RESTART_COUNT": 2,
            "TORCHELASTIC_MAX_RESTARTS": join.settings.max_restarts,
            "TORCHELASTIC_RUN_ID": join.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": False,
            "RALLYPOINT_RUN_ID": join.run_id,
            "RALLYPOINT_NODE": join.node_id,
            "RALLYPOINT_ROUND": 6,
            "RALLYPOINT_FENCING_TOKEN": FENCING_TOKEN + 6,
        }
        for name, value in wanted.items():
            seen = worker.environment.get(name)
            scene.check("R46", seen == str(value), f"{name}={value}", f"{name}={seen}")
        secrets = sorted(name for name in worker.environment if _SECRETS.match(name))
        scene.check("R47", not secrets, f"no credentials, as {PLANTED_SECRET}", ", ".join(secrets))
    ranks = {each.environment["LOCAL_RANK"] for each in workers}
    scene.check("R46", len(ranks) == here, f"{here} different LOCAL_RANK", f"{sorted(ranks)}")


async def failed(scene: Scene, stream: Stream, exit_code: int) -> pb.WorkerFailure:
    """Wait for the report of the first worker's failure, and check it."""
    failure: pb.WorkerFailure = (await scene.message("R17", stream, "worker_failed", round_=1)).worker_failed
    seen = (failure.round, failure.rank, failure.local_rank, failure.exit_code)
    wanted = (1, 0, 0, exit_code)
    scene.check("R17", seen == wanted, f"round, rank, local_rank, exit_code {wanted}", str(seen))
    for name in ("rank", "local_rank", "exit_code", "age"):
        scene.check("R17", failure.HasField(name), f"{name} is set", "it is not")
    age = to_seconds(failure.age)
    scene.check("R17", 0 <= age < 60, "an age of less than a minute", f"{age:g} s")
    return failure


@scenario("R17", "R19")
async def worker_fails(scene: Scene) -> None:
    """A worker exits with 3; the next round starts it again, and a signal kills it."""
    stream, workers = await scene.running()
    rank_0(workers).end(3)
    await failed(scene, stream, 3)
    scene.update(stream, JOINABLE, last_round_end=pb.RoundEnd(round=1, detail="scripted"))
    workers = await scene.run_round(stream, 2)
    os.kill(rank_0(workers).pid, signal.SIGKILL)
    failure = (await scene.message("R17", stream, "worker_failed", round_=2)).worker_failed
    code = failure.exit_code
    scene.check("R17", code == -signal.SIGKILL, "exit_code -9 after SIGKILL", f"exit_code {code}")


@scenario("R73")
async def port_not_taken(scene: Scene) -> None:
    """A worker fails as if its port was taken, but no program has it."""
    scene.client.plan(prints="OSError: [Errno 98] Address already in use\n")
    stream, workers = await scene.running()
    rank_0(workers).end(1)
    taken = (await failed(scene, stream, 1)).kind == pb.FAILURE_KIND_PORT_TAKEN
    scene.check("R73", not taken, "an ordinary failure", "FAILURE_KIND_PORT_TAKEN")


def rank_0(workers: list[StartedWorker]) -> StartedWorker:
    """Return the worker with LOCAL_RANK 0."""
    return next(each for each in workers if each.environment.get("LOCAL_RANK") == "0")


async def succeed(scene: Scene, stream: Stream, round_: int = 1) -> None:
    """End all workers with 0, and wait for the report."""
    for worker in scene.client.alive:
        worker.end(0)
    await scene.message("R18", stream, "succeeded", f"success of round {round_}", round_=round_)


@scenario("R18", "R07", "R08")
async def success(scene: Scene) -> None:
    """All workers end with 0; the node waits for CLOSED, and its agent ends with 0."""
    stream, _ = await scene.running()
    await succeed(scene, stream)

    def waits() -> bool:
        return not stream.over and scene.client.exit_code is None and not stream.of("leave")

    await scene.hold("R18", waits, "the stream stays open until CLOSED")
    close(scene, stream, pb.OUTCOME_SUCCEEDED)
    await scene.ended("R08", "OUTCOME_SUCCEEDED", success=True)


@scenario("R19")
async def success_and_another_round(scene: Scene) -> None:
    """After the success of this node the round forms again: the workers are started again."""
    stream, _ = await scene.running()
    await succeed(scene, stream)
    scene.update(stream, JOINABLE, last_round_end=pb.RoundEnd(round=1, detail="scripted"))
    scene.update(stream, FROZEN, 2)
    await scene.confirmed(stream, 2, "R19")
    scene.update(stream, FINAL, 2)
    await scene.started(2, "R19")


@scenario("R20")
async def exit_barrier(scene: Scene) -> None:
    """The exit barrier is over: the node leaves with `leave` and exit code 0, or waits for CLOSED."""
    stream, _ = await scene.running()
    await succeed(scene, stream)
    scene.update(stream, FINAL, 1, exit_barrier_passed=True)
    await scene.service.changed.until(lambda: bool(stream.of("leave")) or stream.over, 2 * HOLD)
    if stream.of("leave"):
        let_go(scene, stream)
    else:
        scene.check("R20", not stream.over, "`leave`, or an open stream", "the stream ended without `leave`")
        close(scene, stream, pb.OUTCOME_SUCCEEDED)
    await scene.ended("R20", "the exit barrier is over", success=True)


@scenario("R07", "R08", "R09")
async def closed_as_failed(scene: Scene) -> None:
    """CLOSED with OUTCOME_FAILED stops the workers; the exit code is not 0."""
    stream, _ = await scene.running()
    close(scene, stream, pb.OUTCOME_FAILED)
    await scene.stopped("R07", "CLOSED")
    await scene.ended("R07", "CLOSED")
    await scene.ended("R08", "OUTCOME_FAILED", success=False)


@scenario("R08")
async def closed_as_cancelled(scene: Scene) -> None:
    """CLOSED with OUTCOME_CANCELLED before a round; the exit code is not 0."""
    stream = await scene.begin()
    scene.grant(stream)
    close(scene, stream, pb.OUTCOME_CANCELLED)
    await scene.ended("R08", "OUTCOME_CANCELLED", success=False)


@scenario("R08")
async def closed_with_unknown_outcome(scene: Scene) -> None:
    """CLOSED with an outcome of a newer service; the exit code is not 0."""
    stream = await scene.begin()
    scene.grant(stream)
    close(scene, stream, _NEWER)
    await scene.ended("R08", "an unknown outcome", success=False)


@scenario("R54")
async def staying_until_gone(scene: Scene) -> None:
    """CLOSED comes to a node that stays until it is gone, whose workers take 1 s to stop; its stream breaks once."""
    stream = await scene.begin()
    if not scene.join.stays_until_gone:
        raise NotOffered("the client does not set stays_until_gone")
    scene.client.plan(slow=1.0)
    scene.grant(stream)
    await scene.run_round(stream, 1)
    end = pb.RunEnd(outcome=pb.OUTCOME_FAILED, detail="scripted")
    scene.update(stream, CLOSED, run_end=end)
    stream.send(error(StatusCode.UNAVAILABLE, "DRAINING"))
    stream = await scene.resumed("R54", "a stream that resumes in CLOSED")
    scene.check("R54", stream.first.resume.stays_until_gone, "stays_until_gone in `resume`", "it is not set")
    scene.again(stream)
    scene.update(stream, CLOSED, revision=scene.revision, run_end=end)
    await scene.message("R54", stream, "leave", "`leave` after the workers")
    scene.check("R54", not scene.client.alive, "no worker at `leave`", f"{len(scene.client.alive)} alive")
    let_go(scene, stream)
    await scene.ended("R54", "after `leave` the stream ended with OK", success=False)


@scenario("R21", "R09")
async def leaving(scene: Scene) -> None:
    """The agent gets SIGTERM while workers run, which take 2 s to stop."""
    stream = await scene.begin()
    scene.client.plan(slow=2.0)
    scene.grant(stream)
    await scene.run_round(stream, 1)
    scene.client.terminate()
    await scene.message("R21", stream, "depart", "`depart` first")
    scene.check(
        "R21", bool(scene.client.alive), "`depart` before the workers are stopped", "they are stopped"
    )
    scene.check("R21", not stream.of("leave"), "`depart` before `leave`", "`leave` came first")
    scene.update(stream, JOINABLE, last_round_end=pb.RoundEnd(round=1, detail="scripted"))
    await scene.message("R21", stream, "leave", "`leave` after the workers")
    alive = len(scene.client.alive)
    scene.check("R21", not alive, "no worker at `leave`", f"{alive} alive")
    let_go(scene, stream)
    await scene.ended("R21", "after `leave` the stream ended with OK")


@scenario("R22")
async def leaving_without_workers(scene: Scene) -> None:
    """The agent gets SIGTERM while it waits."""
    stream = await scene.begin()
    scene.grant(stream)
    await scene.hold("R01", lambda: not scene.client.workers, "no worker in JOINABLE")
    scene.client.terminate()
    await scene.message("R22", stream, "leave")
    let_go(scene, stream)
    await scene.ended("R22", "after `leave` the stream ended with OK")
