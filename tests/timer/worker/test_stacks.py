"""A worker dumps the stacks of its threads at the agent's request, and is otherwise not disturbed."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.timer.worker.process import STACK_SIGNAL, STACKS_VARIABLE
from support.waiting import PATIENCE


class Fifo:
    """The agent's end of the FIFO."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def has_more(self, timeout: float) -> bool:
        """Return True if there is data to read within `timeout` seconds."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        return any(event & select.POLLIN for _, event in poll.poll(timeout * 1000))

    def read_until(self, text: str) -> str:
        """Return all output up to and including the text."""
        seen = ""
        while text not in seen:
            assert self.has_more(PATIENCE), f"only this came: {seen}"
            seen += os.read(self.descriptor, 65536).decode()
        return seen


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Fifo]:
    fifo = Fifo(tmp_path / "stacks")
    yield fifo
    os.close(fifo.descriptor)


class Program:
    """A worker's program, killed at the end of the block."""

    def __init__(self, path: str | None, *lines: str) -> None:
        environment = {key: value for key, value in os.environ.items() if key != STACKS_VARIABLE}
        if path is not None:
            environment[STACKS_VARIABLE] = path
        start = ("import os, signal, sys, threading, time", "from rallypoint.timer import configure, expires")
        self.process = subprocess.Popen(
            [sys.executable, "-c", "\n".join((*start, *lines))],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def says(self) -> str:
        """Return its next line of output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def catches(self) -> bool:
        """Return True if it has a handler for the signal, according to the kernel."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
        return bool(int(mask, 16) >> STACK_SIGNAL - 1 & 1)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


WAIT = ("print('ready', flush=True)", "sys.stdin.readline()")


def test_the_stacks_of_all_threads_are_shown(fifo: Fifo) -> None:
    """They are shown at each request; the worker goes on."""
    lines = (
        "def loitering(): threading.Event().wait()",
        "threading.Thread(target=loitering, daemon=True).start()",
        "configure(required=False)",
        "def waiting():",
        "    print('ready', flush=True)",
        "    for line in sys.stdin: print(line, end='', flush=True)",
        "waiting()",
    )
    with Program(fifo.path, *lines) as worker:
        assert worker.says() == "ready"
        assert worker.catches()
        assert worker.process.stdin is not None
        for _ in range(3):
            os.kill(worker.process.pid, STACK_SIGNAL)
            shown = fifo.read_until("in <module>")
            assert "in loitering" in shown
            assert "in waiting" in shown
            # It replies after the handler: while one thread runs it, another signal would show nothing.
            worker.process.stdin.write("unharmed\n")
            worker.process.stdin.flush()
            assert worker.says() == "unharmed"


def test_files_of_a_program_that_closed_all_others_are_not_written_to(fifo: Fifo) -> None:
    """Files opened then get the numbers of the closed ones."""
    lines = (
        "configure(required=False)",
        "os.closerange(3, 1024)",
        "read, write = os.pipe()",
        "os.set_blocking(read, False)",
        "others = [os.dup(write) for _ in range(50)]",
        f"os.kill(os.getpid(), {int(STACK_SIGNAL)})",
        "try: print(os.read(read, 65536), flush=True)",
        "except BlockingIOError: print('nothing', flush=True)",
    )
    with Program(fifo.path, *lines) as worker:
        assert worker.says() == "nothing"


@pytest.mark.parametrize(
    "use", ["with expires(60): pass", "from rallypoint.timer.worker.expires import progress; progress(1)"]
)
def test_the_first_use_is_enough(fifo: Fifo, use: str) -> None:
    """Any of the calls is; importing alone changes nothing."""
    before = ("print('imported', flush=True)", "sys.stdin.readline()")
    agentless = "os.environ['RALLYPOINT_TIMER_SOCKET'] = '/nowhere'"
    with Program(fifo.path, *before, agentless, use, *WAIT) as worker:
        assert worker.says() == "imported"
        assert not worker.catches()
        assert worker.process.stdin is not None
        worker.process.stdin.write("\n")
        worker.process.stdin.flush()
        assert worker.says() == "ready"
        assert worker.catches()


def test_a_hang_in_c_code_that_holds_the_interpreter_is_shown(fifo: Fifo) -> None:
    """No Python code runs any more; the signal's handler needs none."""
    lines = (
        "configure(required=False)",
        "import re",
        "def stuck():",
        "    print('ready', flush=True)",
        "    re.match(r'(a+)+b', 'a' * 60)",
        "stuck()",
    )
    with Program(fifo.path, *lines) as worker:
        assert worker.says() == "ready"
        os.kill(worker.process.pid, STACK_SIGNAL)
        assert "in stuck" in fifo.read_until("in <module>")


@pytest.mark.parametrize(
    "own",
    [
        "signal.signal(signal.SIGRTMIN + 7, lambda *_: print('mine', flush=True))",
        # Installed like a handler of C code, which Python does not see.
        "import faulthandler; faulthandler.register(signal.SIGRTMIN + 7, file=sys.stdout)",
    ],
)
def test_a_handler_of_the_programs_own_is_kept(fifo: Fifo, own: str) -> None:
    """It was there first, for a purpose of its own."""
    with Program(fifo.path, own, "configure(required=False)", *WAIT) as worker:
        assert worker.says() == "ready"
        os.kill(worker.process.pid, STACK_SIGNAL)
        assert worker.says()
        assert not fifo.has_more(0)


def test_a_signal_that_the_program_ignores_stays_ignored(fifo: Fifo) -> None:
    """The program's own choice is kept."""
    ignore = "signal.signal(signal.SIGRTMIN + 7, signal.SIG_IGN)"
    with Program(fifo.path, ignore, "configure(required=False)", *WAIT) as worker:
        assert worker.says() == "ready"
        assert not worker.catches()


@pytest.mark.parametrize("path", [None, "", "/nowhere/at/all", "/dev/null/x"])
def test_without_a_fifo_nothing_happens(path: str | None) -> None:
    """The worker has no handler then, so the agent does not send the signal."""
    with Program(path, "configure(required=False)", *WAIT) as worker:
        assert worker.says() == "ready"
        assert not worker.catches()


def test_a_fifo_without_a_reader_is_not_waited_for(tmp_path: Path) -> None:
    """Opening one would block otherwise."""
    os.mkfifo(tmp_path / "stacks")
    with Program(str(tmp_path / "stacks"), "configure(required=False)", *WAIT) as worker:
        assert worker.says() == "ready"
        assert not worker.catches()


def test_a_fifo_that_is_full_is_not_waited_for(fifo: Fifo) -> None:
    """Output that does not fit is lost, and the worker goes on."""
    lines = (
        "configure(required=False)",
        "print('ready', flush=True)",
        "print(sys.stdin.readline(), flush=True)",
    )
    with Program(fifo.path, *lines) as worker:
        assert worker.says() == "ready"
        for _ in range(2000):
            os.kill(worker.process.pid, STACK_SIGNAL)
        assert worker.process.stdin is not None
        worker.process.stdin.write("unharmed\n")
        worker.process.stdin.flush()
        assert worker.says() == "unharmed"


def test_a_forked_child_answers_for_itself(fifo: Fifo) -> None:
    """A data loader can hang as well as its worker."""
    lines = (
        "configure(required=False)",
        "def loading():",
        "    print(os.getpid(), flush=True)",
        "    sys.stdin.readline()",
        "    os._exit(0)",
        "if os.fork() == 0: loading()",
        "os.wait()",
    )
    with Program(fifo.path, *lines) as worker:
        child = int(worker.says())
        os.kill(child, STACK_SIGNAL)
        assert "in loading" in fifo.read_until("in <module>")
        os.kill(child, signal.SIGKILL)


def test_a_program_started_by_a_worker_does_not_inherit_the_fifo(fifo: Fifo) -> None:
    """The agent waits for the end of the FIFO's writers, which must not outlive the worker."""
    lines = (
        "configure(required=False)",
        "import subprocess",
        "subprocess.run([sys.executable, '-c', 'import os; "
        'print([os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") '
        'if os.path.exists(f"/proc/self/fd/{n}")])\'], close_fds=False)',
    )
    with Program(fifo.path, *lines) as worker:
        assert fifo.path not in worker.says()
