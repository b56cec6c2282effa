"""A worker to diagnose or kill: its timer has expired, or an operator requested it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HungWorker:
    """An expired timer that its worker still holds; or an operator's request to diagnose or kill a worker.

    Attributes:
        scope: the name of the timer.
        after: the timeout in seconds.
        late_by: seconds from the expiry to its detection.
        pid: the process that holds the timer: the worker, or a descendant; 0 if unknown, because the timer was set at
            the service.
        signal: signal before SIGKILL; 0: SIGKILL at once; None: do not kill, only report.
        cpu_seconds: processor time of that process when the timer started; None if not measured.
        learned_from: number of completions from which `after` was learned; 0: it was given.
        requested: the operator's request, as a sentence; empty if a timer has expired.
    """

    worker_id: str
    scope: str
    after: float
    late_by: float
    pid: int = 0
    signal: int | None = 0
    cpu_seconds: float | None = None
    learned_from: int = 0
    requested: str = ""
