"""`reap`: time from the deadline of a hung worker to its death."""

from __future__ import annotations

import json
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TypeAlias

from benchmarks.agents import agent
from benchmarks.clients.hanging import DEATH, Hanging, HangOrder, TorchReapOrder, TorchReapResult
from benchmarks.figures import Figure
from benchmarks.processes import BenchmarkError, client_command, driven, running, tail, timer_server
from benchmarks.session import Session

SIZES = (150,)

_AFTER = 0.3  # seconds of a worker's timer, at least
_START = 60.0  # seconds for an agent to start a worker
_LOOK = 0.005  # seconds between two checks for a hung worker
_TORCH = 3  # workers of ours for one of torch's
_TORCH_TIMEOUT = 900.0  # seconds
_OURS = {"floor", "ours"}

Process: TypeAlias = "subprocess.Popen[str]"
_Reap = Callable[[Session, int], Sequence[float]]
"""Lets that many workers hang, one after the other; returns the seconds from each one's deadline to its death."""


def reap(session: Session) -> Iterator[Figure]:
    """Measure; see docs/benchmarks.md."""
    for count in session.sizes_or(SIZES):
        ours: dict[str, _Reap] = {"floor": _kill, "ours": _agent}
        peers: dict[str, _Reap] = {kind: partial(_torch, kind=kind) for kind in ("sigkill", "file", "queue")}
        late = _in_trials(session, count, ours | (peers if session.torch is not None else {}))
        if not late.keys() >= _OURS:
            continue
        for name, quantity in (("p50", statistics.median), ("p99", _p99), ("max", max)):
            of = {who: quantity(each) * 1e3 for who, each in late.items()}
            note = ""
            if {"queue", "sigkill"} <= of.keys():
                note = f"torch's queue: {of['queue']:.0f}; SIGKILL of its worker: {of['sigkill']:.1f}"
            yield Figure(f"reap.{name}", count, of["ours"], "ms", of["floor"], of.get("file"), note)


def _p99(late: Sequence[float]) -> float:
    return sorted(late)[int(len(late) * 0.99)]


def _in_trials(session: Session, count: int, variants: dict[str, _Reap]) -> dict[str, list[float]]:
    """Return all measurements by variant; variants alternate, each trial with a part of the workers."""
    late: dict[str, list[float]] = {}
    for trial in range(1, session.trials + 1):
        for name, measure in variants.items():
            doing = f"reap {name} {trial}/{session.trials}"
            try:
                part = max(1, count // session.trials)
                found = measure(session, part if name in _OURS else max(1, part // _TORCH))
            except BenchmarkError as error:
                # A failure of torch must not fail our figures.
                (session.fail if name in _OURS else session.say)(f"{doing}: {error}")
                continue
            late.setdefault(name, []).extend(found)
            session.say(
                f"{doing}: {statistics.median(found) * 1e3:.1f} ms from due to dead, p99 {_p99(found) * 1e3:.1f} ms"
            )
    return late


def _agent(session: Session, count: int) -> Sequence[float]:
    """Measure our agent, which restarts each worker that it has killed."""
    with tempfile.TemporaryDirectory(dir=session.folder) as folder, timer_server(session.folder) as timers:
        order = HangOrder(folder, _AFTER)
        with agent(session.folder, timers, "hanging", order, max_restarts=count + 1) as process:
            log = session.folder / "agent-hanging.log"
            return [_seconds_to_death(Path(folder), process, log) for _ in range(count)]


def _kill(session: Session, count: int) -> Sequence[float]:
    """Measure the floor: this process sleeps until the deadline, and kills."""
    log = session.folder / "hanging.log"
    late = []
    with tempfile.TemporaryDirectory(dir=session.folder) as folder:
        command = client_command("hanging", HangOrder(folder, _AFTER))
        for _ in range(count):
            with running(command, log) as process:
                late.append(_seconds_to_death(Path(folder), process, log, kill=True))
    return late


def _seconds_to_death(folder: Path, starter: Process, log: Path, *, kill: bool = False) -> float:
    """Wait for the next hung worker, then for its death; with `kill`, kill it at its deadline."""
    hanging = _next_hanging(folder, starter, log)
    pidfd = os.pidfd_open(hanging.pid)
    try:
        if kill:
            time.sleep(max(0.0, hanging.due - time.monotonic()))
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        dead, _, _ = select.select([pidfd], [], [], hanging.due - time.monotonic() + DEATH)
        now = time.monotonic()
    finally:
        os.close(pidfd)
    if not dead:
        raise BenchmarkError(f"a worker was not dead {DEATH:g} s after its deadline: {tail(log)}")
    return now - hanging.due


def _next_hanging(folder: Path, starter: Process, log: Path) -> Hanging:
    deadline = time.monotonic() + _START
    while time.monotonic() < deadline and starter.poll() is None:
        for place in folder.glob("*.json"):
            hanging = Hanging(**json.loads(place.read_text()))
            place.unlink()
            return hanging
        time.sleep(_LOOK)
    raise BenchmarkError(f"no worker hangs (within {_START:g} s, or ever): {tail(log)}")


def _torch(session: Session, count: int, *, kind: str) -> Sequence[float]:
    order = json.dumps(asdict(TorchReapOrder(kind, count, _AFTER)))
    command = [str(session.torch or sys.executable), "-m", "benchmarks.clients.torch_timers", "reap", order]
    log = session.folder / "client-torch-timers.log"
    return TorchReapResult(**driven(command, log, _TORCH_TIMEOUT)).late
