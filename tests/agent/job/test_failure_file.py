"""failure.json describes for programs how a job ended on a host; a reader never sees an incomplete file."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.fake_job import VALUE_ERROR
from rallypoint.agent.config.job import JobConfig, Peer
from rallypoint.agent.job.failure_file import SCHEMA, failure_document, write_failure_files
from rallypoint.agent.job.result import FAILED, PERMANENT, REFUSED, UNFIT, JobResult
from rallypoint.rendezvous.core.state import FailureKind
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from support.replacing import instead_of

CONFIG = JobConfig(
    run_id="run-1",
    node_id="a",
    address="127.0.0.1",
    settings=pb.RunSettings(min_nodes=1, max_nodes=1),
    command=("true",),
    environment={},
    rendezvous=Peer("127.0.0.1:1"),
    timer=Peer("127.0.0.1:1"),
)
FIRST = replace(VALUE_ERROR, kind=FailureKind.EXCEPTION, node="b")
LOCAL = replace(
    FIRST, rank=0, local_rank=0, pid=7, exit_code=-6, kind=FailureKind.SIGNAL, node="", core_file="/core"
)


def document(result: JobResult, run_end: pb.RunEnd | None = None, **more: Any) -> dict[str, Any]:
    """Return the content of the file."""
    values: dict[str, Any] = {
        "round_": 4,
        "restart_count": 2,
        "local_failures": [],
        "host": "node1",
        "log_dir": Path("/logs"),
        "time": 1_800_000_000.0,
    }
    return failure_document(CONFIG, result, run_end=run_end, **{**values, **more})


def test_a_failure_is_written_with_all_known_fields() -> None:
    """The run's first failure and those of this host have the same fields; an unknown value is null."""
    told = document(JobResult(FAILED, "it failed", FIRST), local_failures=[LOCAL])
    first = {
        "rank": 3,
        "local_rank": 1,
        "role": "trainer",
        "node": "b",
        "host": "node2",
        "pid": 4242,
        "exit_code": 1,
        "signal": None,
        "kind": "exception",
        "permanent": False,
        "time": "2027-01-15T07:59:59.750000+00:00",
        "message": "ValueError: bad",
        "traceback": "Traceback",
        "log_file": "/logs/1/stderr.log",
        "core_file": None,
    }
    assert told == {
        "schema": SCHEMA,
        "time": "2027-01-15T08:00:00.000000+00:00",
        "run_id": "run-1",
        "node_id": "a",
        "host": "node1",
        "outcome": "failed",
        "exit_code": 1,
        "retry": "here",
        "detail": "it failed",
        "round": 4,
        "restart_count": 2,
        "log_dir": "/logs",
        "first_failure": first,
        "local_failures": [
            {
                **first,
                "rank": 0,
                "local_rank": 0,
                "pid": 7,
                "node": "a",
                "exit_code": None,
                "signal": "SIGABRT",
                "kind": "signal",
                "core_file": "/core",
            }
        ],
    }
    kinds = [document(JobResult(FAILED, "", replace(FIRST, kind=kind))) for kind in FailureKind]
    words = "unknown exception exit_code signal out_of_memory hung not_started port_taken"
    assert [each["first_failure"]["kind"] for each in kinds] == words.split()


@pytest.mark.parametrize(
    ("exit_code", "run_outcome", "outcome", "retry"),
    [
        (FAILED, pb.OUTCOME_FAILED, "failed", "here"),
        (FAILED, pb.OUTCOME_CANCELLED, "cancelled", "here"),
        (FAILED, None, "failed", "here"),
        (REFUSED, None, "refused", "never"),
        (UNFIT, pb.OUTCOME_FAILED, "unfit", "elsewhere"),
        (PERMANENT, pb.OUTCOME_FAILED, "failed", "never"),
        (143, None, "left", "here"),
    ],
)
def test_outcome_and_retry_match_the_exit_code(
    exit_code: int, run_outcome: pb.Outcome.ValueType | None, outcome: str, retry: str
) -> None:
    """They match the exit code."""
    run_end = pb.RunEnd(outcome=run_outcome) if run_outcome is not None else None
    told = document(JobResult(exit_code, "so it ended"), run_end, log_dir=None)
    assert (told["outcome"], told["retry"], told["exit_code"]) == (outcome, retry, exit_code)
    assert (told["first_failure"], told["local_failures"], told["log_dir"]) == (None, [], None)


def test_the_file_is_written_to_all_paths_and_replaces_old_ones(tmp_path: Path) -> None:
    """Other users can read it, and no temporary file is left behind."""
    paths = [tmp_path / "logs" / "failure.json", tmp_path / "wanted.json"]
    paths[1].write_text("old")
    write_failure_files(document(JobResult(FAILED, "it failed")), paths)
    for path in paths:
        assert json.loads(path.read_text())["detail"] == "it failed"
        assert path.stat().st_mode & 0o777 == 0o644
    assert sorted(os.listdir(tmp_path)) == ["logs", "wanted.json"]
    assert os.listdir(tmp_path / "logs") == ["failure.json"]


def test_a_reader_never_sees_half_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It appears complete."""
    path = tmp_path / "failure.json"
    replaced: list[str] = []

    @instead_of(monkeypatch, os, "replace")
    def spy(replace_file: Any, source: str, target: Path) -> None:
        replaced.append(json.loads(Path(source).read_text())["detail"])
        assert not path.exists()
        replace_file(source, target)

    write_failure_files(document(JobResult(FAILED, "it failed")), [path])
    assert replaced == ["it failed"]


def test_an_unwritable_path_is_logged_and_the_others_are_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The job's result is unchanged."""
    (tmp_path / "file").touch()
    paths = [tmp_path / "file" / "failure.json", tmp_path / "failure.json"]
    with caplog.at_level(logging.WARNING):
        write_failure_files(document(JobResult(FAILED, "it failed")), paths)
    assert paths[1].exists()
    assert "can't write the failure file" in caplog.text
    assert str(paths[0]) in caplog.text
