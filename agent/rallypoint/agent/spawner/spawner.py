"""The spawner: the small process that forks, watches and kills the workers of one host.

The agent itself never forks: it has gRPC loaded, and a process with gRPC cannot fork safely. It runs this file as
a separate program, `python -I -S spawner.py <fd> <fd>`, connected by one stream socket. For this reason all of it
is one file that imports only a small part of the standard library.

It consists of two processes. The program forks once: the parent stays as the *guard*, the child becomes the
*spawner*. Both are child subreapers (prctl(2), PR_SET_CHILD_SUBREAPER), and so is the agent:

    agent ── guard ── spawner ── worker ── processes that the worker starts
                         └────── orphans: processes that a worker started and left behind

If any of the three dies, one of the others kills all processes below. A descendant can't leave the tree: a
process that daemonises loses its parent and is handed to the nearest subreaper. So "every descendant is gone" has
an exact meaning, waitpid() failing with ECHILD, and needs neither cgroups nor privileges. Any two of the three may
be SIGKILLed in the same instant and still nothing survives. If the agent is dead, the process that kills the tree
also removes the temporary folders that the agent has named on the second descriptor, a pipe.

A worker is a program, or a fork of the spawner that calls a function; `main` gets the function from the process
that has it (see rallypoint.worker.call).

Frames are a four-byte big-endian length and a JSON object, both ways.

    {"op": "spawn", "workers": [{"worker", "argv", "env", "cwd", "stdin", "stdout", "stderr", "cpus", "rlimits",
         "call"}]}
        reply for each worker: "started" {worker, pid, at} or "failed" {worker, step, errno, text}
    {"op": "signal", "workers": [ids], "signal": n, "group": bool}
        to the process groups (or only the processes) of living workers; delayed until exec has happened
    {"op": "kill", "request": n, "worker": id, "timeout": s}     one worker's whole tree
    {"op": "sweep", "request": n, "timeout": s}                  everything
        reply: "killed" {request, count, left}: left holds the pids that survived SIGKILL for that long

Sent without a request: "ready" {pid} once; "exited" {worker, pid, status, at, time, user, system, max_rss} as soon
as a worker was reaped; "cleared" {worker} when its process group has no member left either. `at` is in seconds of
CLOCK_MONOTONIC, one clock for the whole host; `time` in Unix seconds; `max_rss` in bytes. A worker's
"started" precedes its "exited", and all "exited" of a sweep precede its "killed".
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

WAIT_ALL = 0x40000000  # __WALL: reap clone() children too, else ECHILD would not mean "no child left"
MAX_FRAME = 64 << 20
"""Bytes. The environments of all workers of a host need a small part of it; a longer frame is a garbled stream."""

LAST_SWEEP = 10.0
"""Seconds that the guard and the spawner continue to kill once the agent is gone. Processes die in milliseconds; one
that takes longer is blocked in the kernel (dead NFS, a hung driver), and waiting does not help."""

SPAWN_MARK = "RALLYPOINT_SPAWN_ID"
"""Set in each worker's environment: identifies the worker of a process that has lost its parent and its session."""


class ProcessStat(NamedTuple):
    """The fields of /proc/<pid>/stat that give the position of a process in the tree."""

    pid: int
    state: str
    parent: int
    group: int
    session: int

    @property
    def dead(self) -> bool:
        """True for a zombie: only its entry in the process table is left."""
        return self.state in "ZX"


def prctl(option: int, argument: int | bytes) -> None:
    """Call prctl(2). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    value = ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    if libc.prctl(ctypes.c_int(option), value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def become_subreaper() -> None:
    """Make orphaned descendants of this process its children, instead of init's. Raises OSError."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def read_process(pid: int) -> ProcessStat | None:
    """Read /proc/<pid>/stat; None if there is no such process."""
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        line = os.read(fd, 1024)
    except OSError:
        return None
    finally:
        os.close(fd)
    # The command name, in parentheses, may itself hold spaces and parentheses: count from its end.
    fields = line[line.rfind(b")") + 2 :].split(None, 4)
    return ProcessStat(pid, fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]))


def descendants(root: int, keep: Callable[[ProcessStat], bool] | None = None) -> list[ProcessStat]:
    """List the descendants of a process, parents before children, zombies included.

    A process that forks and exits all the time may be missed: it is gone before it is read, and its child did
    not exist yet when the list was made. `watch_forks` shows if that may have happened.

    Args:
        root: pid of the ancestor; not itself in the list.
        keep: a process for which this is true is left out, with everything below it.
    """
    # One pass over /proc rather than /proc/<pid>/task/<tid>/children: not every kernel has those files, and a
    # trainer has hundreds of threads, each with a list of its own. Youngest first: they exit soonest.
    children: dict[int, list[ProcessStat]] = {}
    for pid in sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True):
        if (process := read_process(pid)) is not None:
            children.setdefault(process.parent, []).append(process)
    found: list[ProcessStat] = []
    frontier = [root]
    while frontier:
        for process in children.get(frontier.pop(), ()):
            if keep is None or not keep(process):
                found.append(process)
                frontier.append(process.pid)
    return found


def watch_forks() -> bytes:
    """Return the last pid that the kernel assigned (/proc/loadavg): if unchanged between two calls, no fork."""
    with open("/proc/loadavg", "rb") as file:
        return file.read().rsplit(None, 1)[-1]


def kill_group(targets: Iterable[ProcessStat], family: set[int]) -> dict[int, int]:
    """Send SIGKILL to processes and to their process groups.

    Groups first, because the kernel excludes a signal to a group and a fork from each other: a process that forks
    faster than this one can list processes still can't leave its group that way. A group's number stays in use
    while it has a member, and all members descend from the process that made it. Two kinds of groups are spared:
    those of this process's own session (a fork that has not become a worker yet is in one), and a group whose
    leader is not in the family, because the number may have been reused.

    Then each process, in case its group was spared. The pidfd pins one process; if the stat line read *after* it
    was opened shows a parent in the family, the process is in the tree: if the pid had been reused in between, the
    pidfd would refer to a dead process and the signal would have no effect.

    Args:
        family: pids of the tree's processes, its root included: the parents that prove kinship.

    Returns:
        By pid, the pidfd of each killed process, readable once it is dead, for the caller to close. At most
        _PIDFDS_HELD have one: a fork bomb must not use up this process's descriptors. The others have -1.
    """
    targets = list(targets)
    session = os.getsid(0)
    for group in {target.group for target in targets if target.session != session}:
        # stat may show -1 for a process that is exiting; killpg(-1) would signal all processes.
        if group <= 1:
            continue
        leader = read_process(group)
        if leader is None or leader.parent in family:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
    killed: dict[int, int] = {}
    for target in targets:
        try:
            pidfd = os.pidfd_open(target.pid)
        except OSError:
            continue
        now = read_process(target.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if now is not None and now.parent in family:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                killed[target.pid] = pidfd if len(killed) < _PIDFDS_HELD else -1
        if killed.get(target.pid, -1) < 0:
            os.close(pidfd)
    return killed


_PIDFDS_HELD = 64


def kill_descendants(timeout: float, keep: Callable[[ProcessStat], bool] | None = None) -> list[int]:
    """Kill every descendant of the calling process, a subreaper, and wait until all are dead.

    Processes that appear meanwhile are killed too. Without `keep` the end is exact: all children are reaped, and
    no child is left. With `keep`, only dead children that are not to be kept are reaped, and the end is reached
    when a scan finds no process and no fork happened during it, or when several scans in a row find none.

    Args:
        timeout: seconds after which to give up on processes that SIGKILL does not end (uninterruptible sleep).
        keep: a process for which this is true is spared, with everything below it.

    Returns:
        The pids of the processes that are left; empty when all are gone.
    """
    me = os.getpid()
    deadline = time.monotonic() + timeout
    empty_scans = 0
    while True:
        before = watch_forks()
        tree = descendants(me, keep)
        undisturbed = watch_forks() == before
        for process in tree:
            if process.dead and process.parent == me:
                _reap(process.pid)
        # A dead process below a living one waits for its parent, which is about to die too.
        living = [process for process in tree if not process.dead]
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return [process.pid for process in living]
        if not living:
            empty_scans += 1
            # A dead process below a dead parent has become this process's child since the scan: reap again.
            if _reap(-1) if keep is None else not tree and (undisturbed or empty_scans > _MAX_EMPTY_SCANS):
                return []
            select.poll().poll(2)  # a process was missed by the scan, or is dead but held by a debugger
            continue
        empty_scans = 0
        killed = kill_group(living, {me, *(process.pid for process in tree)})
        poll = select.poll()
        for pidfd in killed.values():
            if pidfd >= 0:
                poll.register(pidfd, select.POLLIN)
        # If none was killed: the process has replaced itself by a fork, or belongs to another user.
        poll.poll(min(remaining, 1.0 if killed else 0.02) * 1000)
        for pidfd in killed.values():
            if pidfd >= 0:
                os.close(pidfd)


_MAX_EMPTY_SCANS = 10  # on a host where processes fork all the time, a fork happens during every scan


def _reap(pid: int) -> bool:
    """Reap one child if it is dead, or with -1 all dead children; true if no such child exists."""
    try:
        while os.waitpid(pid, os.WNOHANG | WAIT_ALL)[0] != 0:
            pass
    except ChildProcessError:
        return True
    return False


def _wake_on_signals(*numbers: int) -> int:
    """Turn signals into bytes on a pipe, so that one poll() waits for everything; return its read end."""
    read_end, write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for number in numbers:
        signal.signal(number, lambda _signal, _frame: None)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    return read_end


def _empty(pipe: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(pipe, 4096):
            pass


class _Child:
    """A worker from fork until its process group is empty."""

    __slots__ = ("exec_pipe", "failed", "held", "number", "pid", "reaped")

    def __init__(self, number: int, pid: int, exec_pipe: int) -> None:
        self.number = number
        self.pid = pid
        self.exec_pipe: int | None = exec_pipe  # open until exec succeeded or failed
        self.held: list[tuple[int, bool]] = []  # signals requested before exec
        self.failed = False
        self.reaped = False


class _KillRequest:
    """A request to kill until no process is left, of one worker or of all."""

    __slots__ = ("deadline", "empty_scans", "killed", "request", "worker")

    def __init__(self, request: int, worker: int | None, deadline: float) -> None:
        self.request = request
        self.worker = worker
        self.deadline = deadline
        self.killed: set[int] = set()
        self.empty_scans = 0


class _SpawnerLoop:
    """The event loop of the spawner process."""

    def __init__(self, agent: int, guard: int, call: Call | str | None, private: Iterable[int]) -> None:
        """Set up.

        Args:
            agent: descriptor of the socket to the agent.
            call: the function for workers that are calls; the reason, as text, if it could not be loaded.
            private: descriptors that a worker that is a call must not keep. (Exec closes them by itself.)
        """
        self._agent = agent
        self._guard = guard
        self._call = call
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._workers: dict[int, _Child] = {}
        self._by_pid: dict[int, _Child] = {}
        self._by_pipe: dict[int, _Child] = {}
        self._kills: list[_KillRequest] = []
        self._scan_due = False
        self._scan_not_before = 0.0
        self._signals = _wake_on_signals(signal.SIGCHLD, signal.SIGUSR1)
        self._private = (agent, self._signals, *private)
        self._poll = select.poll()
        self._poll.register(self._signals, select.POLLIN)
        self._poll.register(self._agent, select.POLLIN)

    def run(self) -> None:
        """Serve requests of the agent until it, or the guard, is gone."""
        # The parent-death signal wakes poll() when the guard dies; the loop compares getppid() after it is armed.
        prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
        self._send(event="ready", pid=os.getpid())
        while os.getppid() == self._guard:
            self._flush()
            ready = self._poll.poll(self._poll_timeout())
            # Requests before deaths: "spawn, sweep" sent in one go must find the worker.
            for fd, _events in ready:
                if fd == self._signals:
                    _empty(fd)
                elif fd == self._agent:
                    if not self._receive():
                        return
                elif fd in self._by_pipe:
                    self._read_exec_result(self._by_pipe[fd])
            childless = self._reap()
            self._advance_kills(childless)

    # -- requests and events

    def _receive(self) -> bool:
        """Read and carry out requests of the agent; false when the agent is gone."""
        try:
            while data := os.read(self._agent, 1 << 16):
                self._inbox += data
                if len(data) < 1 << 16:
                    break
            if not data:
                return False
        except BlockingIOError:
            pass
        except OSError:
            return False
        while len(self._inbox) >= 4:
            length = int.from_bytes(self._inbox[:4], "big")
            if length > MAX_FRAME:
                sys.stderr.write(f"rallypoint spawner: a frame of {length} bytes is no request; giving up\n")
                return False
            if len(self._inbox) < 4 + length:
                break
            request = json.loads(bytes(self._inbox[4 : 4 + length]))
            del self._inbox[: 4 + length]
            self._handle(request)
        return True

    def _send(self, **event: Any) -> None:
        body = json.dumps(event).encode()
        self._outbox += len(body).to_bytes(4, "big") + body

    def _flush(self) -> None:
        try:
            while self._outbox:
                del self._outbox[: os.write(self._agent, self._outbox)]
        except BlockingIOError:
            self._poll.modify(self._agent, select.POLLIN | select.POLLOUT)
        except OSError:
            self._outbox.clear()  # the agent is gone: the next read notices it
        else:
            self._poll.modify(self._agent, select.POLLIN)

    def _handle(self, request: dict[str, Any]) -> None:
        operation = request["op"]
        if operation == "spawn":
            for spec in request["workers"]:
                self._spawn(spec)
        elif operation == "signal":
            for number in request["workers"]:
                self._signal(number, request["signal"], request["group"])
        else:
            worker = request["worker"] if operation == "kill" else None
            self._kills.append(
                _KillRequest(request["request"], worker, time.monotonic() + request["timeout"])
            )
            self._scan_due = True
            self._scan_not_before = 0.0

    # -- starting

    def _spawn(self, spec: dict[str, Any]) -> None:
        number: int = spec["worker"]
        me = os.getpid()
        read_end = write_end = -1
        try:
            read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            pid = os.fork()
        except OSError as error:
            if read_end >= 0:
                os.close(read_end)
                os.close(write_end)
            self._send(event="failed", worker=number, step="fork", errno=error.errno, text="")
            return
        if pid == 0:
            _become_worker(spec, write_end, me, self._call, (*self._private, *self._by_pipe, read_end))
        os.close(write_end)
        worker = _Child(number, pid, read_end)
        self._workers[number] = self._by_pid[pid] = self._by_pipe[read_end] = worker
        self._poll.register(read_end, select.POLLIN)

    def _read_exec_result(self, worker: _Child) -> None:
        """Read the result of exec: end of file for success (the pipe closes on exec), else the error."""
        pipe = worker.exec_pipe
        if pipe is None:
            return
        try:
            reason = os.read(pipe, 4096)
        except BlockingIOError:
            return
        self._poll.unregister(pipe)
        os.close(pipe)
        del self._by_pipe[pipe]
        worker.exec_pipe = None
        if reason:
            worker.failed = True
            self._send(event="failed", worker=worker.number, **json.loads(reason))
            return
        self._send(event="started", worker=worker.number, pid=worker.pid, at=time.monotonic())
        for number, group in worker.held:
            self._deliver(worker, number, group)

    # -- signals

    def _signal(self, number: int, signal_number: int, group: bool) -> None:
        worker = self._workers.get(number)
        if worker is None or worker.reaped or worker.failed:
            return
        if worker.exec_pipe is None:
            self._deliver(worker, signal_number, group)
        else:
            # Before exec it has no session of its own yet, and ignores the signals that the spawner ignores.
            worker.held.append((signal_number, group))

    def _deliver(self, worker: _Child, number: int, group: bool) -> None:
        # It is not reaped, so its pid is not reused: neither call can signal another process.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if group:
                os.killpg(worker.pid, number)
            else:
                os.kill(worker.pid, number)

    # -- deaths

    def _reap(self) -> bool:
        """Reap all dead children, workers and adopted orphans; true when no child is left at all."""
        childless = False
        while True:
            # Taken before: as soon as it is reaped, the agent may see that a worker is gone, and stop the others.
            at = time.monotonic()
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG | WAIT_ALL)
            except ChildProcessError:
                childless = True
                break
            if pid == 0:
                break
            self._scan_due = True
            worker = self._by_pid.pop(pid, None)
            if worker is None:
                continue
            worker.reaped = True
            self._read_exec_result(worker)
            if worker.failed:
                del self._workers[worker.number]
                continue
            self._send(
                event="exited",
                worker=worker.number,
                pid=pid,
                status=status,
                at=at,
                time=time.time(),
                user=usage.ru_utime,
                system=usage.ru_stime,
                max_rss=usage.ru_maxrss * 1024,
            )
        for worker in [worker for worker in self._workers.values() if worker.reaped]:
            if childless or _group_is_empty(worker.pid):
                del self._workers[worker.number]
                self._send(event="cleared", worker=worker.number)
        return childless

    def _advance_kills(self, childless: bool) -> None:
        """Kill the processes still left of each kill request, and report the requests that are done."""
        if not self._kills:
            return
        now = time.monotonic()
        overdue = any(now >= kill.deadline for kill in self._kills)
        if not (childless or overdue or (self._scan_due and now >= self._scan_not_before)):
            return
        self._scan_due = False
        before = watch_forks()
        tree = [] if childless else descendants(os.getpid())
        undisturbed = watch_forks() == before
        family = {os.getpid(), *(process.pid for process in tree)}
        adopted = [each for each in tree if each.parent == os.getpid() and each.pid not in self._by_pid]
        environments = {each.pid: _environment(each.pid) for each in adopted if not each.dead}
        # In the middle of exec a process has none for a moment, and so no mark by which it is known: scan again.
        undisturbed = undisturbed and [b""] not in environments.values()
        for kill in list(self._kills):
            tree_of = self._tree_of(kill.worker, tree, environments)
            targets = [process for process in tree_of if not process.dead]
            # A process that exits has no environment any more by which it is known, and may hold its memory for long.
            dying = [process for process in tree if process.pid in kill.killed and not process.dead]
            kill.empty_scans = 0 if targets or dying else kill.empty_scans + 1
            # A sweep is done when waitpid() returns ECHILD; for one worker's tree there is only the scan.
            found_none = kill.empty_scans > 0 and (undisturbed or kill.empty_scans > _MAX_EMPTY_SCANS)
            if now >= kill.deadline or (childless if kill.worker is None else found_none):
                self._kills.remove(kill)
                left = sorted({process.pid for process in (*targets, *dying)})
                self._send(event="killed", request=kill.request, count=len(kill.killed), left=left)
                continue
            killed = kill_group(targets, family)
            kill.killed.update(killed)
            for pidfd in killed.values():
                if pidfd >= 0:
                    os.close(pidfd)
            # A target may have replaced itself by a fork; and if none was killed, no death triggers the next scan.
            self._scan_due = self._scan_due or len(killed) < max(1, len(targets))
        # A scan costs some 10 µs for each process of the host, not only ours: scan at most half of the time.
        finished = time.monotonic()
        self._scan_not_before = finished + (finished - now)

    def _tree_of(
        self, number: int | None, tree: list[ProcessStat], orphans: Mapping[int, list[bytes]]
    ) -> list[ProcessStat]:
        """Select one worker's processes: itself, its session, orphans with its mark, and all their children."""
        if number is None:
            return tree
        worker = self._workers.get(number)
        pid = worker.pid if worker is not None else None
        mark = f"{SPAWN_MARK}={_mark(os.getpid(), number)}".encode()
        picked: dict[int, ProcessStat] = {}
        for process in tree:  # parents come before children
            kin = pid in (process.pid, process.session) or process.parent in picked
            if kin or mark in orphans.get(process.pid, ()):
                picked[process.pid] = process
        return list(picked.values())

    def _poll_timeout(self) -> float | None:
        """Milliseconds that poll() may wait; None: until an event."""
        times = [kill.deadline for kill in self._kills]
        if self._kills and self._scan_due:
            times.append(self._scan_not_before)
        if not times:
            return None
        # poll() rounds down; one millisecond more, so that it never returns too early.
        return max(0.0, min(times) - time.monotonic()) * 1000 + 1


def _mark(spawner: int, number: int) -> str:
    return f"{spawner}.{number}"


def _environment(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read(1 << 20).split(b"\0")
    except OSError:
        return []


def _group_is_empty(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _become_worker(
    spec: dict[str, Any], report: int, spawner: int, call: Call | str | None, private: Iterable[int]
) -> NoReturn:
    """Turn a fresh fork into the worker; on an error, report the failed step through the pipe and exit."""
    step = "session"
    try:
        wakeup = signal.set_wakeup_fd(-1)
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != spawner:  # the spawner died before the signal was armed
            os._exit(127)
        for number in _CATCHABLE:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        environment = {_raw(name): _raw(value) for name, value in spec["env"].items()}
        environment[SPAWN_MARK.encode()] = _mark(spawner, spec["worker"]).encode()
        step = "cpus"
        if spec["cpus"] is not None:
            os.sched_setaffinity(0, spec["cpus"])
        step = "cwd"
        if spec["cwd"] is not None:
            os.chdir(_raw(spec["cwd"]))
        step = "stdin"
        if spec["stdin"] is not None:
            # A terminal becomes the controlling terminal: this process is the leader of a session that has none.
            _open_as(0, _raw(spec["stdin"]), os.O_RDWR)
        for step, target in (("stdout", 1), ("stderr", 2)):
            if spec[step] is not None:
                _open_as(target, _raw(spec[step]), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        step = "rlimits"
        _set_limits(spec["rlimits"])  # last: with few descriptors or little memory the steps above would fail
        if spec["call"]:
            step = "call"
            if call is None or isinstance(call, str):
                raise ValueError(call or "this spawner starts programs only")
            _take_environment(environment)
            _call_and_exit(call, (*private, wakeup, report))
        step = "program"
        argv = [_raw(argument) for argument in spec["argv"]]
        os.execvpe(argv[0], argv, environment)  # noqa: S606
    except OSError as error:
        os.write(report, json.dumps({"step": step, "errno": error.errno, "text": ""}).encode())
    except Exception as error:  # a NUL byte in an argument, an empty argv
        os.write(report, json.dumps({"step": step, "errno": 0, "text": str(error)[:1000]}).encode())
    finally:
        os._exit(127)


def _open_as(target: int, path: bytes, flags: int) -> None:
    """Open a file as the given descriptor."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    os.dup2(fd, target)
    if fd != target:
        os.close(fd)


def _set_limits(limits: dict[str, list[int]]) -> None:
    """Set resource limits. Raises ValueError: not permitted, or no such limit."""
    if not limits:
        return
    import resource  # noqa: PLC0415 (a shared library that the spawner itself does not need)

    for name, (soft, hard) in limits.items():
        number = getattr(resource, f"RLIMIT_{name.upper()}", None)
        if number is None:
            raise ValueError(f"{name}: this system has no such limit")
        try:
            resource.setrlimit(number, (soft, hard))
        except (OSError, ValueError) as error:
            most = resource.getrlimit(number)[1]
            raise ValueError(f"{name} to {soft}:{hard} ({error}; its hard limit is {most})") from None


def _take_environment(environment: dict[bytes, bytes]) -> None:
    """Give a fork the environment that exec would have given it, as other processes see it too."""
    os.environb.clear()
    os.environb.update(environment)
    # /proc/<pid>/environ shows the memory where exec put the environment, also for the worker's own forks: without
    # the mark there, its daemons could not be distinguished from another worker's.
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end of proc(5)
    mark = SPAWN_MARK.encode() + b"=" + environment[SPAWN_MARK.encode()] + b"\0"
    if end - start >= len(mark):
        ctypes.memmove(start, mark, len(mark))


def _call_and_exit(call: Call, private: Iterable[int]) -> NoReturn:
    """Call the function and exit with the exit code that it returns."""
    status = 1
    try:
        # Among them the pipe on which the spawner waits for exec: closing it reports success.
        for fd in private:
            os.close(fd)
        status = call()
    finally:
        os._exit(status)


_CATCHABLE = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


def _raw(text: str) -> bytes:
    """Return the exact bytes that the agent encoded; independent of the locale of both processes."""
    return text.encode("utf-8", "surrogateescape")


def _guard_agent(spawner: int, agent: int) -> bool:
    """Wait for the end of the spawner or the agent, then kill everything below; true when all are dead."""
    signals = _wake_on_signals(signal.SIGCHLD)
    poll = select.poll()
    poll.register(signals, select.POLLIN)
    poll.register(agent, select.POLLRDHUP)
    while os.waitpid(spawner, os.WNOHANG)[0] == 0:
        if any(fd == agent for fd, _events in poll.poll()):
            break
        _empty(signals)
    os.close(agent)  # the last copy if the spawner is dead: a living agent sees end of file now
    # A living spawner is killed with the rest: it might be stopped, or stuck.
    return not kill_descendants(LAST_SWEEP)


def _guard_is_dead(guard: int) -> bool:
    """True if the guard is dead. If not, the guard kills the spawner and then removes the folders itself."""
    try:
        fd = os.pidfd_open(guard)
    except ProcessLookupError:
        return True
    try:
        if os.getppid() != guard:
            return True
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        # A process that is exiting still looks alive, so wait. A living guard does not exit by itself.
        return bool(poll.poll(_GUARD_DEATH_TIMEOUT * 1000))
    finally:
        os.close(fd)


_GUARD_DEATH_TIMEOUT = 1.0  # seconds for a guard to be dead, or to kill the spawner


def _remove_folders(folders: int) -> None:
    """Remove the temporary folders of a dead agent; a living agent reports that it removes them itself.

    Args:
        folders: pipe from the agent, with the path of each folder and a NUL byte; an empty path: the agent is alive.
    """
    poll = select.poll()
    poll.register(folders, select.POLLIN)
    content = b""
    # An agent that is exiting looks alive: only the pipe shows that it is dead.
    while poll.poll(_AGENT_REPORT_TIMEOUT * 1000):
        piece = os.read(folders, 1 << 16)
        content += piece
        if content[:1] == b"\0" or content.endswith(b"\0\0"):
            return
        if not piece:
            break
    else:
        return
    import shutil  # noqa: PLC0415 (at the end, and only then)

    for folder in content.split(b"\0")[:-1]:
        shutil.rmtree(folder, ignore_errors=True)


_AGENT_REPORT_TIMEOUT = 3.0  # seconds to die or to report that it is alive; a suspended agent does neither


def _terminal_settings() -> tuple[int, list[Any]] | None:
    """Return the terminal among the standard streams, and its settings; None: there is none."""
    for fd in range(3):
        if os.isatty(fd):
            import termios  # noqa: PLC0415 (not for a job without a terminal)

            return fd, termios.tcgetattr(fd)
    return None


def _restore_terminal(terminal: tuple[int, list[Any]] | None) -> None:
    """Restore the settings of the terminal if the agent died while it had the terminal deliver single keys.

    A shell that restores them itself has other settings by now: it handles Ctrl-C, or reads whole lines.
    """
    if terminal is None:
        return
    import termios  # noqa: PLC0415

    fd, before = terminal
    with contextlib.suppress(termios.error):  # the terminal is gone
        if not termios.tcgetattr(fd)[3] & (termios.ICANON | termios.ECHO | termios.ISIG):
            termios.tcsetattr(fd, termios.TCSANOW, before)


def _leave_terminal_signals_to_the_agent() -> None:
    """Ignore Ctrl-C and the scheduler's SIGTERM, which may reach all processes at once: the agent handles them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


Call = Callable[[], int]
"""The function of a worker that is a call; runs in the worker's process, returns its exit code, raises nothing."""


def main(agent: int, folders: int, load: Callable[[], Call] | None = None) -> None:
    """Become guard and spawner. The guard exits with 0 if no process is left alive.

    Args:
        agent: descriptor of the socket to the agent, which is the parent of this process.
        folders: descriptor of the pipe on which the agent names its temporary folders.
        load: called in the spawner before anything else; returns the function for workers that are calls. If it
            raises, every start of such a worker fails with that error.
    """
    for fd in (agent, folders):
        os.set_inheritable(fd, False)
    os.set_blocking(agent, False)
    _leave_terminal_signals_to_the_agent()
    become_subreaper()
    guard = os.getpid()
    terminal = _terminal_settings()
    child = os.fork()
    if child != 0:
        prctl(PR_SET_NAME, b"rallypoint-grd")
        all_dead = _guard_agent(child, agent)
        _restore_terminal(terminal)
        _remove_folders(folders)
        sys.exit(0 if all_dead else 1)
    become_subreaper()
    prctl(PR_SET_NAME, b"rallypoint-spwn")
    try:
        call = _load(load, guard) if load is not None else None
        _SpawnerLoop(agent, guard, call, (folders,)).run()
    finally:
        kill_descendants(LAST_SWEEP)
        if _guard_is_dead(guard):
            _remove_folders(folders)


def _load(load: Callable[[], Call], guard: int) -> Call | str:
    """Load the function that workers call, which may run a user's imports; on an error return it as text."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the loop that handles the guard's death does not run yet
    if os.getppid() != guard:
        sys.exit(1)
    try:
        return load()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        _leave_terminal_signals_to_the_agent()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
