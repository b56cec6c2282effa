"""The workers of a round are judged as one: the first failure is told once, success when all have succeeded."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from process_probe import until
from rallypoint.agent.config import JobConfig, Peer
from rallypoint.agent.console import Console
from rallypoint.agent.core import Assignment
from rallypoint.agent.crew import Crew
from rallypoint.agent.errors import COULD_NOT_START, WorkerFailure
from rallypoint.agent.logs import LogDirectory, Redirect, Streams
from rallypoint.agent.processes import Spawner
from rallypoint.agent.workers import StopReport
from rallypoint.rendezvous.v1.rendezvous_service_pb2 import RunSettings

SEAT = Assignment(
    round=3,
    group_rank=1,
    group_world_size=2,
    base_rank=4,
    world_size=8,
    base_role_rank=4,
    role_world_size=8,
    master_address="127.0.0.1",
    master_port=5000,
    fencing_token=11,
)


class Told:
    """What a crew says of itself."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.failures: list[WorkerFailure] = []
        self.successes = 0

    def success(self) -> None:
        """All have succeeded."""
        self.successes += 1


@pytest.fixture
def told() -> Told:
    """What the crew of a test says."""
    return Told()


@pytest.fixture
async def make(tmp_path: Path, told: Told) -> AsyncIterator[Callable[..., Crew]]:
    """Makes the crew of a test out of a shell script; it is gone with the test."""
    async with AsyncExitStack() as stack:
        spawner = await stack.enter_async_context(Spawner.start())
        console = Console()
        stack.push_async_callback(console.close, 5.0)
        logs = LogDirectory.create(tmp_path / "logs", "run")

        def make_crew(script: str, workers: int = 2, **more: Any) -> Crew:
            config = JobConfig(
                run_id="run",
                node_id="node",
                address="127.0.0.1",
                settings=RunSettings(min_nodes=1, max_nodes=1),
                command=("sh", "-c", script, "worker", str(tmp_path)),
                environment={"PATH": os.environ["PATH"]},
                rendezvous=Peer("127.0.0.1:1"),
                timer=Peer("127.0.0.1:1"),
                local_world_size=workers,
                role="trainer",
                redirects=Redirect(Streams.BOTH),
                **more,
            )
            crew = Crew(
                config,
                SEAT,
                2,
                spawner=spawner,
                console=console,
                log_directory=logs,
                sockets={"RALLYPOINT_STORE_SOCKET": "/run/store"},
                on_failure=told.failures.append,
                on_success=told.success,
            )
            stack.push_async_callback(crew.stop, signal.SIGKILL, 0.0)
            return crew

        yield make_crew


async def test_success_is_told_once_when_all_have_succeeded(
    make: Callable[..., Crew], told: Told, tmp_path: Path
) -> None:
    """Not when the first has."""
    crew = make("[ $LOCAL_RANK = 1 ] || exit 0; touch $1/waits; while [ ! -e $1/go ]; do sleep 0.01; done")
    await crew.start()
    await until(lambda: 0 in crew.workers and crew.workers[0].exit is not None, "the first to end")
    assert told.successes == 0
    (tmp_path / "go").touch()
    await until(lambda: told.successes > 0, "success")
    assert (told.successes, told.failures) == (1, [])
    assert [(worker.rank, worker.exit.succeeded) for worker in crew.workers.values() if worker.exit] == [
        (4, True),
        (5, True),
    ]


async def test_the_first_failure_is_told_once_with_all_that_is_known(
    make: Callable[..., Crew], told: Told
) -> None:
    """Who failed, where, how, and what it left in its log; those that fail after it are its consequence."""
    crew = make('[ $LOCAL_RANK = 1 ] && { echo "no such layer" >&2; exit 7; }; sleep 0.2; exit 1')
    await crew.start()
    await until(lambda: all(worker.exit is not None for worker in crew.workers.values()), "the end of both")
    (failure,) = told.failures
    assert (failure.rank, failure.local_rank, failure.role, failure.host) == (
        5,
        1,
        "trainer",
        socket.gethostname(),
    )
    assert (failure.exit_code, failure.pid) == (7, crew.workers[1].pid)
    assert failure.traceback == "no such layer"
    assert failure.log_file.endswith("/attempt_0/1/stderr.log")
    assert told.successes == 0


async def test_a_program_that_does_not_exist_is_a_failure_like_any_other(
    make: Callable[..., Crew], told: Told
) -> None:
    """The round must end with a reason, not hang; nothing of the crew is left."""
    crew = make("exit 0", working_directory=Path("/none"))
    await crew.start()
    (failure,) = told.failures
    assert (failure.rank, failure.local_rank, failure.exit_code) == (4, 0, COULD_NOT_START)
    assert "cannot enter its working directory '/none'" in failure.message
    assert (await crew.stop(signal.SIGTERM, 1.0)).left == ()


async def test_the_worker_that_could_not_be_started_is_named(make: Callable[..., Crew], told: Told) -> None:
    """By its own ranks, on this host and in the round."""
    crew = make("exit 0")
    specs = crew._spec

    def without_second_log(local_rank: int) -> Any:
        spec = specs(local_rank)
        if local_rank == 1:
            assert spec.stdout is not None
            shutil.rmtree(spec.stdout.parent)
        return spec

    crew._spec = without_second_log  # type: ignore[method-assign]
    await crew.start()
    (failure,) = told.failures
    assert (failure.rank, failure.local_rank) == (5, 1)
    assert "cannot open its log file" in failure.message


async def test_logs_that_can_not_be_written_are_a_failure_too(
    make: Callable[..., Crew], told: Told, tmp_path: Path
) -> None:
    """A full disk ends the round with a reason."""
    crew = make("exit 0")
    shutil.rmtree(tmp_path / "logs")
    await crew.start()
    (failure,) = told.failures
    assert "cannot make the log files" in failure.message
    assert await crew.stop(signal.SIGTERM, 1.0) == StopReport()


async def test_workers_that_are_stopped_have_not_failed(make: Callable[..., Crew], told: Told) -> None:
    """However they take it."""
    crew = make("sleep 60")
    await crew.start()
    await crew.stop(signal.SIGTERM, 20.0)
    assert all(worker.exit is not None and not worker.exit.succeeded for worker in crew.workers.values())
    assert (told.failures, told.successes) == ([], 0)


async def test_a_crew_that_was_stopped_starts_nothing(
    make: Callable[..., Crew], told: Told, tmp_path: Path
) -> None:
    """Whoever stopped it has said already that nothing of it is alive."""
    crew = make("touch $1/started")
    await crew.stop(signal.SIGTERM, 1.0)
    await crew.start()
    await asyncio.sleep(0.05)
    assert not (tmp_path / "started").exists()
    assert (told.failures, told.successes, crew.workers) == ([], 0, {})


async def test_a_worker_that_hangs_is_killed_and_the_failure_says_why(
    make: Callable[..., Crew], told: Told
) -> None:
    """By its name, and the others are left to whoever decides about the round."""
    crew = make("sleep 60")
    await crew.start()
    assert sorted(crew.names) == ["0@3", "1@3"]
    await crew.reap("1@3", "it did not leave 'step' within 2 s")
    await until(lambda: bool(told.failures), "the failure")
    (failure,) = told.failures
    assert (failure.rank, failure.exit_code, failure.message) == (5, -9, "it did not leave 'step' within 2 s")
    assert crew.workers[0].exit is None


async def test_a_process_is_traced_to_its_worker(make: Callable[..., Crew], tmp_path: Path) -> None:
    """Timers may be set by a worker's children; who is no child of a worker is nobody."""
    crew = make(
        "sleep 60 & echo $! > $1/child.$LOCAL_RANK.new; mv $1/child.$LOCAL_RANK.new $1/child.$LOCAL_RANK; wait"
    )
    await crew.start()
    child = tmp_path / "child.1"
    await until(child.exists, "the child")
    assert crew.worker_of(crew.workers[1].pid) == "1@3"
    assert crew.worker_of(int(child.read_text())) == "1@3"
    assert crew.worker_of(os.getpid()) is None
    assert crew.worker_of(1) is None


async def test_workers_get_the_environment_of_their_place(
    make: Callable[..., Crew], told: Told, tmp_path: Path
) -> None:
    """The round's, the run's and the agent's part of it."""
    crew = make(
        'echo "$RANK $WORLD_SIZE $TORCHELASTIC_RESTART_COUNT $RALLYPOINT_STORE_SOCKET" > $1/seen.$LOCAL_RANK'
    )
    await crew.start()
    await until(lambda: told.successes > 0, "success")
    assert [(tmp_path / f"seen.{rank}").read_text() for rank in (0, 1)] == [
        "4 8 2 /run/store\n",
        "5 8 2 /run/store\n",
    ]
