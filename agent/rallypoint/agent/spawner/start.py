"""Makes the spawner's process: a program of its own, or a fork of this one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

from rallypoint.agent.spawner import spawner as program
from rallypoint.agent.spawner.protocol import SpawnError


class SpawnerHandle(Protocol):
    """The process that was started; subprocess.Popen has more of this kind."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def kill(self) -> None:
        """Sends it SIGKILL."""

    def wait(self) -> int:
        """Reaps it; returns its exit code."""


@dataclass(frozen=True, slots=True)
class SpawnerProcess:
    """A spawner that has been started.

    Attributes:
        guard: the guard; the spawner itself is below it.
        connection: to the spawner.
        folders: pipe on which the temporary folders to remove are named, see `rallypoint.agent.spawner.spawner`.
        another: starts another one like it; raises SpawnError.
        preloads: whether it takes as long as a user's imports until it listens.
    """

    handle: SpawnerHandle
    connection: socket.socket
    folders: int
    another: Callable[[], SpawnerProcess]
    preloads: bool = False


def start_program() -> SpawnerProcess:
    """Starts one whose workers are programs.

    Raises:
        SpawnError: the process can't be started.
    """
    # Isolated, and without site: up in milliseconds, whatever the environment says.
    return _start(["-I", "-S", _program_path()], preloads=False)


def start_forkserver(call: Path) -> SpawnerProcess:
    """Starts one whose workers are its forks, with a fresh interpreter that loads what they call.

    Args:
        call: folder with the function and its arguments, as rallypoint.worker.call makes it.

    Raises:
        SpawnError: the process can't be started.
    """
    return _start(["-u", "-P", "-m", "rallypoint.worker.forkserver", str(call)], preloads=True)


def fork_spawner(call: program.Call, private: Sequence[int] = ()) -> SpawnerProcess:
    """Makes one out of a fork of this process as it is now; its workers are forks of that, which call.

    What a fork forgets and what it can't bear is for the caller to know: this process must have one thread and no
    gRPC. There is no other like it to be had later.

    Args:
        call: what each worker calls; returns its exit code, and raises nothing.
        private: descriptors of this process that the forks must not keep.

    Raises:
        SpawnError: no process can be made.
    """

    def none_like_it() -> SpawnerProcess:
        raise SpawnError("the workers were to be forks of the launching process as it was: that is over")

    ours, theirs = socket.socketpair()
    folders_end, folders = os.pipe()
    try:
        program.become_subreaper()
        pid = os.fork()
    except OSError as error:
        ours.close()
        theirs.close()
        os.close(folders)
        os.close(folders_end)
        raise SpawnError(f"cannot fork the spawner process: {error}") from error
    if pid == 0:
        for fd in (ours.detach(), folders, *private):
            os.close(fd)
        _be_spawner(theirs.detach(), folders_end, call)
    theirs.close()
    os.close(folders_end)
    ours.setblocking(False)
    return SpawnerProcess(_ForkedHandle(pid), ours, folders, none_like_it)


def _start(arguments: Sequence[str], preloads: bool) -> SpawnerProcess:
    ours, theirs = socket.socketpair()
    folders_end, folders = os.pipe()
    with theirs:
        try:
            program.become_subreaper()
            # A session of its own, so that neither the terminal nor `kill -- -<group>` reaches it.
            guard = subprocess.Popen(
                [sys.executable, *arguments, str(theirs.fileno()), str(folders_end)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), folders_end),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            os.close(folders)
            raise SpawnError(f"cannot start the spawner process: {error}") from error
        finally:
            os.close(folders_end)
    ours.setblocking(False)
    return SpawnerProcess(guard, ours, folders, lambda: _start(arguments, preloads), preloads)


class _ForkedHandle:
    """A guard that is a fork of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _be_spawner(agent: int, folders: int, call: program.Call) -> NoReturn:
    """What the fork does; neither it nor a fork of it may return into the code of this process."""
    status = 1
    try:
        os.setsid()  # as _start does it
        os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)
        program.main(agent, folders, lambda: call)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _program_path() -> str:
    # The compiled form, where importing it left one that is up to date, saves a third of the start-up time.
    source, compiled = program.__file__, program.__spec__.cached
    with contextlib.suppress(OSError):
        if compiled and os.path.getmtime(compiled) >= os.path.getmtime(source):
            return compiled
    return source
