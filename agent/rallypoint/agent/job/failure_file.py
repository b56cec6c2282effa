"""failure.json: how a job ended on this host, for programs. docs/failures.md has its schema."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rallypoint.agent.config.job import JobConfig
from rallypoint.agent.failures.failure import WorkerFailure
from rallypoint.agent.job.result import FAILED, REFUSED, UNFIT, JobResult
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.logs import get_logger

FAILURE_FILE = "failure.json"

SCHEMA = "rallypoint.failure/1"
"""Names the schema and its version. Fields may be added to it; what is there keeps its name and meaning, or the number
grows."""

_log = get_logger("rallypoint.agent")


def failure_document(
    config: JobConfig,
    result: JobResult,
    *,
    round_: int,
    restart_count: int,
    run_end: pb.RunEnd | None,
    local_failures: Sequence[WorkerFailure],
    host: str,
    log_dir: Path | None,
    time: float,
) -> dict[str, Any]:
    """What is in the file.

    Args:
        config: the job.
        result: how it ended here.
        round_: the last round of which this host was told; 0: none.
        restart_count: of the run.
        run_end: how the run ended, if it did.
        local_failures: workers of this host that failed in that round, the first first.
        host: name of this host.
        log_dir: folder of the workers' output.
        time: now, in Unix seconds.
    """
    return {
        "schema": SCHEMA,
        "time": _moment(time),
        "run_id": config.run_id,
        "node_id": config.node_id,
        "host": host,
        "outcome": _outcome(result, run_end),
        "exit_code": result.exit_code,
        "retry": result.retry,
        "detail": result.detail,
        "round": round_,
        "restart_count": restart_count,
        "log_dir": str(log_dir) if log_dir is not None else None,
        "first_failure": _failure(result.failure) if result.failure is not None else None,
        "local_failures": [_failure(failure, config.node_id) for failure in local_failures],
    }


def write_failure_files(document: dict[str, Any], paths: Iterable[Path]) -> None:
    """Writes the document to each of the paths, all of it or nothing; what can't be written is told in the log."""
    text = json.dumps(document, indent=2) + "\n"
    for path in paths:
        try:
            _write(path, text)
        except OSError as error:
            _log.warning("can't write the failure file", file=str(path), reason=error.strerror)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several agents of a host may have been given the same path: the last one wins, and is read whole.
    number, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(number, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o644)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _outcome(result: JobResult, run_end: pb.RunEnd | None) -> str:
    if result.exit_code > 128:
        return "left"
    if result.exit_code == UNFIT:
        return "unfit"
    if result.exit_code == REFUSED:
        return "refused"
    cancelled = run_end is not None and run_end.outcome == pb.OUTCOME_CANCELLED
    return "cancelled" if cancelled and result.exit_code == FAILED else "failed"


def _failure(failure: WorkerFailure, node: str = "") -> dict[str, Any]:
    return {
        "rank": failure.rank,
        "local_rank": failure.local_rank,
        "role": failure.role,
        "node": failure.node or node or None,
        "host": failure.host,
        "pid": failure.pid or None,
        "exit_code": failure.exit_code if failure.exit_code >= 0 else None,
        "signal": failure.signal_name,
        "kind": failure.kind.value,
        "permanent": failure.permanent,
        "time": _moment(failure.time),
        "message": failure.message,
        "traceback": failure.traceback or None,
        "log_file": failure.log_file or None,
        "core_file": failure.core_file or None,
    }


def _moment(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="microseconds")
