"""An agent with one worker, as users start it: a job of this host alone, watched by a timer service."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.processes import RALLYPOINT, Server, running


@contextmanager
def agent(
    folder: Path, timers: Server, module: str, order: Any, *, max_restarts: int = 0
) -> Iterator[subprocess.Popen[str]]:
    """Run an agent that collects no diagnostics before it kills, until the context ends.

    Args:
        folder: For the agent's log, and its worker's logs, which are removed at the end.
        timers: The timer service.
        module: Module of `benchmarks.clients` that is the worker.
        order: Argument of the worker, a dataclass.
        max_restarts: Limit of restarts of a failed worker.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix="workers-") as logs:
        command = [
            *(str(RALLYPOINT), "run", "--standalone", "--insecure", "--timer-endpoint", timers.endpoint),
            *("--evidence-timeout", "0", "--max-restarts", str(max_restarts), "--log-dir", logs),
            *("--rdzv-conf", "restart_backoff=0"),
            *("-m", f"benchmarks.clients.{module}", json.dumps(asdict(order))),
        ]
        with running(command, folder / f"agent-{module}.log") as process:
            yield process
