"""The agent's client of the spawner: requests processes and receives their exits.

Nothing here polls: exits and replies arrive on one socket, the spawner's own death there and on a pidfd.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from rallypoint.agent.spawner import spawner as program
from rallypoint.agent.spawner.protocol import (
    KillResult,
    SpawnError,
    WorkerExit,
    WorkerSpec,
    infer_exit,
    read_exit,
    read_failure,
    spawn_request,
)
from rallypoint.agent.spawner.start import SpawnerProcess, start_program


class WorkerProcess:
    """A requested worker, as the agent sees it. Made by `Spawner.submit`.

    Attributes:
        number: its id in the spawner's protocol, never reused.
        pid: its process id once started.
        started: resolves at exec, or raises SpawnError.
        cleared: resolves when it and all members of its process group are gone, or it never started.
    """

    def __init__(self, number: int, spec: WorkerSpec, on_exit: Callable[[WorkerExit], None]) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.spec = spec
        self.pid: int | None = None
        self.started: asyncio.Future[int] = loop.create_future()
        self.exit: WorkerExit | None = None
        self.cleared: asyncio.Future[None] = loop.create_future()
        self._on_exit = on_exit

    @property
    def alive(self) -> bool:
        """True from the request (before exec too) until it has ended or failed to start."""
        return self.exit is None and not self.cleared.done()

    def has_started(self, pid: int) -> None:
        """Record that the spawner reported its exec."""
        self.pid = pid
        if not self.started.done():
            self.started.set_result(pid)

    def has_failed(self, error: SpawnError) -> None:
        """Record that it could not be started, or that the spawner died before it was."""
        if not self.started.done():
            self.started.set_exception(error)
            self.started.exception()  # retrieved, so that asyncio logs nothing if no caller waits any more
        self.is_cleared()

    def has_exited(self, worker_exit: WorkerExit) -> None:
        """Record its exit: the spawner has reaped it, or the spawner died and the worker with it."""
        self.exit = worker_exit
        self._on_exit(worker_exit)

    def is_cleared(self) -> None:
        """Record that its process group is empty."""
        if not self.cleared.done():
            self.cleared.set_result(None)


START_TIMEOUT = 30.0
"""Seconds from the request to exec. Usually milliseconds; a program on a hung network file system never gets there,
and then the round must fail with a reason rather than wait."""

SWEEP_TIMEOUT = 5.0
"""Seconds for processes to die of SIGKILL. Freeing tens of gigabytes takes one or two seconds; a process that takes
longer is in uninterruptible sleep, and the node cannot take part in the next round."""

PRELOAD_TIMEOUT = 600.0
"""Seconds for a forkserver spawner to load the function of its workers. It imports the modules of the user's
program: a minute from a cold network file system."""

ANSWER_MARGIN = 2.0
"""Seconds after a request's own timeout until a spawner that has not replied counts as dead."""


class Spawner:
    """Client of one spawner process.

    Start it early: it costs a few milliseconds, and the process gets ready while the agent imports the rest.
    Use it on one event loop. When the process dies, the kernel kills its workers (parent-death signal), and their
    orphans are killed. A spawner that does not reply in time is killed and treated as dead.
    """

    # Pids of the guards of all spawners of this process: no spawner's clean-up may kill another one's tree.
    _guards: ClassVar[set[int]] = set()

    def __init__(self, process: SpawnerProcess) -> None:
        """Use an already started spawner process; `Spawner.start` starts one for workers that are programs.

        After its death, all descendants of this process in other sessions than its own are killed, except other
        spawners.

        Raises:
            SpawnError: no file descriptor is left to watch the process with.
        """
        try:
            # Opened now, not in attach(): if descriptors ran out by then, its exit could not be awaited.
            self._handle_pidfd = os.pidfd_open(process.handle.pid)
        except OSError as error:
            process.connection.close()  # the process exits when its socket closes
            raise SpawnError(f"cannot watch the spawner process: {error.strerror}") from error
        self._guards.add(process.handle.pid)
        self._process = process
        self._handle = process.handle
        self._socket = process.connection
        self._cleanup_folders: list[Path] = []
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._numbers = itertools.count(1)
        self._requests = itertools.count(1)
        self._workers: dict[int, WorkerProcess] = {}
        self._replies: dict[int, asyncio.Future[KillResult]] = {}
        self._dead = False
        self._owner: object | None = None
        self.pid: int | None = None
        # Set by attach().
        self._attached = False
        self._ready: asyncio.Future[None]
        self._loop: asyncio.AbstractEventLoop
        self._handle_exited: asyncio.Future[None]
        # Set with _dead.
        self._death_task: asyncio.Task[KillResult]

    @classmethod
    def start(cls, *, stdin: bool = False) -> Self:
        """Start the spawner process; may be called before there is an event loop.

        Makes this process a subreaper: if the spawner is killed, the kernel hands its orphans to this process,
        which kills them. `stdin`: as for `start_program`.

        Raises:
            SpawnError: the process can't be started.
        """
        return cls(start_program(stdin=stdin))

    def renew(self) -> Self:
        """Start a replacement for this dead spawner, with the same folders registered for clean-up.

        Raises:
            SpawnError: the process can't be started, or it was a fork and cannot be made again.
        """
        another = type(self)(self._process.another())
        for folder in self._cleanup_folders:
            another.register_cleanup(folder)
        return another

    def register_cleanup(self, folder: Path) -> None:
        """Register a temporary folder: the guard or spawner removes it if this process dies first."""
        self._cleanup_folders.append(folder)
        if not self._dead:
            # BrokenPipeError: it is dead, which is not noticed yet; `renew` registers the folder again.
            with contextlib.suppress(BrokenPipeError):
                os.write(self._process.folders, os.fsencode(folder.absolute()) + b"\0")

    @property
    def dead(self) -> bool:
        """True when the process has died, or was given up because it did not reply."""
        return self._dead

    def occupy(self, owner: object) -> None:
        """Reserve the spawner for one owner, because `sweep` kills the workers of all owners.

        Raises:
            SpawnError: another owner has reserved it.
        """
        if self._owner is not None and self._owner is not owner:
            raise SpawnError(
                "this spawner has a group of workers already; another needs a spawner of its own"
            )
        self._owner = owner

    def vacate(self, owner: object) -> None:
        """End this owner's reservation; nothing if another owner holds it."""
        if self._owner is owner:
            self._owner = None

    def submit(
        self, specs: Sequence[WorkerSpec], on_exit: Callable[[WorkerExit], None]
    ) -> list[WorkerProcess]:
        """Request workers, all in one message, and return at once. Must be called on the loop.

        Args:
            on_exit: called once for each worker that was started, as soon as it has ended.

        Raises:
            SpawnError: the spawner is dead.
        """
        self.attach()
        if self._dead:
            raise SpawnError("the spawner process is dead; workers need a new one")
        workers = [WorkerProcess(next(self._numbers), spec, on_exit) for spec in specs]
        self._workers.update((worker.number, worker) for worker in workers)
        self._send(op="spawn", workers=[spawn_request(worker.number, worker.spec) for worker in workers])
        return workers

    async def wait_started(self, workers: Sequence[WorkerProcess], timeout: float = START_TIMEOUT) -> None:
        """Wait until every worker is past exec.

        Raises:
            SpawnError: a worker could not be started or took longer than `timeout` seconds; the first such worker
                in the given order. The others may be running.
        """
        if self._process.preloads:
            await asyncio.wait(
                [self._ready, self._handle_exited], timeout=PRELOAD_TIMEOUT, return_when="FIRST_COMPLETED"
            )
        if workers:
            await asyncio.wait([worker.started for worker in workers], timeout=timeout)
        for worker in workers:
            rank = worker.spec.local_rank
            if not worker.started.done():
                program_name = worker.spec.argv[0] if worker.spec.argv else ""
                raise SpawnError(
                    f"worker {rank}: {program_name!r} was not started within {timeout:g} s; does the file system "
                    "of the program, its working directory or its logs hang?",
                    rank,
                )
            worker.started.result()

    def signal(self, workers: Sequence[WorkerProcess], number: int, *, group: bool) -> None:
        """Send a signal to the workers that are alive, or to their whole process groups; delayed until exec.

        A spawner that still loads the function of its workers (perhaps for minutes) reads no requests: it is ended.
        """
        numbers = [worker.number for worker in workers if worker.alive]
        if numbers and self._process.preloads and not self._ready.done():
            self._lose()
        elif numbers and not self._dead:
            self._send(op="signal", workers=numbers, signal=int(number), group=group)

    async def kill(self, worker: WorkerProcess, timeout: float = SWEEP_TIMEOUT) -> KillResult:
        """Kill one worker's tree: its process, its session, their descendants, and daemons it left behind.

        Returns when all are dead, or after `timeout` seconds.
        """
        return await self._request(timeout, op="kill", worker=worker.number)

    async def sweep(self, timeout: float = SWEEP_TIMEOUT) -> KillResult:
        """Kill every process below the spawner. Exits are reported before this returns."""
        return await self._request(timeout, op="sweep")

    async def close(self, timeout: float = SWEEP_TIMEOUT) -> None:
        """End the spawner and all processes below it; return when they are gone. May be called again."""
        self.attach()
        self._lose(timeout)
        await self._wait_dead()

    async def __aenter__(self) -> Self:
        self.attach()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    def attach(self) -> None:
        """Attach to the running loop: deaths are noticed from now on. Other calls attach too."""
        if not self._attached:
            self._attached = True
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket, self._receive)
            self._ready = self._loop.create_future()
            self._handle_exited = self._loop.create_future()
            self._loop.add_reader(self._handle_pidfd, self._on_handle_exit)

    # -- the socket

    def _send(self, **request: Any) -> None:
        body = json.dumps(request).encode()
        self._outbox += len(body).to_bytes(4, "big") + body
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outbox:
                del self._outbox[: self._socket.send(self._outbox)]
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._flush)
        except OSError:
            self._lose()
        else:
            self._loop.remove_writer(self._socket)

    def _receive(self) -> bool:
        """Read and dispatch up to 256 KiB of events; false when nothing was there to read."""
        try:
            data = self._socket.recv(1 << 18)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._lose()
            return False
        self._inbox += data
        while len(self._inbox) >= 4:
            end = 4 + int.from_bytes(self._inbox[:4], "big")
            if len(self._inbox) < end:
                break
            event = json.loads(bytes(self._inbox[4:end]))
            del self._inbox[:end]
            self._dispatch(event)
        return True

    def _dispatch(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "ready":
            self.pid = event["pid"]
            self._ready.set_result(None)
            return
        if kind == "killed":
            reply = self._replies.get(event["request"])
            if reply is not None and not reply.done():
                reply.set_result(KillResult(event["count"], tuple(event["left"])))
            return
        worker = self._workers[event["worker"]]
        if kind == "started":
            worker.has_started(event["pid"])
        elif kind == "exited":
            self._report(worker, read_exit(worker.spec.local_rank, event))
        elif kind == "cleared":
            del self._workers[worker.number]
            worker.is_cleared()
        elif kind == "failed":
            del self._workers[worker.number]
            worker.has_failed(read_failure(worker.spec, event))

    def _report(self, worker: WorkerProcess, worker_exit: WorkerExit) -> None:
        # A callback that raises must not keep the other workers' exits from being reported.
        try:
            worker.has_exited(worker_exit)
        except Exception as error:
            message = f"on_exit of worker {worker.spec.local_rank} raised"
            self._loop.call_exception_handler({"message": message, "exception": error})

    async def _request(self, timeout: float, **request: Any) -> KillResult:
        self.attach()
        if self._dead:
            return await self._wait_dead()
        number = next(self._requests)
        reply = self._replies[number] = self._loop.create_future()
        self._send(**request, request=number, timeout=timeout)
        try:
            return await asyncio.wait_for(reply, timeout + ANSWER_MARGIN)
        except TimeoutError:
            self._lose()
            return await self._wait_dead()
        except _LostError:
            return await self._wait_dead()
        finally:
            del self._replies[number]

    # -- its death

    def _on_handle_exit(self) -> None:
        self._loop.remove_reader(self._handle_pidfd)
        os.close(self._handle_pidfd)
        self._handle_exited.set_result(None)
        while not self._dead and self._receive():
            pass  # events that it sent before it died come first
        self._lose()

    def _lose(self, timeout: float = SWEEP_TIMEOUT) -> None:
        """Give the spawner up: closing the socket makes the guard kill everything below it."""
        if self._dead:
            return
        self._dead = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        with contextlib.suppress(OSError):  # both readers are dead
            os.write(self._process.folders, b"\0")  # "the agent is alive and removes its folders itself"
        os.close(self._process.folders)
        self._death_task = self._loop.create_task(self._on_spawner_death(timeout))
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(_LostError())

    async def _wait_dead(self) -> KillResult:
        return await asyncio.shield(self._death_task)

    async def _on_spawner_death(self, timeout: float) -> KillResult:
        """Wait for the guard, kill the processes that it left to this one, and report the end of every worker."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._handle_exited), timeout)
        if not self._handle_exited.done():
            self._handle.kill()
            await self._handle_exited
        left: list[int] = []
        self._guards.discard(self._handle.pid)
        if self._handle.wait() != 0:  # it did not finish killing: its children are this process's now
            left = await asyncio.to_thread(program.kill_descendants, timeout, self._spares())
        for worker in list(self._workers.values()):
            if worker.pid is None:
                rank = worker.spec.local_rank
                worker.has_failed(
                    SpawnError(f"worker {rank}: the spawner process died before it was started", rank)
                )
                continue
            if worker.exit is None:
                self._report(
                    worker, infer_exit(worker.spec.local_rank, worker.pid, time.monotonic(), time.time())
                )
            worker.is_cleared()
        self._workers.clear()
        return KillResult(0, tuple(left))

    def _spares(self) -> Callable[[program.ProcessStat], bool]:
        """Return a predicate for the processes to spare when the tree is killed: those not from this spawner."""
        session = os.getsid(0)
        spared = frozenset(self._guards)
        return lambda process: process.session == session or process.pid in spared


class _LostError(Exception):
    """The spawner died before it replied to a request."""
