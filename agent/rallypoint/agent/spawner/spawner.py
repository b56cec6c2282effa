"""The spawner: the small process that forks, watches and buries one host's workers.

The agent itself never forks: it has gRPC loaded, and gRPC and fork don't mix. It runs this file as a program
of its own, `python -I -S spawner.py <fd> <fd>`, and talks to it over one stream socket. That is why all of it is
in one file that imports the standard library only, and little of that.

Two processes come of it. The program forks once: the parent stays as the *guard*, the child becomes the
*spawner*. Both are child subreapers (prctl(2), PR_SET_CHILD_SUBREAPER), and so is the agent:

    agent ── guard ── spawner ── worker ── whatever the worker starts
                         └────── whatever a worker started and left behind

Whoever of the three dies, one of the others kills what is below. A descendant can't leave the tree: a process
that daemonises loses its parent and is handed to the nearest subreaper. So "every descendant is gone" has an
exact meaning, waitpid() saying ECHILD, and needs neither cgroups nor privileges. Any two of the three may be
SIGKILLed in the same instant and still nothing survives. Should the agent be among the dead, whoever buries the
tree also removes the temporary folders that the agent has named on the second descriptor, a pipe.

A worker is a program, or a fork of the spawner that calls a function: `main` is told which by whoever runs it
inside a process that has the function (see rallypoint.worker.call).

Frames are a four-byte big-endian length and a JSON object, both ways.

    {"op": "spawn", "workers": [{"worker", "argv", "env", "cwd", "stdout", "stderr", "cpus", "rlimits", "call"}]}
        answered for each worker by "started" {worker, pid, at} or "failed" {worker, step, errno, text}
    {"op": "signal", "workers": [ids], "signal": n, "group": bool}
        to the process groups (or the processes alone) of those that live; held back until exec has happened
    {"op": "kill", "request": n, "worker": id, "timeout": s}     one worker's whole tree
    {"op": "sweep", "request": n, "timeout": s}                  everything
        answered by "killed" {request, count, left}: left holds the pids that outlived SIGKILL for that long

Unasked: "ready" {pid} once; "exited" {worker, pid, status, at, time, user, system, max_rss} as soon as a
worker was reaped; "cleared" {worker} when its process group has no member left either. `at` is in seconds of
CLOCK_MONOTONIC, one clock for the whole host; `time` in Unix seconds; `max_rss` in bytes. A worker's
"started" precedes its "exited", and all of a sweep's "exited" precede its "killed".
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
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

WAIT_ALL = 0x40000000  # __WALL: reap clone() children too, else ECHILD would not mean "nobody left"
MAX_FRAME = 64 << 20
"""Bytes. Environments of all workers of a host fit many times over; more is a garbled stream."""

LAST_SWEEP = 10.0
"""Seconds that the guard and the spawner go on killing once the agent is gone. Processes die in milliseconds;
what takes longer sits in the kernel (dead NFS, a wedged driver) and can't be helped by waiting."""

SPAWN_MARK = "RALLYPOINT_SPAWN_ID"
"""Set in each worker's environment: tells whose a process is once it has lost its parent and its session."""


class ProcessStat(NamedTuple):
    """One line of /proc/<pid>/stat, the part that says where in the tree a process stands."""

    pid: int
    state: str
    parent: int
    group: int
    session: int

    @property
    def dead(self) -> bool:
        """Whether only the entry in its parent's books is left."""
        return self.state in "ZX"


def prctl(option: int, argument: int | bytes) -> None:
    """Calls prctl(2). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    value = ctypes.c_char_p(argument) if isinstance(argument, bytes) else ctypes.c_ulong(argument)
    if libc.prctl(ctypes.c_int(option), value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def become_subreaper() -> None:
    """Makes orphaned descendants of this process its children, instead of init's. Raises OSError."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def read_process(pid: int) -> ProcessStat | None:
    """Reads where a process stands; None if there is no such process."""
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
    """Lists the descendants of a process, parents before children, zombies included.

    A process that forks and exits all the time may be missed: it is gone before it is looked at, and its child
    was not yet there when the list was made. `watch_forks` tells whether that may have happened.

    Args:
        root: whose descendants; not itself in the list.
        keep: a process for which this is true is left out, with everything below it.
    """
    # One pass over /proc rather than /proc/<pid>/task/<tid>/children: not every kernel has those files, and a
    # trainer has hundreds of threads, each with a list of its own. Youngest first: they go the soonest.
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
    """What /proc/loadavg says was the last pid given out: the same before and after means no fork between."""
    with open("/proc/loadavg", "rb") as file:
        return file.read().rsplit(None, 1)[-1]


def kill_group(victims: Iterable[ProcessStat], family: set[int]) -> dict[int, int]:
    """Sends SIGKILL to processes and to the process groups they are in.

    The groups, because a signal to a group and a fork exclude one another in the kernel: a process that forks
    faster than we can look still can't leave its group that way. A group's number stays taken while it has a
    member, and its members all descend from the process that made it. Spared are the groups of our own session
    (a fork that has not become a worker yet is in one) and, should the number have been handed on since, a
    group whose leader is no relative.

    Then each process, in case it is in such a group. The pidfd pins one process; if the stat line read *after*
    it was opened shows a parent in the family, it is one of ours: had the pid been handed on in between, the
    pidfd would refer to a dead process and the signal would go nowhere.

    Args:
        victims: whom.
        family: pids of the tree's processes, its root included: the parents that prove kinship.

    Returns:
        By pid, the pidfd of each process struck, readable once it is dead, for the caller to close. At most
        _PIDFDS_HELD have one: a fork bomb must not use up our descriptors. The others have -1.
    """
    victims = list(victims)
    session = os.getsid(0)
    for group in {victim.group for victim in victims if victim.session != session}:
        if group <= 1:  # of a process in the middle of its end, stat may say -1: everybody, to killpg()
            continue
        leader = read_process(group)
        if leader is None or leader.parent in family:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
    struck: dict[int, int] = {}
    for victim in victims:
        try:
            pidfd = os.pidfd_open(victim.pid)
        except OSError:
            continue
        now = read_process(victim.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if now is not None and now.parent in family:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                struck[victim.pid] = pidfd if len(struck) < _PIDFDS_HELD else -1
        if struck.get(victim.pid, -1) < 0:
            os.close(pidfd)
    return struck


_PIDFDS_HELD = 64


def kill_descendants(timeout: float, keep: Callable[[ProcessStat], bool] | None = None) -> list[int]:
    """Kills every descendant of the calling process, a subreaper, and waits until all are dead.

    New processes that appear meanwhile die too. With nobody to keep, the end is exact: all children are reaped,
    and there are no more. Else only children that are dead and not to be kept are reaped, and the end is when
    nobody is found, by a look during which nobody has forked, or by several.

    Args:
        timeout: seconds after which to give up on processes that SIGKILL doesn't end (uninterruptible sleep).
        keep: a process for which this is true is spared, with everything below it.

    Returns:
        The pids that are left; empty when all are gone.
    """
    me = os.getpid()
    deadline = time.monotonic() + timeout
    vain_looks = 0
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
            vain_looks += 1
            # Whoever was dead below one that is dead as well is ours to reap by now, and was not yet when we looked.
            if _reap(-1) if keep is None else not tree and (undisturbed or vain_looks > _VAIN_LOOKS):
                return []
            select.poll().poll(2)  # overlooked, or dead but held by a debugger
            continue
        vain_looks = 0
        struck = kill_group(living, {me, *(process.pid for process in tree)})
        poll = select.poll()
        for pidfd in struck.values():
            if pidfd >= 0:
                poll.register(pidfd, select.POLLIN)
        # Nothing to wait for: it has hopped on meanwhile, or is another user's and may not be killed.
        poll.poll(min(remaining, 1.0 if struck else 0.02) * 1000)
        for pidfd in struck.values():
            if pidfd >= 0:
                os.close(pidfd)


_VAIN_LOOKS = 10  # on a host that forks all the time no look is undisturbed


def _reap(pid: int) -> bool:
    """Reaps one child if it is dead, or for -1 all that are; true if there is no such child, or none at all."""
    try:
        while os.waitpid(pid, os.WNOHANG | WAIT_ALL)[0] != 0:
            pass
    except ChildProcessError:
        return True
    return False


def _wake_on_signals(*numbers: int) -> int:
    """Turns signals into bytes on a pipe, so that one poll() waits for everything; returns its read end."""
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
        self.held: list[tuple[int, bool]] = []  # signals that came before exec
        self.failed = False
        self.reaped = False


class _KillRequest:
    """A request to kill until nothing is left: of one worker, or of all."""

    __slots__ = ("deadline", "request", "struck", "vain_scans", "worker")

    def __init__(self, request: int, worker: int | None, deadline: float) -> None:
        self.request = request
        self.worker = worker
        self.deadline = deadline
        self.struck: set[int] = set()
        self.vain_scans = 0


class _SpawnerLoop:
    """The event loop of the spawner process."""

    def __init__(self, agent: int, guard: int, call: Call | str | None, private: Iterable[int]) -> None:
        """Sets up.

        Args:
            agent: descriptor of the socket to the agent.
            guard: pid of the guard.
            call: what workers that are calls call; a text if it could not be had: why.
            private: descriptors that a worker which is a call must not keep. (Exec closes them by itself.)
        """
        self._agent = agent
        self._supervisor = guard
        self._call = call
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._workers: dict[int, _Child] = {}
        self._by_pid: dict[int, _Child] = {}
        self._by_pipe: dict[int, _Child] = {}
        self._hunts: list[_KillRequest] = []
        self._scan_due = False
        self._scan_not_before = 0.0
        self._signals = _wake_on_signals(signal.SIGCHLD, signal.SIGUSR1)
        self._private = (agent, self._signals, *private)
        self._poll = select.poll()
        self._poll.register(self._signals, select.POLLIN)
        self._poll.register(self._agent, select.POLLIN)

    def run(self) -> None:
        """Serves the agent until it, or the guard, is gone."""
        # The parent-death signal closes the gap of a guard that dies; checked after it is armed.
        prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
        self._send(event="ready", pid=os.getpid())
        while os.getppid() == self._supervisor:
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
                    self._learn_of_exec(self._by_pipe[fd])
            childless = self._reap()
            self._advance_hunts(childless)

    # -- talking with the agent

    def _receive(self) -> bool:
        """Takes in what the agent sent; false when the agent is gone."""
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
            self._obey(request)
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
            self._outbox.clear()  # the agent is gone; reading will say so
        else:
            self._poll.modify(self._agent, select.POLLIN)

    def _obey(self, request: dict[str, Any]) -> None:
        operation = request["op"]
        if operation == "spawn":
            for spec in request["workers"]:
                self._spawn(spec)
        elif operation == "signal":
            for number in request["workers"]:
                self._signal(number, request["signal"], request["group"])
        else:
            worker = request["worker"] if operation == "kill" else None
            self._hunts.append(
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

    def _learn_of_exec(self, worker: _Child) -> None:
        """Reads how exec went: end of file when it worked (the pipe closes on exec), else the reason."""
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
            # Before exec it has no session of its own yet, and would ignore what the spawner ignores.
            worker.held.append((signal_number, group))

    def _deliver(self, worker: _Child, number: int, group: bool) -> None:
        # Not reaped: the number is still its own, so neither call can hit a stranger.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if group:
                os.killpg(worker.pid, number)
            else:
                os.kill(worker.pid, number)

    # -- deaths

    def _reap(self) -> bool:
        """Reaps all that is dead, workers and adopted orphans; true when no child is left at all."""
        childless = False
        while True:
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
            self._learn_of_exec(worker)
            if worker.failed:
                del self._workers[worker.number]
                continue
            self._send(
                event="exited",
                worker=worker.number,
                pid=pid,
                status=status,
                at=time.monotonic(),
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

    def _advance_hunts(self, childless: bool) -> None:
        """Strikes again where something was left, and reports the hunts that are over."""
        if not self._hunts:
            return
        now = time.monotonic()
        overdue = any(now >= hunt.deadline for hunt in self._hunts)
        if not (childless or overdue or (self._scan_due and now >= self._scan_not_before)):
            return
        self._scan_due = False
        before = watch_forks()
        tree = [] if childless else descendants(os.getpid())
        undisturbed = watch_forks() == before
        family = {os.getpid(), *(process.pid for process in tree)}
        for hunt in list(self._hunts):
            victims = [process for process in self._tree_of(hunt.worker, tree) if not process.dead]
            hunt.vain_scans = 0 if victims else hunt.vain_scans + 1
            # A sweep is over when the kernel says so; of a single worker's tree only looking can tell.
            found_none = hunt.vain_scans > 0 and (undisturbed or hunt.vain_scans > _VAIN_LOOKS)
            if now >= hunt.deadline or (childless if hunt.worker is None else found_none):
                self._hunts.remove(hunt)
                left = [process.pid for process in victims]
                self._send(event="killed", request=hunt.request, count=len(hunt.struck), left=left)
                continue
            struck = kill_group(victims, family)
            hunt.struck.update(struck)
            for pidfd in struck.values():
                if pidfd >= 0:
                    os.close(pidfd)
            # Somebody may have hopped on; and without a victim no death will remind us to look.
            self._scan_due = self._scan_due or len(struck) < max(1, len(victims))
        # Looking costs some 10 µs for each process of the host, ours or not: spend at most half the time so.
        finished = time.monotonic()
        self._scan_not_before = finished + (finished - now)

    def _tree_of(self, number: int | None, tree: list[ProcessStat]) -> list[ProcessStat]:
        """Picks one worker's processes: itself, its session, orphans with its mark, and all their children."""
        if number is None:
            return tree
        worker = self._workers.get(number)
        pid = worker.pid if worker is not None else None
        mark = f"{SPAWN_MARK}={_mark(os.getpid(), number)}".encode()
        picked: dict[int, ProcessStat] = {}
        for process in tree:  # parents come before children
            adopted = process.parent == os.getpid() and process.pid not in self._by_pid
            kin = pid in (process.pid, process.session) or process.parent in picked
            if kin or (adopted and mark in _environment(process.pid)):
                picked[process.pid] = process
        return list(picked.values())

    def _poll_timeout(self) -> float | None:
        """How long poll() may wait, in milliseconds; None for as long as nothing happens."""
        moments = [hunt.deadline for hunt in self._hunts]
        if self._hunts and self._scan_due:
            moments.append(self._scan_not_before)
        if not moments:
            return None
        return (
            max(0.0, min(moments) - time.monotonic()) * 1000 + 1
        )  # poll() rounds down: never a moment early


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
    """Turns a fresh fork into the worker; where that fails, says through the pipe at which step, and exits."""
    step = "session"
    try:
        wakeup = signal.set_wakeup_fd(-1)
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != spawner:  # it died before the signal was armed
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
        _open_as(0, b"/dev/null", os.O_RDONLY)
        for step, target in (("stdout", 1), ("stderr", 2)):
            if spec[step] is not None:
                _open_as(target, _raw(spec[step]), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        step = "rlimits"
        _set_limits(spec["rlimits"])  # last: with few descriptors or little memory nothing above would work
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
    """Opens a file under a given number."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    os.dup2(fd, target)
    if fd != target:
        os.close(fd)


def _set_limits(limits: dict[str, list[int]]) -> None:
    """Sets limits of resources. Raises ValueError: it may not, or there is no such limit."""
    if not limits:
        return
    import resource  # noqa: PLC0415 (a shared library, which few need)

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
    """Gives a fork the environment that exec would have given it, in the eyes of other processes too."""
    os.environb.clear()
    os.environb.update(environment)
    # /proc/<pid>/environ goes on showing the memory in which exec had put it, to the worker's own forks as well:
    # without the mark there, those that daemonise could not be told from another worker's.
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end of proc(5)
    mark = SPAWN_MARK.encode() + b"=" + environment[SPAWN_MARK.encode()] + b"\0"
    if end - start >= len(mark):
        ctypes.memmove(start, mark, len(mark))


def _call_and_exit(call: Call, private: Iterable[int]) -> NoReturn:
    """Ends the worker with what the function that it calls returns."""
    status = 1
    try:
        for fd in private:  # the pipe on which the spawner waits for exec among them: this is as good as exec
            os.close(fd)
        status = call()
    finally:
        os._exit(status)


_CATCHABLE = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


def _raw(text: str) -> bytes:
    """The exact bytes the agent meant, whatever the locale of either process."""
    return text.encode("utf-8", "surrogateescape")


def _guard_agent(spawner: int, agent: int) -> bool:
    """Waits for the end of the spawner or of the agent, then kills everything below; true when all is dead."""
    signals = _wake_on_signals(signal.SIGCHLD)
    poll = select.poll()
    poll.register(signals, select.POLLIN)
    poll.register(agent, select.POLLRDHUP)
    while os.waitpid(spawner, os.WNOHANG)[0] == 0:
        if any(fd == agent for fd, _events in poll.poll()):
            break
        _empty(signals)
    os.close(agent)  # the last copy, if the spawner is dead: an agent that lives learns of it now
    # The spawner, if it still lives, goes with the rest: it might be stopped, or stuck.
    return not kill_descendants(LAST_SWEEP)


def _has_lost(guard: int) -> bool:
    """Whether the spawner's guard is dead: else that clears up, once it has killed the spawner."""
    try:
        fd = os.pidfd_open(guard)
    except ProcessLookupError:
        return True
    try:
        if os.getppid() != guard:
            return True
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        # One in the middle of its end still looks alive. One that lives has better things to do than to die.
        return bool(poll.poll(_LAST_MOMENT * 1000))
    finally:
        os.close(fd)


_LAST_MOMENT = 1.0  # seconds for a guard to be dead, or to kill the spawner


def _clear_up(folders: int) -> None:
    """Removes what an agent that is dead can't remove any more; one that lives says that it does so itself.

    Args:
        folders: pipe from the agent, with the paths of its temporary folders and a NUL byte after each; an empty
            path is what one that lives says.
    """
    poll = select.poll()
    poll.register(folders, select.POLLIN)
    content = b""
    while poll.poll(
        _LAST_WORDS * 1000
    ):  # a process in the middle of its end looks alive: only the pipe can tell
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


_LAST_WORDS = 3.0  # seconds for an agent to be dead, or to say that it lives; a suspended one does neither


def _leave_terminal_signals_to_the_agent() -> None:
    """Ctrl-C and the scheduler's SIGTERM may hit everything at once; what to do about them the agent decides."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


Call = Callable[[], int]
"""What a worker that is a call calls, in its own process; returns its exit code, and raises nothing."""


def main(agent: int, folders: int, load: Callable[[], Call] | None = None) -> None:
    """Becomes guard and spawner. The guard exits with 0 if it has left nothing alive.

    Args:
        agent: descriptor of the socket to the agent, which is the parent of this process.
        folders: descriptor of the pipe on which the agent names its temporary folders.
        load: called in the spawner before anything else; returns what workers that are calls call. What it raises
            is the reason why none can be started.
    """
    for fd in (agent, folders):
        os.set_inheritable(fd, False)
    os.set_blocking(agent, False)
    _leave_terminal_signals_to_the_agent()
    become_subreaper()
    guard = os.getpid()
    child = os.fork()
    if child != 0:
        prctl(PR_SET_NAME, b"rallypoint-grd")
        all_dead = _guard_agent(child, agent)
        _clear_up(folders)
        sys.exit(0 if all_dead else 1)
    become_subreaper()
    prctl(PR_SET_NAME, b"rallypoint-spwn")
    try:
        call = _load(load, guard) if load is not None else None
        _SpawnerLoop(agent, guard, call, (folders,)).run()
    finally:
        kill_descendants(LAST_SWEEP)
        if _has_lost(guard):
            _clear_up(folders)


def _load(load: Callable[[], Call], guard: int) -> Call | str:
    """Has what workers will call, which may take a user's imports; or the reason why not."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody can wake it up meanwhile
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
