"""A function for workers that are forks of the spawner; its second argument selects the behaviour."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def _descriptors() -> list[str]:
    """The numbers of the streams, and the other files but /dev/null, which multiprocessing opens without a terminal."""
    fds = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1]
    opened = [str(fd) if fd <= 2 else os.readlink(f"/proc/self/fd/{fd}") for fd in fds]
    return [each for each in opened if each != os.devnull]


def _publish_pid(path: Path) -> None:
    """Write this process's PID; the file appears complete, because the test reads it as soon as it exists."""
    draft = path.with_suffix(path.suffix + ".draft")
    draft.write_text(str(os.getpid()))
    draft.rename(path)


def work(folder: str, how: str) -> object:
    """Run the selected behaviour; return a description of the process or write PID files into the folder."""
    rank = os.environ["LOCAL_RANK"]
    if how == "describe":
        print("printed")  # noqa: T201
        return {
            "environment": sorted(os.environ),
            "shown": Path("/proc/self/environ").read_bytes().split(b"\0")[0].decode(),
            "descriptors": _descriptors(),
            "leader": os.getsid(0) == os.getpgid(0) == os.getpid(),
            "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "cwd": os.getcwd(),
        }
    if how == "exit":
        sys.exit(7)
    if how == "raise":
        raise ValueError("no good")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:  # a daemon, without exec
        os.setsid()
        if os.fork() == 0:
            ballast = b"x" * (
                256 << 20
            )  # the kernel takes a while to free it; the dying process stays visible meanwhile
            _publish_pid(Path(folder, f"daemon.{rank}"))
            while ballast:
                signal.pause()
        os._exit(0)
    os.wait()
    _publish_pid(Path(folder, f"main.{rank}"))
    while True:
        signal.pause()
