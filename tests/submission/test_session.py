"""A submitted job is followed to its end, and no output of its workers is lost."""

from __future__ import annotations

import asyncio

from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.submission.session import Submission, SubmissionSession
from submission.fake_agents import agents, piece
from submission.test_lines import Screen
from support.waiting import PATIENCE


async def test_an_incomplete_last_line_of_each_worker_is_shown() -> None:
    """An incomplete last line, as of a progress bar or a program that died, is shown for each worker of each host."""
    async with agents("a", "b") as (fakes, remotes):
        for fake in fakes:
            for rank in (0, 1):
                fake.output.put_nowait(piece(b"whole\nno end", 12, rank=rank))
            fake.output.put_nowait(None)
            fake.states.put_nowait(pb.Job(run_id="run-1", launch_id="launch-1", state=pb.JOB_STATE_ENDED))
        launch = pb.LaunchJobRequest(spec=pb.JobSpec(run_id="run-1"), launch_id="launch-1")
        screen, said = Screen(), list[str]()
        submission = Submission([remote.endpoint for remote in remotes], launch, None, 60.0)
        session = SubmissionSession(submission, {1: screen, 2: Screen()}, said.append)
        assert await asyncio.wait_for(session.run(), PATIENCE) == 0
    expected = [
        f"[{remote.endpoint} {rank}]: {words}\n".encode()
        for remote in remotes
        for rank in (0, 1)
        for words in ("whole", "no end")
    ]
    assert sorted(screen.writes) == sorted(expected)
