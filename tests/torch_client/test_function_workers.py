"""Function workers that return without closing gloo end well: none is aborted, and none loses the store of rank 0."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rallypoint.launcher import LaunchConfig, WorkersFailedError, elastic_launch

WORKERS = 4
COUNT = int(os.environ.get("RALLYPOINT_FUNCTION_WORKERS", "16"))

pytestmark = [pytest.mark.torch, pytest.mark.integration, pytest.mark.timeout(600 + 60 * COUNT)]


@pytest.mark.parametrize(
    ("name", "method"), [("leave_work", "spawn"), ("meet", "forkserver"), ("leave_work", "forkserver")]
)
def test_no_worker_fails_after_its_function(tmp_path: Path, name: str, method: str) -> None:
    """RALLYPOINT_FUNCTION_WORKERS of them, four at a time; a failed launch counts, and the next one starts."""
    pytest.importorskip("torch")
    from torch_client import gloo_functions

    failed = []
    launches = -(-COUNT // WORKERS)
    for _ in range(launches):
        config = LaunchConfig(1, 1, WORKERS, max_restarts=0, start_method=method, log_dir=tmp_path)
        try:
            returned = elastic_launch(config, getattr(gloo_functions, name))()
        except WorkersFailedError as error:
            failed.append(str(error))
        else:
            assert returned == {rank: rank for rank in range(WORKERS)}
    sys.stdout.write(f"{name}, {method}: {launches * WORKERS} workers, {len(failed)} launches failed\n")
    assert not failed, failed[0]
