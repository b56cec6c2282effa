"""A worker that let a timer run out, or that somebody asks about, as those see it who gather evidence and kill."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HungWorker:
    """A timer that ran out, and that its worker still holds; or a worker that somebody wants looked into, or killed.

    Attributes:
        worker_id: the worker.
        scope: what it is doing, as it calls it.
        after: seconds that it may take.
        late_by: seconds since.
        pid: the process that holds the timer: the worker, or one that descends from it; 0 if nobody knows, since
            the timer was set at the service.
        signal: what to send before SIGKILL; 0: SIGKILL at once; None: nobody is to be killed, only to be told.
        cpu_seconds: processor time of that process when the scope began; None if that was not noted.
        learned_from: how many completions `after` was learned from; 0: it was given.
        asked: why somebody wants it looked into; empty unless that is all there is to it, and no timer ran out.
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
