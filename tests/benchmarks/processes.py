"""The processes of a benchmark: it starts them, waits for them, and never leaves one behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support.mortal import mortal

RALLYPOINT = Path(sys.executable).with_name("rallypoint")
# Environment variables of other programs, which must not change a benchmark.
_FOREIGN = ("RALLYPOINT_", "PET_", "GRPC_", "TORCHELASTIC_")
_LOG_TAIL = 2_000  # characters


class BenchmarkError(Exception):
    """A measurement failed; the message names it and its cause, as far as known."""


class DidNotFinish(BenchmarkError):
    """A process exceeded its time limit."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server process that a benchmark measures."""

    pid: int
    endpoint: str
    log: Path

    def log_tail(self) -> str:
        """Return the end of its log, for an error message."""
        return tail(self.log)


def raise_open_files(needed: int) -> None:
    """Raise the open-files limit of this process, and of its children, to `needed`.

    Raises:
        BenchmarkError: The hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise BenchmarkError(
            f"{needed} open files are needed and {hard} allowed: raise `ulimit -Hn`, or measure fewer nodes (--n)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@contextmanager
def our_server(
    folder: Path, journal: str, security: Sequence[str] = ("--insecure",), *, socket: bool = False
) -> Iterator[Server]:
    """Run the rendezvous service, as users start it, until the context ends.

    Args:
        folder: For its log, and for a journal that is a file.
        journal: "memory", "sqlite" for a new file in a folder of its own, or the URL of an etcd.
        security: Command-line flags of the service.
        socket: Listen on a Unix socket in place of a port.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix="journal-") as place:
        url = f"sqlite:{place}/journal.db" if journal == "sqlite" else journal
        command = [str(RALLYPOINT), "serve", "rendezvous", *security, "--journal", url]
        unix = f"{place}/socket" if socket else ""
        with _server(folder / f"rendezvous-{journal.partition(':')[0]}.log", command, unix) as server:
            yield server


@contextmanager
def floor_server(folder: Path, behaviour: str, size: int = 200) -> Iterator[Server]:
    """Run a bare server without any logic, until the context ends.

    Args:
        folder: For its log.
        behaviour: Its behaviour; see `benchmarks.floor_server`.
        size: Bytes of its messages to all nodes, if it sends such.
    """
    command = [sys.executable, "-m", "benchmarks.floor_server", "--behaviour", behaviour, "--size", str(size)]
    with _server(folder / f"floor-{behaviour}.log", command) as server:
        yield server


@contextmanager
def timer_server(folder: Path) -> Iterator[Server]:
    """Run the timer service, as users start it, until the context ends; `folder` is for its log."""
    command = [str(RALLYPOINT), "serve", "timer", "--insecure", "--learned", "none"]
    with _server(folder / "timer.log", command) as server:
        yield server


@contextmanager
def timer_floor_server(folder: Path, behaviour: str) -> Iterator[Server]:
    """Run a bare server of the timer service's messages, until the context ends.

    Args:
        folder: For its log.
        behaviour: Its behaviour; see `benchmarks.timer_floor_server`.
    """
    command = [sys.executable, "-m", "benchmarks.timer_floor_server", "--behaviour", behaviour]
    with _server(folder / f"timer-floor-{behaviour}.log", command) as server:
        yield server


@contextmanager
def _server(log: Path, command: Sequence[str], unix: str = "") -> Iterator[Server]:
    if unix:
        with running([*command, "--host", f"unix:{unix}"], log) as process:
            yield Server(process.pid, f"unix:{unix}", log)
        return
    with free_port() as port, running([*command, "--port", str(port)], log) as process:
        yield Server(process.pid, f"127.0.0.1:{port}", log)


@contextmanager
def running(command: Sequence[str], log: Path, stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run a process until the context ends, then kill it. Its stderr goes to `log`."""
    with log.open("w") as stderr:
        process = subprocess.Popen(
            mortal(*command),
            stdin=subprocess.DEVNULL,
            stdout=stdout or stderr,
            stderr=stderr,
            text=True,
            env=_environment(),
            start_new_session=True,  # this process handles Ctrl-C, and ends it with the context
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def client_command(module: str, order: Any, python: Path | str = sys.executable) -> list[str]:
    """Return the command that runs a module of `benchmarks.clients` with an order, which is a dataclass."""
    return [str(python), "-m", f"benchmarks.clients.{module}", json.dumps(asdict(order))]


def driven(command: Sequence[str], log: Path, timeout: float) -> dict[str, Any]:
    """Run a client process to its end; return the JSON object that it prints.

    Args:
        command: See `client_command`.
        log: File for its stderr.
        timeout: Seconds until it is killed.

    Raises:
        DidNotFinish: It did not end in time.
        BenchmarkError: It failed.
    """
    with running(command, log, subprocess.PIPE) as process:
        try:
            answer, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise DidNotFinish(f"no result within {timeout:g} s: {tail(log)}") from None
        code = process.returncode
    if code != 0:
        raise BenchmarkError(f"a client process ended with exit code {code}: {tail(log)}")
    result: dict[str, Any] = json.loads(answer.splitlines()[-1])
    return result


def tail(log: Path) -> str:
    """Return the end of a log, for an error message."""
    return log.read_text(errors="replace")[-_LOG_TAIL:].strip() or "it wrote nothing"


def _environment() -> Mapping[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    places = [str(Path(__file__).parent.parent), *filter(None, [ours.get("PYTHONPATH")])]
    return ours | {"PYTHONPATH": os.pathsep.join(places)}


@contextmanager
def free_port() -> Iterator[int]:
    """Reserve a port: the kernel gives it to no other process meanwhile. A server can still listen there."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("127.0.0.1", 0))
        yield reservation.getsockname()[1]
