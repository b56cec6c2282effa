"""A program written for torch's launcher runs with ours: its configuration, its exception types, its `record`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher import calls
from rallypoint.launcher import WorkersFailedError, elastic_launch, launch_agent

pytestmark = [pytest.mark.torch, pytest.mark.integration]

errors = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")
api = pytest.importorskip("torch.distributed.launcher.api")
specs = pytest.importorskip("torch.distributed.elastic.multiprocessing")


def config(tmp_path: Path, **more: Any) -> Any:
    """Return torch's own configuration."""
    return api.LaunchConfig(
        1, 1, 2, rdzv_backend="c10d", logs_specs=specs.DefaultLogsSpecs(str(tmp_path)), max_restarts=0, **more
    )


def test_torchs_config_launches(tmp_path: Path) -> None:
    """Both of torch's names of the call work."""
    assert elastic_launch(config(tmp_path), calls.leave)(0) == {0: None, 1: None}
    assert launch_agent(config(tmp_path), calls.leave, [0]) == {0: None, 1: None}


def test_torchs_error_catches_a_failed_worker(tmp_path: Path) -> None:
    """It has torch's failures, with the content of the worker's error file, and is also our type."""
    with pytest.raises(errors.ChildFailedError) as caught:
        elastic_launch(config(tmp_path), calls.fail)(1)
    rank, failure = caught.value.get_first_failure()
    assert (rank, type(failure), failure.local_rank, failure.exitcode) == (1, errors.ProcessFailure, 1, 1)
    assert Path(failure.error_file).name == "error.json"
    assert failure.message["message"] == "ValueError: no good"
    assert "ValueError: no good" in caught.value.format_msg()
    assert isinstance(caught.value, WorkersFailedError)
    assert caught.value.failure is not None
    assert caught.value.failure.message == "ValueError: no good"


def test_a_failure_without_an_error_file_has_its_reason(tmp_path: Path) -> None:
    """Torch's message there is a sentence about the missing traceback."""
    with pytest.raises(errors.ChildFailedError) as caught:
        elastic_launch(config(tmp_path), "sh")("-c", "kill -9 $$")
    _, failure = caught.value.get_first_failure()
    assert (failure.exitcode, failure.signal_name(), failure.error_file) == (-9, "SIGKILL", "<N/A>")
    assert failure.message.startswith("killed by SIGKILL")
    assert failure.timestamp == int(caught.value.failure.time)


def test_torchs_record_keeps_the_workers_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around our launch, it copies the worker's error file as it does around torch's own."""
    reply = tmp_path / "reply.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(reply))
    with pytest.raises(errors.ChildFailedError):
        errors.record(launch_agent)(config(tmp_path), calls.fail, [1])
    message = json.loads(reply.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("ValueError: no good", 1)


def test_an_end_without_a_failed_worker_is_not_torchs_error(tmp_path: Path) -> None:
    """Torch's error always has a failure."""
    with pytest.raises(ValueError, match="rdzv_endpoint"):
        elastic_launch(config(tmp_path, rdzv_endpoint="a,b"), calls.leave)(0)
