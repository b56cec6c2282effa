"""The workers of a round are judged as one: the first failure is reported once, and success when all succeeded."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rallypoint.agent.config.job import JobConfig, Peer
from rallypoint.agent.core.core import Assignment, NodeUnhealthy
from rallypoint.agent.events.publisher import JobEvents
from rallypoint.agent.events.recorder import JobIdentity
from rallypoint.agent.failures import analysis
from rallypoint.agent.failures.analysis import EarlierFailure, FirstFailure
from rallypoint.agent.failures.failure import COULD_NOT_START, WorkerFailure
from rallypoint.agent.hangs import reaper
from rallypoint.agent.hangs.hung_worker import HungWorker
from rallypoint.agent.logs.follower import Console
from rallypoint.agent.logs.plan import LogDirectory
from rallypoint.agent.logs.streams import Redirect, Streams
from rallypoint.agent.spawner.client import Spawner
from rallypoint.agent.spawner.protocol import KillResult
from rallypoint.agent.spawner.spawner import read_process
from rallypoint.agent.workers import group as group_module
from rallypoint.agent.workers.affinity import Cpus
from rallypoint.agent.workers.group import GroupEvent, GroupSettings, WorkerGroup, WorkersSucceeded
from rallypoint.agent.workers.processes import StopReport
from rallypoint.rendezvous.core.state import FailureKind
from rallypoint.rendezvous.v1.rendezvous_service_pb2 import RunSettings
from support.log_events import log_events
from support.waiting import PATIENCE, until, wait_until

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


class Reported:
    """The results that a group reports."""

    def __init__(self) -> None:
        self.failures: list[WorkerFailure] = []
        self.earlier: list[WorkerFailure] = []
        self.unfit: list[str] = []
        self.successes = 0

    def note(self, event: GroupEvent) -> None:
        """Record an event, in place of its job's queue."""
        match event:
            case FirstFailure(failure):
                self.failures.append(failure)
            case EarlierFailure(failure):
                self.earlier.append(failure)
            case NodeUnhealthy(why):
                self.unfit.append(why)
            case WorkersSucceeded():
                self.successes += 1


@pytest.fixture
def told() -> Reported:
    """The results that the group of a test reports."""
    return Reported()


@pytest.fixture
async def make(tmp_path: Path, told: Reported) -> AsyncIterator[Callable[..., WorkerGroup]]:
    """A function that makes a group from a shell script; it ends with the test."""
    async with AsyncExitStack() as stack:
        spawner = await stack.enter_async_context(Spawner.start())
        console = Console()
        stack.push_async_callback(console.close, 5.0)
        logs = LogDirectory.create(tmp_path / "logs", "run")

        def make_group(script: str, workers: int = 2, **more: Any) -> WorkerGroup:
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
            history = JobEvents(JobIdentity(config.run_id, config.node_id, config.role, config.max_restarts))
            sockets = {"RALLYPOINT_STORE_SOCKET": "/run/store"}
            settings = GroupSettings(console, logs, sockets, tmp_path, history)
            group = WorkerGroup(config, SEAT, 2, spawner=spawner, settings=settings, publish=told.note)
            stack.push_async_callback(group.stop, signal.SIGKILL, 0.0)
            return group

        yield make_group


def _found(folder: Path, pattern: str) -> list[Path]:
    return list(folder.glob(pattern))


async def test_success_is_reported_once_when_all_have_succeeded(
    make: Callable[..., WorkerGroup], told: Reported, tmp_path: Path
) -> None:
    """The success of the first is not reported."""
    group = make("[ $LOCAL_RANK = 1 ] || exit 0; touch $1/waits; while [ ! -e $1/go ]; do sleep 0.01; done")
    await group.start()
    await until(lambda: 0 in group.workers and group.workers[0].exit is not None, "the first to end")
    assert told.successes == 0
    (tmp_path / "go").touch()
    await until(lambda: told.successes > 0, "success")
    assert (told.successes, told.failures) == (1, [])
    assert [(worker.rank, worker.exit.succeeded) for worker in group.workers.values() if worker.exit] == [
        (4, True),
        (5, True),
    ]


async def test_the_first_failure_is_reported_once_with_all_known_data(
    make: Callable[..., WorkerGroup], told: Reported
) -> None:
    """The report has the worker, its host, its exit and the end of its log; later failures are consequences."""
    group = make(
        '[ $LOCAL_RANK = 1 ] && { echo "no such layer" >&2; echo $$ > $1/new; mv $1/new $1/pid; exit 7; };'
        "while [ ! -e $1/pid ] || kill -0 $(cat $1/pid); do sleep 0.01; done 2>/dev/null; exit 1"
    )
    await group.start()
    await until(lambda: all(worker.exit is not None for worker in group.workers.values()), "the end of both")
    (failure,) = told.failures
    assert (failure.rank, failure.local_rank, failure.role, failure.host) == (
        5,
        1,
        "trainer",
        socket.gethostname(),
    )
    assert (failure.exit_code, failure.pid) == (7, group.workers[1].pid)
    assert failure.traceback == "no such layer"
    assert failure.log_file.endswith("/attempt_0/1/stderr.log")
    assert told.successes == 0


async def test_a_signal_that_comes_early_waits_until_all_workers_have_started(
    make: Callable[..., WorkerGroup], caplog: pytest.LogCaptureFixture
) -> None:
    """Workers that the agent did not know yet lost it. These don't handle it, so a warning names them."""
    group = make("exec sleep 600")
    group.pass_on(signal.SIGUSR1)
    await group.start()
    ranks = [event.fields["local_ranks"] for event in log_events(caplog.records) if "passed on" in event.name]
    assert ranks == [[0, 1]]


RAISES = """
    raise_() {
        printf '{"message": {"message": "%s", "extraInfo": {}}}' "$1" > $TORCHELASTIC_ERROR_FILE.new
        mv $TORCHELASTIC_ERROR_FILE.new $TORCHELASTIC_ERROR_FILE
    }
"""
"""The part of a shell script that writes a worker's error file as `record` does."""


async def test_a_worker_that_raised_and_ends_slowly_is_the_first_failure(
    make: Callable[..., WorkerGroup], told: Reported
) -> None:
    """It is reported at the first end of another worker, and its failure is not the signal that stops it."""
    group = make(
        RAISES + '[ $LOCAL_RANK = 1 ] && { raise_ "no such layer"; touch $1/raised; sleep 600; };'
        "while [ ! -e $1/raised ]; do sleep 0.01; done; sleep 0.05; exit 7"
    )
    await group.start()
    await until(lambda: bool(told.failures), "a failure")
    (failure,) = told.failures
    assert (failure.rank, failure.message, failure.exit_code) == (5, "no such layer", 1)
    assert failure.kind is FailureKind.EXCEPTION
    await group.stop(signal.SIGTERM, 20.0)
    assert (len(told.failures), told.earlier) == (1, [])
    assert [(each.rank, each.exit_code) for each in group.failures] == [(5, 1), (4, 7)]
    assert group.failures[0].time < group.failures[1].time


async def test_an_earlier_exception_is_found_during_a_stop_for_another_reason(
    make: Callable[..., WorkerGroup], told: Reported, tmp_path: Path
) -> None:
    """Another host's worker was the first to end; an exception that the stop raises is a consequence."""
    group = make(
        RAISES
        + """
        [ $LOCAL_RANK = 1 ] && raise_ "no such layer" && sleep 0.05  # more than a tick of the file's clock
        [ $LOCAL_RANK = 0 ] && trap 'raise_ "interrupted"; exit 1' TERM
        touch $1/ready.$LOCAL_RANK; while :; do sleep 0.01; done
        """
    )
    await group.start()
    await until(lambda: len(_found(tmp_path, "ready.*")) == 2, "both")
    await group.stop(signal.SIGTERM, 20.0)
    assert told.failures == []
    assert [(each.rank, each.message) for each in told.earlier] == [(5, "no such layer")]
    assert group.failures == told.earlier


async def test_an_end_before_the_stop_is_a_failure_even_if_reported_after_it(
    make: Callable[..., WorkerGroup], told: Reported, tmp_path: Path
) -> None:
    """The agent was busy meanwhile."""
    group = make("[ $LOCAL_RANK = 1 ] && while [ ! -e $1/go ]; do sleep 0.01; done && exit 7; sleep 600")
    await group.start()
    pid = group.workers[1].pid
    (tmp_path / "go").touch()
    # The event loop does not run here: the spawner reaps the worker, and the agent processes its exit later.
    wait_until(lambda: read_process(pid) is None, "the end")
    await group.stop(signal.SIGTERM, 20.0)
    assert [(each.rank, each.exit_code) for each in told.earlier] == [(5, 7)]
    assert [(each.rank, each.exit_code) for each in group.failures] == [(5, 7)]


async def test_an_old_exception_that_was_caught_is_no_failure(
    make: Callable[..., WorkerGroup], told: Reported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was caught; the worker that fails now is the first."""
    monkeypatch.setattr(analysis, "UNWINDING", 0.05)
    group = make(
        RAISES + '[ $LOCAL_RANK = 1 ] && { raise_ "caught"; touch $1/raised; sleep 600; };'
        "while [ ! -e $1/raised ]; do sleep 0.01; done; sleep 0.3; exit 7"
    )
    await group.start()
    await until(lambda: bool(told.failures), "a failure")
    await group.stop(signal.SIGTERM, 20.0)
    assert [(each.rank, each.exit_code) for each in told.failures + told.earlier] == [(4, 7)]


async def test_a_program_that_does_not_exist_is_a_failure_like_any_other(
    make: Callable[..., WorkerGroup], told: Reported
) -> None:
    """The round must end with a reason, not hang; no worker of the group is left."""
    group = make("exit 0", working_directory=Path("/none"))
    await group.start()
    (failure,) = told.failures
    assert (failure.rank, failure.local_rank, failure.exit_code) == (4, 0, COULD_NOT_START)
    assert "cannot enter its working directory '/none'" in failure.message
    assert (await group.stop(signal.SIGTERM, 1.0)).left == ()


async def test_the_worker_that_could_not_be_started_is_named(
    make: Callable[..., WorkerGroup], told: Reported
) -> None:
    """The failure has its ranks, on this host and in the round."""
    group = make("exit 0")
    specs = group._spec

    def without_second_log(local_rank: int) -> Any:
        spec = specs(local_rank)
        if local_rank == 1:
            assert spec.stdout is not None
            shutil.rmtree(spec.stdout.parent)
        return spec

    group._spec = without_second_log  # type: ignore[method-assign]
    await group.start()
    (failure,) = told.failures
    assert (failure.rank, failure.local_rank) == (5, 1)
    assert "cannot open its log file" in failure.message


async def test_logs_that_can_not_be_written_are_a_failure_too(
    make: Callable[..., WorkerGroup], told: Reported, tmp_path: Path
) -> None:
    """A full disk ends the round with a reason."""
    group = make("exit 0")
    shutil.rmtree(tmp_path / "logs")
    await group.start()
    (failure,) = told.failures
    assert "cannot make the log files" in failure.message
    assert await group.stop(signal.SIGTERM, 1.0) == StopReport()


async def test_workers_that_are_stopped_have_not_failed(
    make: Callable[..., WorkerGroup], told: Reported
) -> None:
    """Their exit codes and signals do not matter."""
    group = make("sleep 600")
    await group.start()
    await group.stop(signal.SIGTERM, 20.0)
    assert all(worker.exit is not None and not worker.exit.succeeded for worker in group.workers.values())
    assert (told.failures, told.successes) == ([], 0)


async def test_a_stopped_group_starts_nothing(
    make: Callable[..., WorkerGroup], told: Reported, tmp_path: Path
) -> None:
    """The caller of the stop has already confirmed that none of its workers is alive."""
    group = make("touch $1/started")
    await group.stop(signal.SIGTERM, 1.0)
    await group.start()
    await asyncio.sleep(0.05)
    assert not (tmp_path / "started").exists()
    assert (told.failures, told.successes, group.workers) == ([], 0, {})


async def test_a_group_that_is_stopped_before_it_knows_its_processors_starts_nothing(
    make: Callable[..., WorkerGroup], told: Reported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """start() waits for the topology, stop() has nothing to stop yet, and start() would start unsupervised workers."""
    looking, go_on = threading.Event(), threading.Event()

    def look(_: JobConfig) -> list[Cpus]:
        looking.set()
        assert go_on.wait(PATIENCE)
        return [frozenset(os.sched_getaffinity(0))]

    monkeypatch.setattr(group_module, "_processors", look)
    group = make("touch $1/started; sleep 600", 1, numa_binding="node")
    starting = asyncio.create_task(group.start())
    await until(looking.is_set, "the look at the processors")
    await group.stop(signal.SIGTERM, 1.0)
    go_on.set()
    await starting
    assert (group.workers, group.attempt, told.failures) == ({}, None, [])
    assert not (tmp_path / "started").exists()


async def test_a_worker_that_hangs_is_killed_and_the_failure_has_the_reason(
    make: Callable[..., WorkerGroup], told: Reported
) -> None:
    """The worker is named, and the others run on until a decision about the round."""
    group = make("sleep 600")
    await group.start()
    assert sorted(group.names) == ["0@3", "1@3"]
    await group.reap(HungWorker("1@3", "step", after=2.0, late_by=0.01, pid=group.workers[1].pid))
    await until(lambda: bool(told.failures), "the failure")
    (failure,) = told.failures
    accusation = "it did not leave 'step' within 2 s (found 0.010 s later)"
    assert (failure.rank, failure.exit_code, failure.message) == (5, -9, accusation)
    assert failure.traceback.startswith(
        f"rank 5, process {failure.pid}, hangs in 'step', which may take 2 s: "
    )
    assert group.workers[0].exit is None


async def test_a_worker_that_is_only_to_be_reported_lives_on(
    make: Callable[..., WorkerGroup], told: Reported, tmp_path: Path
) -> None:
    """Its diagnostics are in its file."""
    group = make("sleep 600")
    await group.start()
    await group.reap(
        HungWorker("1@3", "step", after=2.0, late_by=0.01, pid=group.workers[1].pid, signal=None)
    )
    (file,) = _found(tmp_path, "logs/*/attempt_0/1/hang.txt")
    assert f"rank 5, process {group.workers[1].pid}, hangs in 'step'" in file.read_text()
    assert (group.workers[1].exit, told.failures) == (None, [])


async def test_a_worker_that_ends_with_0_by_its_chosen_signal_has_failed(
    make: Callable[..., WorkerGroup], told: Reported, tmp_path: Path
) -> None:
    """It did not finish its work."""
    group = make(
        'trap "touch $1/heard.$LOCAL_RANK; exit 0" USR1; touch $1/ready.$LOCAL_RANK; while :; do sleep 0.01; done'
    )
    await group.start()
    await until(lambda: len(_found(tmp_path, "ready.*")) == 2, "the handlers")
    await group.reap(HungWorker("0@3", "step", after=2.0, late_by=0.01, signal=signal.SIGUSR1))
    await until(lambda: bool(told.failures), "the failure")
    (failure,) = told.failures
    assert (failure.rank, failure.exit_code) == (4, 0)
    assert failure.message.startswith("it did not leave 'step'")
    assert [path.name for path in _found(tmp_path, "heard.*")] == ["heard.0"]
    assert group.workers[1].exit is None


async def test_a_worker_that_outlives_sigkill_makes_the_host_unhealthy(
    make: Callable[..., WorkerGroup], told: Reported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is reported first, and once; a stop of the others does not wait for it."""
    group = make('[ $LOCAL_RANK = 0 ] || trap "" TERM; touch $1/ready.$LOCAL_RANK; sleep 600')
    await group.start()
    await until(lambda: len(_found(tmp_path, "ready.*")) == 2, "the handlers")
    pid = group.workers[1].pid

    async def kill_in_vain(*_: object) -> KillResult:
        assert told.failures == []
        return KillResult(1, (pid,))

    monkeypatch.setattr(group._spawner, "kill", kill_in_vain)
    monkeypatch.setattr(reaper, "SLOW_DEATH", 0.05)
    await group.reap(HungWorker("1@3", "save", after=2.0, late_by=0.01, pid=pid))
    (failure,) = told.failures
    (why,) = told.unfit
    assert why.startswith(f"process of workers outlived SIGKILL: {pid} (")
    assert failure.message == f"it did not leave 'save' within 2 s (found 0.010 s later); {why}"
    assert (failure.rank, failure.pid, failure.exit_code) == (5, pid, -9)
    # The other one ends by the signal; the one that outlived SIGKILL is not waited for.
    report = await asyncio.wait_for(group.stop(signal.SIGTERM, 3600.0), PATIENCE)
    assert report.killed == (1,)
    assert len(told.failures) == 1


async def test_a_worker_that_ended_meanwhile_is_left_alone(
    make: Callable[..., WorkerGroup], told: Reported
) -> None:
    """A worker of another round, or one that was stopped, is not killed either."""
    group = make("exit 0", workers=1)
    await group.start()
    await until(lambda: told.successes > 0, "success")
    await group.reap(HungWorker("0@3", "step", after=2.0, late_by=0.01))
    await group.stop(signal.SIGKILL, 0.0)
    await group.reap(HungWorker("0@3", "step", after=2.0, late_by=0.01))
    assert told.failures == []


async def test_each_worker_has_a_pipe_for_its_stacks_until_it_is_stopped(
    make: Callable[..., WorkerGroup], told: Reported, tmp_path: Path
) -> None:
    """Its environment has the path; the pipe is removed after the stop."""
    group = make('test -p "$RALLYPOINT_STACKS" && echo "$RALLYPOINT_STACKS" > $1/pipe.$LOCAL_RANK')
    await group.start()
    await until(lambda: told.successes > 0, "success")
    pipes = {Path((tmp_path / f"pipe.{rank}").read_text().strip()) for rank in (0, 1)}
    assert len(pipes) == 2
    await group.stop(signal.SIGKILL, 0.0)
    assert not any(pipe.exists() for pipe in pipes)


async def test_without_a_place_for_pipes_workers_run_all_the_same(
    make: Callable[..., WorkerGroup], told: Reported, tmp_path: Path
) -> None:
    """If they hang, their stacks are collected in other ways, or not at all."""
    group = make('test -z "$RALLYPOINT_STACKS"')
    group._settings = replace(group._settings, stacks=tmp_path / "none")
    await group.start()
    await until(lambda: told.successes > 0, "success")


async def test_a_process_is_traced_to_its_worker(make: Callable[..., WorkerGroup], tmp_path: Path) -> None:
    """Timers may be set by a worker's children; a process outside all workers belongs to none."""
    group = make(
        "sleep 600 & echo $! > $1/child.$LOCAL_RANK.new; mv $1/child.$LOCAL_RANK.new $1/child.$LOCAL_RANK; wait"
    )
    await group.start()
    child = tmp_path / "child.1"
    await until(child.exists, "the child")
    assert group.worker_of(group.workers[1].pid) == "1@3"
    assert group.worker_of(int(child.read_text())) == "1@3"
    assert group.worker_of(os.getpid()) is None
    assert group.worker_of(1) is None


@pytest.mark.parametrize("session", ["", "setsid "])
async def test_a_daemon_is_traced_to_the_worker_that_left_it_behind(
    make: Callable[..., WorkerGroup], tmp_path: Path, session: str
) -> None:
    """It has lost its parents, and perhaps its session too: its timers still belong to the worker."""
    group = make(
        f"({session}sh -c 'echo $$ > $0.new; mv $0.new $0; sleep 600; :' $1/daemon.$LOCAL_RANK &) ; sleep 600"
    )
    await group.start()
    spawner = group._spawner.pid
    for rank, name in enumerate(("0@3", "1@3")):
        file = tmp_path / f"daemon.{rank}"
        await until(file.exists, "the daemon")
        daemon = int(file.read_text())
        await until(partial(_is_child, daemon, spawner), "its parent's end")
        assert group.worker_of(daemon) == name


async def test_workers_get_the_environment_of_their_assignment(
    make: Callable[..., WorkerGroup], told: Reported, tmp_path: Path
) -> None:
    """It has variables of the round, of the run and of the agent."""
    group = make(
        'echo "$RANK $WORLD_SIZE $TORCHELASTIC_RESTART_COUNT $RALLYPOINT_STORE_SOCKET" > $1/seen.$LOCAL_RANK'
    )
    await group.start()
    await until(lambda: told.successes > 0, "success")
    assert [(tmp_path / f"seen.{rank}").read_text() for rank in (0, 1)] == [
        "4 8 2 /run/store\n",
        "5 8 2 /run/store\n",
    ]


async def test_of_workers_that_all_hang_each_is_examined(
    make: Callable[..., WorkerGroup], told: Reported, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Most of them wait for the one that hangs: the first to be killed ends the round, and may be any of them."""
    group = make("sleep 600")
    await group.start()
    reaped = [
        asyncio.create_task(group.reap(HungWorker(name, "step", after=2.0, late_by=0.01)))
        for name in group.names
    ]
    await asyncio.sleep(0)
    stopping = asyncio.create_task(group.stop(signal.SIGTERM, 60.0))
    await asyncio.gather(*reaped, stopping)
    assert len(_found(tmp_path, "logs/*/attempt_0/*/hang.txt")) == 2
    assert caplog.text.count("a worker hangs, and is being stopped") == 2
    assert told.failures == []


def _is_child(pid: int, parent: int | None) -> bool:
    process = read_process(pid)
    return process is not None and process.parent == parent
