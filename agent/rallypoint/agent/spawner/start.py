"""Starts the spawner's process: a program of its own, or a fork of this process."""

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


class ProcessHandle(Protocol):
    """A started process: the part of subprocess.Popen that is used here."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def wait(self) -> int:
        """Reap it; return its exit code."""


@dataclass(frozen=True, slots=True)
class SpawnerProcess:
    """A spawner that has been started.

    Attributes:
        handle: the guard; the spawner itself is below it.
        connection: socket to the spawner.
        folders: pipe for the paths of temporary folders to remove, see `rallypoint.agent.spawner.spawner`.
        another: starts another one like it; raises SpawnError.
        preloads: true if it runs a user's imports before it reads requests.
    """

    handle: ProcessHandle
    connection: socket.socket
    folders: int
    another: Callable[[], SpawnerProcess]
    preloads: bool = False


def start_program(*, stdin: bool = False) -> SpawnerProcess:
    """Start a spawner whose workers are programs.

    Args:
        stdin: True if its standard input, which workers may inherit, is that of this process.

    Raises:
        SpawnError: the process can't be started.
    """
    # Isolated, and without site: starts in milliseconds in any environment.
    return _start(["-I", "-S", _program_path()], preloads=False, stdin=stdin)


def start_forkserver(call: Path) -> SpawnerProcess:
    """Start a spawner in a fresh interpreter that loads a function; its workers are forks that call it.

    Args:
        call: folder with the function and its arguments, as rallypoint.worker.call makes it.

    Raises:
        SpawnError: the process can't be started.
    """
    return _start(["-u", "-P", "-m", "rallypoint.agent.spawner.forkserver", str(call)], preloads=True)


def fork_spawner(call: program.Call, private: Sequence[int] = ()) -> SpawnerProcess:
    """Make a spawner by forking this process as it is now; its workers are forks of that which call a function.

    The caller must know that the fork is safe: one thread, no gRPC. The spawner cannot be started again later.

    Args:
        call: the function that each worker calls; returns its exit code, and raises nothing.
        private: descriptors of this process that the forks must not keep.

    Raises:
        SpawnError: the fork failed.
    """

    def none_like_it() -> SpawnerProcess:
        raise SpawnError(
            "the spawner cannot be started again: it was a fork of the launching process at its start"
        )

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
    return SpawnerProcess(ForkedProcess(pid), ours, folders, none_like_it)


def _start(arguments: Sequence[str], preloads: bool, stdin: bool = False) -> SpawnerProcess:
    ours, theirs = socket.socketpair()
    folders_end, folders = os.pipe()
    with theirs:
        try:
            program.become_subreaper()
            # In its own session: signals of the terminal and `kill -- -<group>` don't reach it.
            guard = subprocess.Popen(
                [sys.executable, *arguments, str(theirs.fileno()), str(folders_end)],
                stdin=None if stdin else subprocess.DEVNULL,
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
    return SpawnerProcess(guard, ours, folders, lambda: _start(arguments, preloads, stdin), preloads)


class ForkedProcess:
    """Handle of a fork of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        """Send SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Reap it; return its exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _be_spawner(agent: int, folders: int, call: program.Call) -> NoReturn:
    """Run the spawner in the fork; neither it nor a fork of it may return into the code of this process."""
    status = 1
    try:
        os.setsid()  # as in _start
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
    # An up-to-date compiled file, where the import left one, saves a third of the start-up time.
    source, compiled = program.__file__, program.__spec__.cached
    with contextlib.suppress(OSError):
        if compiled and os.path.getmtime(compiled) >= os.path.getmtime(source):
            return compiled
    return source
