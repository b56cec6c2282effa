"""failure.json: the end of a job on this host, for programs. docs/failures.md has its schema."""

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
from rallypoint.agent.job.result import ALREADY_SUCCEEDED, FAILED, REFUSED, UNFIT, JobResult
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.logs import get_logger

FAILURE_FILE = "failure.json"

SCHEMA = "rallypoint.failure/1"
"""Name and version of the schema. Fields may be added; if an existing field changes its name or meaning, the number
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
    """Return the content of the file.

    Args:
        round_: the last round whose workers this host started; 0: none.
        run_end: the end of the run, if it has ended.
        local_failures: workers of this host that failed in that round, in order of time.
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
    """Write the document to each of the paths, atomically; log a failed write."""
    text = json.dumps(document, indent=2) + "\n"
    for path in paths:
        try:
            _write(path, text)
        except OSError as error:
            _log.warning("can't write the failure file", file=str(path), reason=error.strerror)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several agents of a host may have the same path: the last write wins, and no reader sees half a file.
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
    if result.exit_code in (REFUSED, ALREADY_SUCCEEDED):
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
        "kind": failure.kind.name.lower(),
        "permanent": failure.permanent,
        "time": _moment(failure.time),
        "message": failure.message,
        "traceback": failure.traceback or None,
        "log_file": failure.log_file or None,
        "core_file": failure.core_file or None,
    }


def _moment(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="microseconds")
