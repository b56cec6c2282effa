"""A job from Python returns results by rank or raises one error, and leaves the launching program unchanged."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from launcher import calls
from rallypoint.launcher import (
    CallError,
    ChildFailedError,
    LaunchConfig,
    WorkersFailedError,
    elastic_launch,
    launch_agent,
)
from rallypoint.worker import record
from support.marks import slow

pytestmark = pytest.mark.integration

FRESH = ["spawn", slow("forkserver")]  # methods that don't depend on the modules that this process has loaded


def config(tmp_path: Path, **more: Any) -> LaunchConfig:
    return LaunchConfig(1, 1, 2, log_dir=tmp_path, **more)


@pytest.mark.parametrize("method", FRESH)
def test_results_are_by_rank(tmp_path: Path, method: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Each worker gets the arguments, with its local rank where requested; its output is shown."""
    launch = elastic_launch(
        config(tmp_path, start_method=method, role="trainer", tee="3", redirects="0"), calls.tell
    )
    results = launch("I am ${local_rank}", 5)
    assert {rank: box.content for rank, box in results.items()} == {
        rank: (rank, "2", "trainer", f"I am {rank}", 5) for rank in range(2)
    }
    assert "rank 1 was told I am 1" in capfd.readouterr().out


@pytest.mark.parametrize("method", FRESH)
def test_a_launch_changes_nothing_here(tmp_path: Path, method: str) -> None:
    """Handlers, environment and modules stay, and so a second launch works like the first."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    environment, loaded, threads = dict(os.environ), set(sys.modules), threading.active_count()
    for _ in range(2):
        assert elastic_launch(config(tmp_path, start_method=method), calls.leave)(0) == {0: None, 1: None}
    assert handlers == {number: signal.getsignal(number) for number in signal.valid_signals()}
    assert (environment, threads) == (dict(os.environ), threading.active_count())
    assert not [name for name in set(sys.modules) - loaded if name.split(".")[0] in ("grpc", "psutil")]


@pytest.mark.parametrize("method", FRESH)
def test_results_of_an_earlier_round_do_not_count(tmp_path: Path, method: str) -> None:
    """After a restart the results are of the last workers."""
    launch = elastic_launch(config(tmp_path, start_method=method, max_restarts=1), calls.fail_at_first)
    assert launch() == {0: 1, 1: 1}


@pytest.mark.parametrize("method", FRESH)
def test_the_error_carries_the_first_failure(tmp_path: Path, method: str) -> None:
    """It has rank, exit code and traceback; torch's name catches it too, and it survives pickling."""
    with pytest.raises(ChildFailedError) as caught:
        elastic_launch(config(tmp_path, start_method=method, max_restarts=0), calls.fail)(1)
    error = caught.value
    assert isinstance(error, WorkersFailedError)
    assert error.failure is not None
    assert (error.exit_code, error.failure.rank, error.failure.exit_code) == (1, 1, 1)
    assert error.failures == {1: error.failure}
    assert "ValueError: no good" in str(error)
    assert "in fail\n" in error.failure.traceback
    assert error.get_first_failure() == (1, error.failure)
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (str(again), again.failure) == (str(error), error.failure)


def test_record_around_a_launch_writes_the_workers_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The platform that started the launching program reads it, and needs the worker's traceback and exit code."""
    reply = tmp_path / "reply.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(reply))
    with pytest.raises(WorkersFailedError):
        record(launch_agent)(config(tmp_path, max_restarts=0), calls.fail, [1])
    message = json.loads(reply.read_text())["message"]
    assert message["message"] == "ValueError: no good"
    assert message["errorCode"] == 1
    assert "in fail\n" in message["extraInfo"]["py_callstack"]


def test_a_launch_alone_writes_no_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program may go on, and it may itself be a worker, which owns that error file."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "reply.json"))
    with pytest.raises(WorkersFailedError):
        elastic_launch(config(tmp_path, max_restarts=0), calls.fail)(1)
    assert not (tmp_path / "reply.json").exists()


@pytest.mark.parametrize("method", FRESH)
def test_a_functions_exit_code_is_no_signal(tmp_path: Path, method: str) -> None:
    """`sys.exit(138)` is the function's own exit code: no shell is in between, and SIGUSR1 killed no worker."""
    with pytest.raises(WorkersFailedError) as caught:
        elastic_launch(config(tmp_path, start_method=method, max_restarts=0), calls.leave)(138)
    failure = caught.value.failure
    assert failure is not None
    assert (failure.message, failure.exit_code) == ("exited with code 138", 138)


def test_a_function_that_can_not_be_pickled_is_refused(tmp_path: Path) -> None:
    """The error is one line with a remedy."""
    with pytest.raises(CallError, match=r"<locals>.<lambda> or its arguments can't be pickled .*'fork'"):
        elastic_launch(config(tmp_path), lambda: 1)()
    with pytest.raises(CallError, match="tell or its arguments can't be pickled"):
        elastic_launch(config(tmp_path), calls.tell)(threading.Lock())


@pytest.mark.parametrize("method", FRESH)
def test_a_result_that_can_not_be_pickled_is_no_reason_to_restart(tmp_path: Path, method: str) -> None:
    """A retry would fail too: the job ends with the exit code for that, and with the type's name."""
    with pytest.raises(WorkersFailedError, match="of type lock, can't be pickled") as caught:
        elastic_launch(config(tmp_path, start_method=method, max_restarts=3), calls.return_lock)()
    assert caught.value.exit_code == 93
    assert len(list(tmp_path.glob("*/attempt_*"))) == 1


def test_a_result_that_can_not_be_loaded_names_its_rank(tmp_path: Path) -> None:
    """The job has succeeded; the error is in this process."""
    with pytest.raises(CallError, match=r"the return value of rank 0 can't be loaded here \(ValueError"):
        elastic_launch(config(tmp_path), calls.return_one_way)()


def test_programs_are_run_as_they_are(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Arguments may be text or not; programs return no result."""
    launch = elastic_launch(config(tmp_path), "sh")
    assert launch("-c", 'echo "$0 $1 $LOCAL_RANK"', "rank=${local_rank}", 7) == {0: None, 1: None}
    assert sorted(capfd.readouterr().out.splitlines()) == ["rank=0 7 0", "rank=1 7 1"]
    with pytest.raises(WorkersFailedError) as caught:
        elastic_launch(config(tmp_path, max_restarts=0), "sh")("-c", "exit 9")
    assert caught.value.failure is not None
    assert caught.value.failure.exit_code == 9


@pytest.mark.slow
async def test_an_event_loop_that_runs_here_is_no_trouble(tmp_path: Path) -> None:
    """A notebook has one: the call blocks the loop, and returns."""
    assert elastic_launch(config(tmp_path), calls.leave)(0) == {0: None, 1: None}


def test_other_threads_may_launch(tmp_path: Path) -> None:
    """Outside the main thread no signals are passed on, and nothing else is missing."""
    results: list[dict[int, Any]] = []
    thread = threading.Thread(target=lambda: results.append(elastic_launch(config(tmp_path), calls.leave)(0)))
    thread.start()
    thread.join()
    assert results == [{0: None, 1: None}]


def test_a_fork_is_refused_where_it_would_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gRPC in this process, the error comes before any fork."""
    monkeypatch.setitem(sys.modules, "grpc", sys)
    with pytest.raises(ValueError, match="this process has loaded gRPC"):
        elastic_launch(config(tmp_path, start_method="fork"), calls.leave)(0)


def test_invalid_values_of_a_launch_are_reported_in_one_line(tmp_path: Path) -> None:
    """Wrong values get one line with the field's name; so do errors that only the agent can detect."""
    with pytest.raises(ValueError, match=r"^rlimit: 'files' is not a resource limit of this system"):
        elastic_launch(config(tmp_path, options={"rlimit": "files=3"}), calls.leave)(0)
    with pytest.raises(ValueError, match=r"^supervisor_address nowhere"):
        elastic_launch(config(tmp_path, supervisor_address="nowhere:1"), calls.leave)(0)
    with pytest.raises(ValueError, match=r"^rlimit: nofile=1000000000000: the agent may not raise"):
        elastic_launch(config(tmp_path, options={"rlimit": "nofile=1000000000000"}), calls.leave)(0)
    with pytest.raises(ValueError, match="entrypoint: 42 is neither a function nor a program's name"):
        elastic_launch(config(tmp_path), 42)()  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
