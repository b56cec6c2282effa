"""For tests of supervision: process trees that are hard to kill, and a search for living processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from rallypoint.agent.spawner.spawner import watch_forks


def modules_after(statements: str) -> set[str]:
    """Return the names of the modules that a new Python process has loaded after some statements."""
    program = f"{statements}\nimport sys; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(ran.stdout.split())


STUBBORN = """
import os, signal, sys, time
marker, folder = sys.argv[1:3]
signal.signal(signal.SIGTERM, signal.SIG_IGN)

def linger(name):
    open(f"{folder}/{name}.{os.environ.get('LOCAL_RANK', 0)}", "w").close()
    while True:
        signal.pause()

if os.fork() == 0:
    linger("child")
if os.fork() == 0:  # a daemon
    os.setsid()
    if os.fork() == 0:
        if os.fork() == 0:
            linger("daemons-child")
        linger("daemon")
    os._exit(0)
os.wait()
if os.fork() == 0:  # a daemon with nothing of ours in its environment
    os.setsid()
    if os.fork() == 0:
        open(f"{folder}/stranger.{os.environ.get('LOCAL_RANK', 0)}", "w").close()
        program = "import signal, sys; signal.signal(15, 1); signal.pause()"
        os.execve(sys.executable, [sys.executable, "-c", program, marker], {})
    os._exit(0)
os.wait()
if os.fork() == 0:  # one that is never the same process for long
    open(f"{folder}/hopper.{os.environ.get('LOCAL_RANK', 0)}", "w").close()
    while True:
        time.sleep(0.005)
        if os.fork():
            os._exit(0)
linger("main")
"""
"""A worker that ignores SIGTERM, forks, daemonises and hops. Arguments: a marker, and a folder in which each of its
processes creates a file at its start."""

STUBBORN_PARTS = ("child", "daemon", "daemons-child", "stranger", "hopper", "main")


def stubborn(marker: str, folder: Path) -> list[str]:
    """The command of a stubborn worker."""
    return [sys.executable, "-c", STUBBORN, marker, str(folder)]


def all_there(folder: Path, workers: int) -> bool:
    """Return True if every part of that many stubborn workers has started."""
    return all((folder / f"{part}.{rank}").exists() for part in STUBBORN_PARTS for rank in range(workers))


def living(marker: str) -> list[int]:
    """Return the pids of all processes, except zombies, with the marker in their arguments or environment."""
    found = []
    # Youngest first: a hopper lives for the shortest time.
    for pid in sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True):
        if pid == os.getpid():
            continue
        with contextlib.suppress(OSError):
            folder = Path("/proc", str(pid))
            # Both are empty for a zombie.
            if (
                marker.encode() in folder.joinpath("cmdline").read_bytes()
                or marker.encode() in folder.joinpath("environ").read_bytes()
            ):
                found.append(pid)
    return found


def gone(marker: str, besides: int | Collection[int] = ()) -> bool:
    """Return True if no process has the marker. A scan may miss a hopper if a fork occurs: scan again then."""
    spared = {besides} if isinstance(besides, int) else set(besides)
    for _ in range(20):
        before = watch_forks()
        if set(living(marker)) - spared:
            return False
        if watch_forks() == before:
            return True
    return True


@contextlib.contextmanager
def fresh_marker() -> Iterator[str]:
    """Yield a marker that no other process has; at the end, kill all processes that have it."""
    marker = f"marker-{uuid.uuid4().hex}"
    try:
        yield marker
    finally:
        while not gone(marker):
            for pid in living(marker):
                with contextlib.suppress(ProcessLookupError):
                    group = os.getpgid(pid)
                    os.kill(pid, signal.SIGKILL)
                    # A hopper changes its pid too fast to be killed alone.
                    if group not in (0, 1, os.getpgid(0)):
                        os.killpg(group, signal.SIGKILL)


def stop_and_kill(pids: Iterable[int]) -> None:
    """Send SIGSTOP to all, then SIGKILL to each: none acts because of another's death.

    A later one may be dead already: what outlives the first kills the rest of the tree.
    """
    pids = list(pids)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
