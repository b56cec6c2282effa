"""Messages between agent and spawner, as values. rallypoint.agent.spawner.spawner describes the frames."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Read when this module is loaded, before the agent serves: then it raises its soft limit, for its connections
# (rallypoint.serving.server). A worker may use select(), which fails from descriptor 1,024 on.
OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)
"""Soft and hard limit of open files with which this process was started."""


class SpawnError(Exception):
    """A worker could not be started, or there is no spawner to start it.

    Attributes:
        local_rank: of the worker; None if the spawner failed.
    """

    def __init__(self, message: str, local_rank: int | None = None) -> None:
        super().__init__(message)
        self.local_rank = local_rank


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker to start.

    Attributes:
        local_rank: its index among the workers of this host.
        argv: program and arguments; a program without a slash is looked up on `env`'s PATH.
        env: the whole environment, nothing is inherited. The spawner adds RALLYPOINT_SPAWN_ID.
        cwd: working directory; None for the agent's.
        stdout: file to append standard output to; None for the agent's standard output.
        stderr: the same for standard error.
        stdin: file or terminal to read as standard input; None for the spawner's own.
        cpus: the processors that it may run on; None for the agent's.
        rlimits: resource limits that differ from those with which the agent was started: (soft, hard) by name, as in
            "nofile"; -1 is no limit.
        call: true if it is a fork of the spawner that calls the function the spawner has loaded; `argv` is then
            only its name in messages. See `fork_spawner` and `start_forkserver`.
    """

    local_rank: int
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path | None = None
    stdout: Path | None = None
    stderr: Path | None = None
    stdin: Path | None = Path(os.devnull)
    cpus: frozenset[int] | None = None
    rlimits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    call: bool = False


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """The exit of a worker. Each worker that was started has exactly one.

    Attributes:
        local_rank: its index among the workers of this host.
        pid: its process id while it was alive.
        exit_code: its exit code; None if a signal ended it.
        signal: number of the signal that ended it; None if it exited by itself.
        at: time of the exit, monotonic seconds; comparable between all processes of this host.
        time: time of the exit, Unix seconds.
        user_seconds: processor time spent in user mode, waited-for children included.
        system_seconds: processor time spent in the kernel, waited-for children included.
        max_rss: peak memory, bytes.
        core_dumped: true if the kernel wrote a core dump of it, or piped one into a program.
        during_stop: true if its group was already being stopped: it is then no failure of its own.
        inferred: true if the spawner died first and the worker with it, so its status is unknown. `signal` is then
            SIGKILL and the figures are zero.
    """

    local_rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    at: float
    time: float
    user_seconds: float = 0.0
    system_seconds: float = 0.0
    max_rss: int = 0
    core_dumped: bool = False
    during_stop: bool = False
    inferred: bool = False

    @property
    def succeeded(self) -> bool:
        """True if the exit code is 0."""
        return self.exit_code == 0


@dataclass(frozen=True, slots=True)
class KillResult:
    """The result of killing a tree.

    Attributes:
        count: processes that were sent SIGKILL.
        left: pids that survived it: in uninterruptible sleep, or another user's.
    """

    count: int
    left: tuple[int, ...]


def spawn_request(number: int, spec: WorkerSpec) -> dict[str, Any]:
    """Encode one worker of a "spawn" request; `number` is its id in all later messages."""
    raised = resource.getrlimit(resource.RLIMIT_NOFILE) != OPEN_FILES
    rlimits = {"nofile": OPEN_FILES, **spec.rlimits} if raised else spec.rlimits
    return {
        "worker": number,
        "argv": [_wire(argument) for argument in spec.argv],
        "env": {_wire(name): _wire(value) for name, value in spec.env.items()},
        "cwd": _wire(spec.cwd),
        "stdin": _wire(spec.stdin),
        "stdout": _wire(spec.stdout),
        "stderr": _wire(spec.stderr),
        "cpus": sorted(spec.cpus) if spec.cpus is not None else None,
        "rlimits": {name: [soft, hard] for name, (soft, hard) in rlimits.items()},
        "call": spec.call,
    }


def _wire(text: str | Path | None) -> str | None:
    """Encode text so that its bytes stay exact even if the two processes have different locales."""
    return None if text is None else os.fsencode(text).decode("utf-8", "surrogateescape")


def read_exit(local_rank: int, event: Mapping[str, Any]) -> WorkerExit:
    """Decode an "exited" event."""
    code = os.waitstatus_to_exitcode(event["status"])
    return WorkerExit(
        local_rank=local_rank,
        pid=event["pid"],
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        at=event["at"],
        time=event["time"],
        user_seconds=event["user"],
        system_seconds=event["system"],
        max_rss=event["max_rss"],
        core_dumped=os.WCOREDUMP(event["status"]),
    )


def infer_exit(local_rank: int, pid: int, at: float, time: float) -> WorkerExit:
    """Return the exit of a worker whose spawner died: the kernel sent it SIGKILL, and its status is lost."""
    return WorkerExit(
        local_rank, pid, exit_code=None, signal=int(signal.SIGKILL), at=at, time=time, inferred=True
    )


def read_failure(spec: WorkerSpec, event: Mapping[str, Any]) -> SpawnError:
    """Turn a "failed" event into an error of one line: the failed step, the reason, and the remedy."""
    step, number = event["step"], event["errno"]
    reason = event["text"] or os.strerror(number)
    name = spec.argv[0] if spec.argv else ""
    advice = ""
    if step == "fork":
        problem = f"no process can be made ({reason})"
        advice = "; raise the limit of processes (ulimit -u) or of the cgroup (pids.max), or free memory"
    elif step == "cwd":
        problem = f"cannot enter its working directory {str(spec.cwd)!r} ({reason})"
    elif step in ("stdout", "stderr"):
        problem = f"cannot open its log file {str(getattr(spec, step))!r} ({reason})"
    elif step == "cpus":
        problem = f"cannot bind it to the processors {ranges(spec.cpus or ())} ({reason})"
        advice = "; are they online, and in the cpuset of the agent's cgroup?"
    elif step == "rlimits":
        problem = f"cannot set its limit {reason}"
        advice = "; only root may raise a hard limit: ask for less, or raise the agent's own (ulimit -H)"
    elif step == "call":
        problem = f"cannot load the function that it calls: {reason}"
    elif step == "program" and not spec.argv:
        problem = "no program was given"
    elif step == "program":
        problem, advice = _explain_exec(spec, name, number, reason)
    else:
        problem = f"{step}: {reason}"
    return SpawnError(f"cannot start worker {spec.local_rank}: {problem}{advice}", spec.local_rank)


def ranges(numbers: Iterable[int]) -> str:
    """Format a set of numbers as the kernel does: "0-3,8"."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def parse_ranges(text: str) -> frozenset[int]:
    """Parse a set of numbers as the kernel writes it: "0-3,8"."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            low, _, high = part.partition("-")
            found.update(range(int(low), int(high or low) + 1))
    return frozenset(found)


def _explain_exec(spec: WorkerSpec, name: str, number: int, reason: str) -> tuple[str, str]:
    if "/" not in name and number in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
        missing = "no program" if number != errno.EACCES else "no executable program"
        path = spec.env.get("PATH", os.defpath)
        return f"{missing} {name!r} in PATH={path}", "; check its name or give its whole path"
    if number in (errno.ENOENT, errno.ENOTDIR):
        if (spec.cwd or Path()).joinpath(name).exists():
            return f"{name!r} names an interpreter that does not exist", "; check its first line (#!)"
        return f"there is no program {name!r}", "; check the path"
    if number == errno.EACCES:
        return f"{name!r} is not executable", "; chmod +x it, or run it through its interpreter"
    if number == errno.ENOEXEC:
        return f"this machine cannot run {name!r}", "; does a script lack its #! line?"
    if number == errno.E2BIG:
        return f"the arguments and environment of {name!r} are larger than the kernel allows", ""
    return f"cannot run {name!r} ({reason})", ""
