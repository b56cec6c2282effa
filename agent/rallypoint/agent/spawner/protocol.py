"""What the agent and the spawner tell one another about workers, as values.

The frames themselves are described in rallypoint.agent.spawner.spawner.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class SpawnError(Exception):
    """A worker could not be started, or there is no spawner to start it.

    Attributes:
        local_rank: of the worker; None when it is the spawner that failed.
    """

    def __init__(self, message: str, local_rank: int | None = None) -> None:
        super().__init__(message)
        self.local_rank = local_rank


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What to start.

    Attributes:
        local_rank: its place among the workers of this host.
        argv: program and arguments; a program without a slash is looked up on `env`'s PATH.
        env: the whole environment, nothing is inherited. The spawner adds RALLYPOINT_SPAWN_ID.
        cwd: working directory; None for the agent's.
        stdout: file to append standard output to; None for the agent's standard output.
        stderr: the same for standard error.
        cpus: the processors that it may run on; None for the agent's.
        rlimits: limits of its resources that differ from the agent's, soft and hard, by name as in "nofile"; -1 is
            no limit.
        call: it is a fork of the spawner which calls what that has loaded; `argv` only says in messages what that
            is. See `Spawner.fork` and `Spawner.start_forkserver`.
    """

    local_rank: int
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path | None = None
    stdout: Path | None = None
    stderr: Path | None = None
    cpus: frozenset[int] | None = None
    rlimits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    call: bool = False


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How a worker ended. Each worker that was started has exactly one.

    Attributes:
        local_rank: its place among the workers of this host.
        pid: its process id while it lived.
        exit_code: what it returned; None if a signal ended it.
        signal: number of the signal that ended it; None if it returned.
        at: when, in monotonic seconds; comparable between all processes of this host.
        time: when, in Unix seconds.
        user_seconds: processor time spent in user mode, waited-for children included.
        system_seconds: processor time spent in the kernel, likewise.
        max_rss: bytes of memory at its peak.
        core_dumped: whether the kernel wrote a core dump of it, or piped one into a program.
        during_stop: whether its group was already being stopped: then it is no failure of its own.
        inferred: the spawner died first, and took the worker along; nobody saw its status. `signal` is SIGKILL
            and the figures are zero.
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
        """Whether the worker returned 0."""
        return self.exit_code == 0


@dataclass(frozen=True, slots=True)
class KillResult:
    """What came of killing a tree.

    Attributes:
        count: processes that were sent SIGKILL.
        left: pids that outlived it: uninterruptible sleep, or another user's.
    """

    count: int
    left: tuple[int, ...]


def spawn_request(number: int, spec: WorkerSpec) -> dict[str, Any]:
    """Puts one worker of a "spawn" request into the spawner's terms; `number` is its name from now on."""
    return {
        "worker": number,
        "argv": [_wire(argument) for argument in spec.argv],
        "env": {_wire(name): _wire(value) for name, value in spec.env.items()},
        "cwd": _wire(spec.cwd),
        "stdout": _wire(spec.stdout),
        "stderr": _wire(spec.stderr),
        "cpus": sorted(spec.cpus) if spec.cpus is not None else None,
        "rlimits": {name: [soft, hard] for name, (soft, hard) in spec.rlimits.items()},
        "call": spec.call,
    }


def _wire(text: str | Path | None) -> str | None:
    """Keeps the bytes exact although the two processes may disagree about the locale."""
    return None if text is None else os.fsencode(text).decode("utf-8", "surrogateescape")


def read_exit(local_rank: int, event: Mapping[str, Any]) -> WorkerExit:
    """Reads an "exited" event."""
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
    """The end of a worker whose spawner died: the kernel sent it SIGKILL, and its status is lost."""
    return WorkerExit(
        local_rank, pid, exit_code=None, signal=int(signal.SIGKILL), at=at, time=time, inferred=True
    )


def read_failure(spec: WorkerSpec, event: Mapping[str, Any]) -> SpawnError:
    """Makes one line out of a "failed" event: what failed, where, and what to do about it."""
    step, number = event["step"], event["errno"]
    reason = event["text"] or os.strerror(number)
    name = spec.argv[0] if spec.argv else ""
    advice = ""
    if step == "fork":
        what = f"no process can be made ({reason})"
        advice = "; raise the limit of processes (ulimit -u) or of the cgroup (pids.max), or free memory"
    elif step == "cwd":
        what = f"cannot enter its working directory {str(spec.cwd)!r} ({reason})"
    elif step in ("stdout", "stderr"):
        what = f"cannot open its log file {str(getattr(spec, step))!r} ({reason})"
    elif step == "cpus":
        what = f"cannot bind it to the processors {ranges(spec.cpus or ())} ({reason})"
        advice = "; are they online, and in the cpuset of the agent's cgroup?"
    elif step == "rlimits":
        what = f"cannot set its limit {reason}"
        advice = "; only root may raise a hard limit: ask for less, or raise the agent's own (ulimit -H)"
    elif step == "call":
        what = f"cannot load what it is to call: {reason}"
    elif step == "program" and not spec.argv:
        what = "no program was given"
    elif step == "program":
        what, advice = _explain_exec(spec, name, number, reason)
    else:
        what = f"{step}: {reason}"
    return SpawnError(f"cannot start worker {spec.local_rank}: {what}{advice}", spec.local_rank)


def ranges(numbers: Iterable[int]) -> str:
    """Writes a set of numbers as the kernel does: "0-3,8"."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def _explain_exec(spec: WorkerSpec, name: str, number: int, reason: str) -> tuple[str, str]:
    if "/" not in name and number in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
        what = "no program" if number != errno.EACCES else "no program that may be executed named"
        path = spec.env.get("PATH", os.defpath)
        return f"{what} {name!r} in PATH={path}", "; check its name or give its whole path"
    if number in (errno.ENOENT, errno.ENOTDIR):
        if (spec.cwd or Path.cwd()).joinpath(name).exists():
            return f"{name!r} names an interpreter that does not exist", "; check its first line (#!)"
        return f"there is no program {name!r}", "; check the path"
    if number == errno.EACCES:
        return f"{name!r} is not executable", "; chmod +x it, or run it through its interpreter"
    if number == errno.ENOEXEC:
        return f"{name!r} is no program this machine can run", "; does a script lack its #! line?"
    if number == errno.E2BIG:
        return f"the arguments and environment of {name!r} are larger than the kernel takes", ""
    return f"cannot run {name!r} ({reason})", ""
