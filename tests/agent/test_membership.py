"""A node says what it has to say in words that the service takes, and its log says what it waits for."""

from __future__ import annotations

import asyncio

import pytest

from agent.test_job import PATIENCE, Bench
from agent.test_job import bench as bench  # noqa: PLC0414  # a fixture
from process_probe import until
from rallypoint.agent.membership import sentence
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("the fan stands still", "the fan stands still"),
        ("two\nlines\x1b[31m", "two lines [31m"),
        ("x" * 2000, "x" * 1024),
        ("ä" * 1000, "ä" * 512),
        ("x" * 1023 + "ä", "x" * 1023),
        ("\udcff", " "),
    ],
)
def test_what_a_service_takes_of_a_text(text: str, told: str) -> None:
    """One line, no longer than 1,024 bytes, whole characters."""
    assert sentence(text) == told


async def test_a_host_with_a_long_story_leaves_like_any_other(bench: Bench) -> None:
    """It is not refused for it, and the run is told as much as it takes."""
    stays = bench.job("touch $1/up; sleep 60", "a", nodes=(1, 2))
    bench.start(stays)
    leaves = bench.job("sleep 60", "b", nodes=(1, 2))
    running = bench.start(leaves)
    await until(lambda: leaves.state.started > 0, "a round with it")
    leaves.drain(0.0, "x\n" * 1024)
    result = await asyncio.wait_for(running, PATIENCE)
    assert result.exit_code == 143
    await until(lambda: stays.state.started > leaves.state.started, "a round without it")
    assert (await bench.state()).last_round_end.detail.startswith("node b left: drained: x x x")


async def test_a_restart_that_is_held_back_is_in_the_log(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Who looks at a host without workers must find out what for."""
    job = bench.job("exit 7", restarts=2)
    settings = job.config.settings
    assert isinstance(settings, pb.RunSettings)
    settings.restart_backoff.FromMilliseconds(300)
    await bench.run(job)
    held = [record.getMessage() for record in caplog.records if "the restart waits" in record.getMessage()]
    assert len(held) == 1
    assert "exited with code 7" in held[0]
