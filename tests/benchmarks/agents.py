"""An agent with one worker, as its users start it: a job of this host alone, guarded by a timer service."""

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
    """An agent that gathers no evidence before it kills, until the context ends.

    Args:
        folder: For its log, and for those of its worker, which are removed again.
        timers: The timer service.
        module: Of `benchmarks.clients`: what the worker is.
        order: What to tell the worker, a dataclass.
        max_restarts: How often a worker that fails is started again.
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
