"""Failures before a stop count, even if they are reported later; failures because of the stop do not."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rallypoint.agent.failures.analysis import FirstFailure, LocalFailures, PostMortem
from rallypoint.agent.failures.failure import WorkerFailure
from rallypoint.agent.logs.plan import WorkerLogs
from rallypoint.agent.spawner.protocol import WorkerExit
from rallypoint.rendezvous.core.state import FailureKind


class Scene:
    """The workers of a round, and the failures that are reported."""

    def __init__(self, folder: Path) -> None:
        self.first: list[WorkerFailure] = []
        self.earlier: list[WorkerFailure] = []
        self.logs = {rank: _logs(folder / str(rank)) for rank in range(2)}
        failures = LocalFailures(
            lambda event: (self.first if isinstance(event, FirstFailure) else self.earlier).append(
                event.failure
            )
        )
        self.post_mortem = PostMortem(failures, identity, cwd=folder, rlimits={})
        self.post_mortem.begin(self.logs)

    def raises(self, rank: int, at: float) -> None:
        """Write a worker's error file."""
        extra = {"py_callstack": "Traceback", "rallypoint": {"monotonic": at, "permanent": rank == 1}}
        story = {"message": {"message": f"rank {rank} raised", "extraInfo": extra}}
        self.logs[rank].error_file.write_text(json.dumps(story))


def _logs(folder: Path) -> WorkerLogs:
    folder.mkdir()
    logs = WorkerLogs(folder / "stdout.log", folder / "stderr.log", folder / "error.json")
    logs.stderr.touch()
    return logs


def identity(local_rank: int) -> dict[str, Any]:
    """The identity of a worker."""
    return {"rank": 4 + local_rank, "role": "trainer", "host": "node1"}


def ended(rank: int, at: float, **more: Any) -> WorkerExit:
    """The end of a worker."""
    values: dict[str, Any] = {"exit_code": None, "signal": signal.SIGTERM, "at": at, "time": time.time()}
    return WorkerExit(rank, 100 + rank, **{**values, **more})


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """Two workers that have been started."""
    return Scene(tmp_path)


def test_an_end_before_the_stop_is_a_failure_and_one_after_it_is_none(scene: Scene) -> None:
    """It may be reported when workers are already being stopped."""
    before = time.monotonic()
    assert not scene.post_mortem.failed_before_stop(ended(0, before))
    scene.post_mortem.stopping({0: 100, 1: 101})
    assert scene.post_mortem.failed_before_stop(ended(0, before))
    assert not scene.post_mortem.failed_before_stop(ended(0, before, exit_code=0, signal=None))
    assert not scene.post_mortem.failed_before_stop(ended(0, time.monotonic()))
    scene.post_mortem.note(scene.post_mortem.describe(ended(0, before)), {1: 101})
    assert ([each.rank for each in scene.first], [each.rank for each in scene.earlier]) == ([], [4])
    scene.post_mortem.close()


def test_a_worker_that_raised_has_failed_before_it_ends(scene: Scene) -> None:
    """Its exit code is the one that it is about to return."""
    raised_at = time.monotonic()
    scene.raises(1, raised_at)
    scene.post_mortem.note(scene.post_mortem.describe(ended(0, time.monotonic())), {1: 101})
    (first,) = scene.first
    assert (first.rank, first.pid, first.exit_code, first.permanent) == (5, 101, 93, True)
    assert (first.at, first.kind, first.message) == (raised_at, FailureKind.EXCEPTION, "rank 1 raised")
    assert [each.rank for each in scene.post_mortem.failures] == [5, 4]
    scene.post_mortem.close()


def test_a_worker_that_raised_has_failed_once_one_of_another_host_has(scene: Scene) -> None:
    """No worker here has ended; a second examination reports nothing new."""
    scene.post_mortem.examine({0: 100, 1: 101})
    assert scene.first == []
    scene.raises(1, time.monotonic())
    scene.post_mortem.examine({0: 100, 1: 101})
    scene.post_mortem.examine({0: 100, 1: 101})
    scene.post_mortem.stopping({0: 100, 1: 101})
    assert ([each.rank for each in scene.first], scene.earlier) == ([5], [])
    scene.post_mortem.close()


def test_an_exception_because_of_the_stop_is_no_failure(scene: Scene) -> None:
    """For example, a handler of SIGTERM may raise."""
    scene.post_mortem.stopping({0: 100, 1: 101})
    scene.raises(0, time.monotonic())
    scene.post_mortem.stopping({0: 100, 1: 101})
    assert (scene.first, scene.earlier, scene.post_mortem.failures) == ([], [], [])
    scene.post_mortem.close()
