"""A job is followed over broken connections without a gap, until it ends or its agent is lost."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import grpc
import pytest

from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.rpc.pace import Pace
from rallypoint.submission.following import Followed, LogPieces, Lost, RemoteAgent, Retries, labels
from submission.fake_agents import FakeAgent, agents, gone_agent, piece, refusal
from support.waiting import PATIENCE

LAUNCH = pb.LaunchJobRequest(spec=pb.JobSpec(run_id="run-1"), launch_id="launch-1")
BREAK = refusal("UNEXPECTED_ERROR", grpc.StatusCode.UNAVAILABLE)


class Passing:
    """A clock that advances only by its own `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    async def sleep(self, seconds: float) -> None:
        """Advance the clock at once."""
        self.now += seconds
        await asyncio.sleep(0)

    def pace(self) -> Pace:
        """Return the pace for a client."""
        return Pace(clock=lambda: self.now, sleep=self.sleep, draw=lambda: 1.0)


def state(number: pb.JobState.ValueType, launch_id: str = "launch-1", **fields: int) -> pb.Job:
    """Return a state of the job."""
    return pb.Job(run_id="run-1", launch_id=launch_id, state=number, **fields)  # type: ignore[arg-type]


def followed(remote: RemoteAgent, notes: list[str]) -> Followed:
    """Return the follower of an agent, with a timeout of a minute of simulated time."""
    return Followed(remote, LAUNCH, None, timeout=60.0, note=notes.append, pace=Passing().pace())


async def watched(fake: FakeAgent, remote: RemoteAgent) -> tuple[Followed, list[int], list[str]]:
    """Watch to the end; return the follower, the states that it reported, and its notes about the connection."""
    notes: list[str] = []
    states: list[int] = []
    following = followed(remote, notes)

    def note(changed: Followed) -> None:
        if changed.lost is None and changed.job is not None:
            states.append(changed.job.state)

    await asyncio.wait_for(following.watch(note), PATIENCE)
    return following, states, notes


async def test_a_job_is_watched_to_its_end_over_breaks() -> None:
    """Each break of the connection is reported once, and its end once."""
    async with agents("a") as ((fake,), (remote,)):
        ending = (pb.JOB_STATE_RUNNING, BREAK, BREAK, pb.JOB_STATE_RUNNING, pb.JOB_STATE_ENDED)
        for each in ending:
            fake.states.put_nowait(each if isinstance(each, Exception) else state(each))
        following, states, notes = await watched(fake, remote)
        assert states == [pb.JOB_STATE_RUNNING, pb.JOB_STATE_RUNNING, pb.JOB_STATE_ENDED]
        assert following.ended
        assert following.lost is None
        assert notes == [
            "a: lost the connection (the agent will not (UNEXPECTED_ERROR)); trying again",
            "a: connected again",
        ]


async def test_an_agent_that_stays_away_is_lost() -> None:
    """An agent that does not answer within the timeout is lost."""
    async with agents("a") as ((fake,), (remote,)):
        for _ in range(200):
            fake.states.put_nowait(BREAK)
        following, _, _ = await watched(fake, remote)
        assert following.lost is not None
        assert "it has not answered for 6" in following.lost


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (refusal("NO_JOB", grpc.StatusCode.NOT_FOUND), "its agent was restarted, and the job there ended"),
        (state(pb.JOB_STATE_RUNNING, "another"), "its agent was restarted, and runs another job"),
        (refusal("INVALID_ARGUMENT"), "the agent will not (INVALID_ARGUMENT)"),
    ],
)
async def test_an_agent_that_knows_the_job_no_more_is_lost_at_once(
    told: pb.Job | Exception, why: str
) -> None:
    """An agent that no longer has the job is lost without waiting for the timeout."""
    async with agents("a") as ((fake,), (remote,)):
        fake.states.put_nowait(told)  # type: ignore[arg-type]
        following, _, _ = await watched(fake, remote)
        assert why in str(following.lost)


async def test_certificates_are_not_suspected_once_an_agent_has_answered() -> None:
    """A connection that is closed during a job means that the host died: a hint at TLS flags would be misleading."""
    closed = refusal("UNAVAILABLE", grpc.StatusCode.UNAVAILABLE)
    closed.message = "Stream removed (Socket closed)"
    async with agents("a") as ((fake,), (remote,)):
        for told in (state(pb.JOB_STATE_RUNNING), closed, state(pb.JOB_STATE_ENDED)):
            fake.states.put_nowait(told)
        _, _, notes = await watched(fake, remote)
        assert notes[0] == "a: lost the connection (Stream removed (Socket closed)); trying again"
        pieces = LogPieces(remote.stub, pb.StreamLogsRequest(), None, lambda: 0.0)
        fake.output.put_nowait(closed)
        with pytest.raises(Lost, match="needs --tls-ca"):
            await anext(pieces.read())
        fake.output.put_nowait(piece(b"a line", 6))
        fake.output.put_nowait(closed)
        with pytest.raises(Lost, match=r"Socket closed\)$"):
            [each async for each in pieces.read()]


async def test_output_is_read_on_where_it_was() -> None:
    """After every break, the next request has the offsets that were reached."""
    async with agents("a") as ((fake,), (remote,)):
        for each in (
            piece(b"one", 3),
            piece(b"ERR", 3, stream=2),
            BREAK,
            piece(b"two", 6),
            piece(b"next", 4, attempt=1),
            BREAK,
            piece(b"end", 7, attempt=1),
            None,
        ):
            fake.output.put_nowait(each)
        following = followed(remote, [])
        seen: list[bytes] = []

        async def take(_: Followed, each: pb.StreamLogsResponse) -> None:
            seen.append(each.data)

        await asyncio.wait_for(following.follow_logs(take), PATIENCE)
        assert seen == [b"one", b"ERR", b"two", b"next", b"end"]
        places = [
            {(cursor.stream, cursor.attempt, cursor.offset) for cursor in request.cursors}
            for request in fake.log_requests
        ]
        assert places == [set(), {(1, 0, 3), (2, 0, 3)}, {(1, 1, 4), (2, 0, 3)}]
        assert all(request.follow and request.run_id == "run-1" for request in fake.log_requests)


async def test_a_single_read_from_a_gone_agent_fails_at_once() -> None:
    """A single read does not retry: an operator waits for it."""
    async with gone_agent("a") as remote:
        pieces = LogPieces(remote.stub, pb.StreamLogsRequest(), None, lambda: 0.0)
        with pytest.raises(Lost):
            await anext(pieces.read())
        assert not pieces.begun


async def test_a_stop_is_retried_until_the_agent_has_received_it() -> None:
    """A stop is retried until the agent has received it, so that no host keeps running; an ended job gets none."""
    async with agents("a") as ((fake,), (remote,)):
        following = followed(remote, [])
        assert await following.stop("Ctrl-C", now=True, timeout=10.0) is None
        assert [(stop.run_id, stop.reason, stop.now) for stop in fake.stops] == [("run-1", "Ctrl-C", True)]
        following.job = state(pb.JOB_STATE_ENDED)
        assert await following.stop("Ctrl-C", now=True, timeout=10.0) is None
        assert len(fake.stops) == 1
    async with gone_agent("a") as remote:
        assert await followed(remote, []).stop("Ctrl-C", now=False, timeout=1.0) is not None


async def test_retries_slow_down_until_the_timeout() -> None:
    """Retries end after the timeout, which starts again when the agent has answered."""
    time = Passing()
    retries = Retries(lambda: 10.0, time.pace())
    with suppress(Lost):
        while True:
            await retries.failed("gone")
    assert 10.0 <= time.now < 12.5
    retries.answered()
    assert not retries.away
    await retries.failed("gone")
    assert retries.away


@pytest.mark.parametrize(
    ("endpoints", "expected"),
    [
        (["a:1", "[fd00::1]:2"], ["a", "fd00::1"]),
        (["a:1", "a:2", "b:1"], ["a:1", "a:2", "b"]),
        (["unix:/run/agent.sock"], [socket.gethostname()]),
    ],
)
def test_output_names_the_host(endpoints: list[str], expected: list[str]) -> None:
    """Output has the host name as its label, or the endpoint if several agents run on one host."""
    assert labels(endpoints) == expected
