"""The agent of a launch from Python, as a separate process beside the launching program.

An agent loads gRPC, kills processes below itself, and needs signal handlers and an event loop: none of that may happen
inside a user's program or notebook. If that program dies, the kernel kills the agent, and with it all processes below
the agent.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import NoReturn

from rallypoint.agent.spawner.client import Spawner
from rallypoint.agent.spawner.protocol import SpawnError
from rallypoint.agent.spawner.spawner import PR_SET_PDEATHSIG, Call, prctl
from rallypoint.agent.spawner.start import ForkedProcess, ProcessHandle, fork_spawner, start_forkserver
from rallypoint.launcher.plan import LaunchOutcome, LaunchRequest
from rallypoint.rpc.endpoint import SettingError
from rallypoint.worker.call import renew_signals, renew_streams


class AgentProcess:
    """A running agent, as seen by the launching program."""

    def __init__(self, process: ProcessHandle, connection: socket.socket) -> None:
        """Use `start` or `fork`."""
        self._process = process
        self._connection = connection
        self._reply = bytearray()

    @classmethod
    def start(cls, request: LaunchRequest) -> AgentProcess:
        """Start an agent in a fresh interpreter. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "rallypoint.launcher.agent_process"),
                    *(str(theirs.fileno()), str(os.getpid())),
                ],
                pass_fds=(theirs.fileno(),),
            )
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is dead: `wait` reports that
            ours.sendall(pickle.dumps(request))
            ours.shutdown(socket.SHUT_WR)
        return cls(process, ours)

    @classmethod
    def fork(cls, request: LaunchRequest, call: Call) -> AgentProcess:
        """Start an agent as a fork of this process as it is now; its workers are such forks too. Raises OSError."""
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()  # or the forks would print it again
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # Python's own, about threads: _check_forkable has warned already
            pid = os.fork()
        if pid == 0:
            ours.close()
            _be_forked_agent(theirs, parent, request, call)
        theirs.close()
        return cls(ForkedProcess(pid), ours)

    def send_signal(self, number: int) -> None:
        """Send a signal to the agent."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def wait(self) -> LaunchOutcome:
        """Wait for the agent's end. May be called again after an interruption."""
        while piece := self._connection.recv(1 << 16):
            self._reply += piece
        status = self._process.wait()
        self._connection.close()
        if self._reply:
            outcome: LaunchOutcome = pickle.loads(bytes(self._reply))  # noqa: S301 (our own process's)
            return outcome
        end = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"
        return LaunchOutcome(128 - status if status < 0 else status or 1, f"the agent's process {end}")


def _be_forked_agent(connection: socket.socket, parent: int, request: LaunchRequest, call: Call) -> NoReturn:
    try:
        renew_signals()
        renew_streams()
        _be_agent(
            connection, parent, request, lambda: Spawner(fork_spawner(call, private=(connection.fileno(),)))
        )
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _be_agent(
    connection: socket.socket, parent: int, request: LaunchRequest, make_spawner: Callable[[], Spawner]
) -> NoReturn:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the signal was armed
        os._exit(1)
    for number in request.plan.signals:
        if signal.getsignal(number) != signal.SIG_IGN:  # no worker runs yet: exit at once
            signal.signal(number, lambda received, _frame: os._exit(128 + received))
    connection.sendall(pickle.dumps(_carry_out(request, make_spawner)))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)


def _carry_out(request: LaunchRequest, make_spawner: Callable[[], Spawner]) -> LaunchOutcome:
    try:
        # First: the spawner must exist before gRPC is loaded, and starts in parallel.
        spawner = make_spawner()
        if request.folder is not None:
            spawner.register_cleanup(request.folder)
        from rallypoint.launcher.launch import run_requested_job  # noqa: PLC0415

        return run_requested_job(request, spawner)
    except (SpawnError, SettingError) as error:
        return LaunchOutcome(2, str(error), refused=True)
    except Exception as error:
        traceback.print_exc()
        return LaunchOutcome(1, f"internal error: {error!r}; please report it with the traceback above")


def _make_spawner(request: LaunchRequest) -> Spawner:
    if request.forkserver:
        assert request.folder is not None, "a forkserver needs a saved call"
        return Spawner(start_forkserver(request.folder))
    return Spawner.start()


def main(fd: int, parent: int) -> NoReturn:
    """Run the agent that `AgentProcess.start` has started."""
    connection = socket.socket(fileno=fd)
    content = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    if not content:
        sys.exit(1)  # the launching program is dead
    request: LaunchRequest = pickle.loads(content)  # noqa: S301 (from our parent process)
    _be_agent(connection, parent, request, lambda: _make_spawner(request))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
