"""The agent's end of the spawner: asks it for processes, and hears at once how each of them ends.

Nothing here polls: exits and answers arrive on one socket, the spawner's own death there and on a pidfd.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
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

# ---- A worker as the agent that has asked for it sees it.


class WorkerProcess:
    """A worker that was asked for. Made by `Spawner.submit`.

    Attributes:
        number: the spawner's name for it, never used twice.
        spec: what was asked for.
        pid: its process id once started.
        started: resolves at exec, or raises SpawnError.
        exit: how it ended, once it has.
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
        """Whether it may still be running; true from the request on, before exec too."""
        return self.exit is None and not self.cleared.done()

    def has_started(self, pid: int) -> None:
        """The spawner says that it is past exec."""
        self.pid = pid
        if not self.started.done():
            self.started.set_result(pid)

    def has_failed(self, error: SpawnError) -> None:
        """The spawner says that it can't be started, or there is none any more."""
        if not self.started.done():
            self.started.set_exception(error)
            self.started.exception()  # seen, even if nobody waits any more
        self.is_cleared()

    def has_exited(self, how: WorkerExit) -> None:
        """The spawner has reaped it, or is known to have died with it."""
        self.exit = how
        self._on_exit(how)

    def is_cleared(self) -> None:
        """Nothing of its process group is left."""
        if not self.cleared.done():
            self.cleared.set_result(None)


START_TIMEOUT = 30.0
"""Seconds from the request to exec. Milliseconds as a rule; a program on a hung network file system takes for
ever, and then the round must fail with a reason rather than wait."""

SWEEP_TIMEOUT = 5.0
"""Seconds that processes have to die of SIGKILL. Freeing tens of gigabytes takes up to a second or two; what
takes longer is in uninterruptible sleep, and the node is not fit for the next round."""

PRELOAD_TIMEOUT = 600.0
"""Seconds that a spawner which loads what its workers call may take for that. It imports what the user's program
does, which is a minute where a cold network file system holds it."""

ANSWER_MARGIN = 2.0
"""Seconds past a request's own timeout after which a silent spawner counts as dead."""


class Spawner:
    """The agent's end of the spawner process.

    Start it early: it costs a few milliseconds, and the process gets ready while the agent imports the rest.
    Use it on one event loop. When the process dies, its workers die with it (the kernel sees to that), `on_death`
    is called, and what the workers left behind is killed. A spawner that doesn't answer in time is treated as
    dead, and killed.
    """

    _guards: ClassVar[set[int]] = set()  # of all spawners of this process: one must not kill another's tree

    def __init__(
        self,
        process: SpawnerProcess,
        on_death: Callable[[], None] | None = None,
        spare: Callable[[], Collection[int]] = lambda: (),
    ) -> None:
        """Takes charge of a spawner's process. Use `Spawner.start`, unless its workers are calls.

        Args:
            process: the process.
            on_death: called on the loop when the process is found dead without `close` having been called.
            spare: pids of the agent's own children in other sessions. After a death, all descendants of this
                process that are in another session than its own are killed, except these and other spawners.

        Raises:
            SpawnError: there is no descriptor left to watch the process by.
        """
        try:
            # Not when the loop runs: with no descriptor left by then, its end could not be waited for.
            self._handle_pidfd = os.pidfd_open(process.handle.pid)
        except OSError as error:
            process.connection.close()  # which ends it
            raise SpawnError(f"cannot watch the spawner process: {error.strerror}") from error
        self._guards.add(process.handle.pid)
        self._process = process
        self._handle = process.handle
        self._socket = process.connection
        self._entrusted: list[Path] = []
        self._on_death = on_death
        self._spare = spare
        self._inbox = bytearray()
        self._outbox = bytearray()
        self._numbers = itertools.count(1)
        self._requests = itertools.count(1)
        self._workers: dict[int, WorkerProcess] = {}
        self._replies: dict[int, asyncio.Future[KillResult]] = {}
        self._dead = False
        self._closing = False
        self._owner: object | None = None
        self.pid: int | None = None
        # Set by attach().
        self._attached = False
        self._ready: asyncio.Future[None]
        self._loop: asyncio.AbstractEventLoop
        self._handle_exited: asyncio.Future[None]
        # Set with _dead.
        self._burial: asyncio.Task[KillResult]

    @classmethod
    def start(
        cls,
        on_death: Callable[[], None] | None = None,
        spare: Callable[[], Collection[int]] = lambda: (),
    ) -> Self:
        """Starts the helper process; may be called before there is an event loop.

        Makes this process a subreaper: should the helper be killed, its orphans come to us, to be killed here.

        Args:
            on_death: see above.
            spare: see above.

        Raises:
            SpawnError: the process can't be started.
        """
        return cls(start_program(), on_death, spare)

    def renew(self) -> Self:
        """Starts another one like this, which is dead; it has the same folders entrusted to it.

        Raises:
            SpawnError: the process can't be started, or there can be no other.
        """
        another = type(self)(self._process.another(), self._on_death, self._spare)
        for folder in self._entrusted:
            another.register_cleanup(folder)
        return another

    def register_cleanup(self, folder: Path) -> None:
        """Has a temporary folder removed by the helper process, should this process die before it does so itself."""
        self._entrusted.append(folder)
        if not self._dead:
            with contextlib.suppress(
                BrokenPipeError
            ):  # it is dead without our knowing: `renew` will tell the next
                os.write(self._process.folders, os.fsencode(folder.absolute()) + b"\0")

    @property
    def dead(self) -> bool:
        """Whether the process is gone, or given up."""
        return self._dead

    def occupy(self, owner: object) -> None:
        """Reserves the spawner for one owner, since `sweep` spares nobody.

        Raises:
            SpawnError: it is reserved already.
        """
        if self._owner is not None and self._owner is not owner:
            raise SpawnError(
                "this spawner has a group of workers already; another needs a spawner of its own"
            )
        self._owner = owner

    def vacate(self, owner: object) -> None:
        """Ends the reservation, if it is this owner's."""
        if self._owner is owner:
            self._owner = None

    async def spawn(
        self, spec: WorkerSpec, on_exit: Callable[[WorkerExit], None], timeout: float = START_TIMEOUT
    ) -> WorkerProcess:
        """Starts one worker and waits for its exec.

        Args:
            spec: what to start.
            on_exit: called once when it has ended, if it was started.
            timeout: seconds to wait; a worker that takes longer may still start.

        Raises:
            SpawnError: it could not be started, in one line.
        """
        (worker,) = self.submit([spec], on_exit)
        await self.wait_started([worker], timeout)
        return worker

    def submit(
        self, specs: Sequence[WorkerSpec], on_exit: Callable[[WorkerExit], None]
    ) -> list[WorkerProcess]:
        """Asks for workers, all in one message, and returns at once. Must be called on the loop.

        Args:
            specs: what to start.
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
        """Waits until every worker is past exec.

        Raises:
            SpawnError: of the first, in the given order, that could not be started or took longer than
                `timeout` seconds. The others may be running.
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
                where = worker.spec.argv[0] if worker.spec.argv else ""
                raise SpawnError(
                    f"worker {rank}: {where!r} was not started within {timeout:g} s; does the file system that "
                    "holds it, its working directory or its logs hang?",
                    rank,
                )
            worker.started.result()

    def signal(self, workers: Sequence[WorkerProcess], number: int, *, group: bool) -> None:
        """Signals those workers that live, or their whole process groups. Held back until exec.

        A spawner that still loads what its workers call, for minutes perhaps, can do nothing for them but end.
        """
        numbers = [worker.number for worker in workers if worker.alive]
        if numbers and self._process.preloads and not self._ready.done():
            self._lose()
        elif numbers and not self._dead:
            self._send(op="signal", workers=numbers, signal=int(number), group=group)

    async def kill(self, worker: WorkerProcess, timeout: float = SWEEP_TIMEOUT) -> KillResult:
        """Kills one worker's tree: its process, its session, their descendants, and daemons it left behind.

        Returns when all are dead, or after `timeout` seconds.
        """
        return await self._request(timeout, op="kill", worker=worker.number)

    async def sweep(self, timeout: float = SWEEP_TIMEOUT) -> KillResult:
        """Kills every process below the spawner. Exits are reported before this returns."""
        return await self._request(timeout, op="sweep")

    async def close(self, timeout: float = SWEEP_TIMEOUT) -> None:
        """Ends the helper process and all below it; returns when they are gone. May be called again."""
        self.attach()
        self._closing = True
        self._lose(timeout)
        await self._buried()

    async def __aenter__(self) -> Self:
        self.attach()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def attach(self) -> None:
        """Ties the spawner to the running loop, from when on deaths are noticed; other calls do it too."""
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
        """Takes in what there is, up to a bound; false when there is no more."""
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
            answer = self._replies.get(event["request"])
            if answer is not None and not answer.done():
                answer.set_result(KillResult(event["count"], tuple(event["left"])))
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

    def _report(self, worker: WorkerProcess, how: WorkerExit) -> None:
        # A callback that raises must not cost the others their news.
        try:
            worker.has_exited(how)
        except Exception as error:
            message = f"on_exit of worker {worker.spec.local_rank} raised"
            self._loop.call_exception_handler({"message": message, "exception": error})

    async def _request(self, timeout: float, **request: Any) -> KillResult:
        self.attach()
        if self._dead:
            return await self._buried()
        number = next(self._requests)
        answer = self._replies[number] = self._loop.create_future()
        self._send(**request, request=number, timeout=timeout)
        try:
            return await asyncio.wait_for(answer, timeout + ANSWER_MARGIN)
        except TimeoutError:
            self._lose()
            return await self._buried()
        except _LostError:
            return await self._buried()
        finally:
            del self._replies[number]

    # -- its death

    def _on_handle_exit(self) -> None:
        self._loop.remove_reader(self._handle_pidfd)
        os.close(self._handle_pidfd)
        self._handle_exited.set_result(None)
        while not self._dead and self._receive():
            pass  # what it said last comes first
        self._lose()

    def _lose(self, timeout: float = SWEEP_TIMEOUT) -> None:
        """Gives the spawner up: closing the socket makes the guard kill everything below it."""
        if self._dead:
            return
        self._dead = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        with contextlib.suppress(OSError):  # nobody is left to hear it
            os.write(self._process.folders, b"\0")  # we live, and remove our folders ourselves
        os.close(self._process.folders)
        self._burial = self._loop.create_task(self._on_spawner_death(timeout))
        for answer in self._replies.values():
            if not answer.done():
                answer.set_exception(_LostError())
        if self._on_death is not None and not self._closing:
            self._on_death()

    async def _buried(self) -> KillResult:
        return await asyncio.shield(self._burial)

    async def _on_spawner_death(self, timeout: float) -> KillResult:
        """Waits for the guard, kills what it may have left to us, and tells every worker's fate."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._handle_exited), timeout)
        if not self._handle_exited.done():
            self._handle.kill()
            await self._handle_exited
        left: list[int] = []
        self._guards.discard(self._handle.pid)
        if self._handle.wait() != 0:  # it did not get to finish: its children are ours now
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
        """What must survive when the tree is killed: all that does not come from this spawner."""
        session = os.getsid(0)
        spared = {*self._guards, *self._spare()}
        return lambda process: process.session == session or process.pid in spared


class _LostError(Exception):
    """The spawner died with a request unanswered."""
