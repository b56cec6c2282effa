"""A worker has the terminal and the standard input of `rallypoint run`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from cli.cli_process import RALLYPOINT, clean_environment
from support.mortal import mortal
from support.processes import fresh_marker, gone
from support.terminal import TerminalSession, at_terminal
from support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.integration

_KEYS = termios.ICANON | termios.ECHO | termios.ISIG
_LINES = """
import os, sys
def line():
    read = b""
    while not read.endswith(b"\\n"):
        if not (byte := os.read(0, 1)):
            sys.exit("no more input")
        read += byte
    return read.decode().strip()
"""


@pytest.fixture
def marker() -> Iterator[str]:
    """A marker in the environment of all processes; none of them is left afterwards."""
    with fresh_marker() as marker:
        yield marker
        wait_until(lambda: gone(marker), "the job's processes to be gone")


@pytest.fixture
def job(tmp_path: Path, marker: str) -> Job:
    """The job of a test."""
    return Job(tmp_path, marker)


class Job:
    """A job of one host whose workers run a script."""

    def __init__(self, folder: Path, marker: str) -> None:
        self.folder, self.marker = folder, marker
        names = ("TERM", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_INTERACTIVE")
        self.environment = clean_environment(MARKER=marker)
        for name in names:
            self.environment.pop(name, None)
        self.environment["TERM"] = "xterm-256color"

    def command(self, script: str, *flags: str) -> list[str]:
        (self.folder / "worker.py").write_text(script)
        logs = ("--log-dir", str(self.folder / "logs"))
        return [str(RALLYPOINT), "run", "--standalone", *logs, *flags, str(self.folder / "worker.py")]

    def at_terminal(
        self, script: str, *flags: str, redirect: str = ""
    ) -> AbstractContextManager[TerminalSession]:
        """Run it at a terminal."""
        return at_terminal(*self.command(script, *flags), environment=self.environment, redirect=redirect)

    def piped(self, script: str, *flags: str, stdin: str) -> subprocess.CompletedProcess[str]:
        """Run it with pipes, to its end."""
        return subprocess.run(
            mortal(*self.command(script, *flags)),
            input=stdin,
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=PATIENCE,
            check=False,
        )

    def log(self, stream: str, rank: int = 0, attempt: int = 0) -> str:
        """Return the content of a worker's log file."""
        (path,) = self.folder.glob(f"logs/*/attempt_{attempt}/{rank}/{stream}.log")
        return path.read_bytes().decode()


def test_a_person_debugs_the_only_worker(job: Job) -> None:
    """Line editing works in input() and in breakpoint(), and the log contains the shown output."""
    script = """
import os, sys
print([os.isatty(fd) for fd in range(3)], os.get_terminal_size(), open("/dev/tty").isatty())
print("to stderr", file=sys.stderr)
name = input("name? ")
breakpoint()
print("done")
"""
    with job.at_terminal(script) as terminal:
        terminal.until("[True, True, True] os.terminal_size(columns=80, lines=24) True")
        terminal.until("to stderr")
        terminal.until("name? ")
        terminal.type("Ax\x7fda\r")
        terminal.until("(Pdb) ")
        terminal.type("p na")
        terminal.until("p na")  # each key is echoed at once
        terminal.type("m\x7fme\r")
        terminal.until("'Ada'")
        terminal.until("(Pdb) ")
        terminal.type("\x03")  # the debugger handles it, and the job continues
        terminal.until("--KeyboardInterrupt--")
        terminal.until("(Pdb) ")
        terminal.type("c\r")
        terminal.until("done")
        assert terminal.ended() == 0
        assert terminal.settings == terminal.initial
    shown = job.log("stdout")
    assert "to stderr\nname? " in shown
    assert shown.endswith("done\n")
    assert job.log("stderr") == ""


def test_a_pipe_is_read_to_its_end(job: Job) -> None:
    """The worker reads every byte exactly once."""
    result = subprocess.run(
        mortal(str(RALLYPOINT), "run", "--standalone", "--no-python", "cat"),
        input="hi\n" * 100_000,
        stdout=subprocess.PIPE,
        text=True,
        env=job.environment,
        timeout=PATIENCE,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "hi\n" * 100_000)


def test_a_restarted_worker_reads_on(job: Job) -> None:
    """It continues where its predecessor stopped; of several workers, only local rank 0 reads."""
    script = f"""{_LINES}
if os.environ["RANK"] == "0":
    print(line())
    sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
elif os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    print("nothing" if os.read(0, 1) == b"" else "something")
else:
    import time
    time.sleep(600)
"""
    result = job.piped(script, "--nproc-per-node", "2", "--max-restarts", "1", stdin="one\ntwo\nthree\n")
    assert sorted(result.stdout.splitlines()) == ["nothing", "one", "two"], result.stderr


def test_a_restarted_worker_has_the_terminal_again(job: Job) -> None:
    """After a kill in raw mode the next worker has the initial settings, and reads the keys typed before."""
    script = f"""{_LINES}
import signal, termios, tty
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    print(line())
    tty.setraw(0, termios.TCSANOW)
    os.kill(os.getpid(), signal.SIGKILL)
print(line(), "again")
"""
    with job.at_terminal(script, "--max-restarts", "1") as terminal:
        terminal.until("starting workers")
        terminal.type("one\rtwo\r")
        terminal.until("two again")
        assert terminal.ended() == 0
        assert terminal.settings == terminal.initial
    assert "one\r" not in job.log("stdout")


def test_ctrl_c_ends_the_job(job: Job) -> None:
    """The worker may still prompt for input; the second Ctrl-C kills it, even at a prompt."""
    script = """
import time
try:
    print("it runs")
    time.sleep(600)
except KeyboardInterrupt:
    print("saved as", input("save as? "))
    input("and? ")
"""
    with job.at_terminal(script) as terminal:
        terminal.until("it runs")
        terminal.type("\x03")
        terminal.until("save as? ")
        terminal.type("last.pt\r")
        terminal.until("saved as last.pt")
        terminal.until("and? ")
        time.sleep(0.25)  # sooner, it would count as the first one
        terminal.type("\x03")
        assert terminal.ended() == 130
        assert terminal.settings == terminal.initial
    assert "Ctrl-C again kills them" in terminal.shown
    assert "stopping at once" in terminal.shown


def test_a_window_changes_its_size(job: Job) -> None:
    """The worker receives SIGWINCH, and reads the new size."""
    script = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
print("it runs")
signal.sigwait([signal.SIGWINCH])
print(os.get_terminal_size())
"""
    with job.at_terminal(script) as terminal:
        terminal.until("it runs")
        terminal.resize(50, 132)
        terminal.until("os.terminal_size(columns=132, lines=50)")
        assert terminal.ended() == 0


def test_both_streams_keep_their_order(job: Job) -> None:
    """A progress bar and prints keep their order byte by byte, also in rotated files."""
    script = r"""
import os
for number in range(5000):
    os.write(2, b"\r%4d" % number)
    os.write(1, b"\rline %d\n" % number)
"""
    expected = "".join(f"\r{number:4}\rline {number}\n" for number in range(5000))
    with job.at_terminal(script, "--log-max-size", "16KiB", "--log-keep-files", "100") as terminal:
        assert terminal.ended() == 0
    assert expected.replace("\n", "\r\n") in terminal.shown
    (folder,) = job.folder.glob("logs/*/attempt_0/0")
    rotated = sorted(folder.glob("stdout.log.*"))
    assert len(rotated) > 3
    assert "".join(path.read_bytes().decode() for path in [*rotated, folder / "stdout.log"]) == expected


@pytest.mark.parametrize("colour", [False, True])
def test_the_report_quotes_the_terminal(job: Job, colour: bool) -> None:
    """The reason of a failure is the last line of its traceback, even of a coloured one."""
    script = "raise ValueError('no such layer')"
    if colour:  # as Python 3.13 prints by default
        script = r"""
import sys
sys.stderr.write('''Traceback (most recent call last):
  File \x1b[35m"train.py"\x1b[0m, line \x1b[35m1\x1b[0m, in \x1b[35m<module>\x1b[0m
    \x1b[31mfit\x1b[0m\x1b[1;31m()\x1b[0m
\x1b[1;35mValueError\x1b[0m: \x1b[35mno such layer\x1b[0m
''')
sys.exit(1)
"""
    with job.at_terminal(script) as terminal:
        assert terminal.ended() == 1
    report = terminal.shown.partition("The failure that ended the run")[2]
    assert "reason     ValueError: no such layer\r\n" in report
    assert "/attempt_0/0/stdout.log\r\n" in report
    assert "\x1b[35m" not in report


def test_a_killed_agent_leaves_a_usable_terminal(job: Job) -> None:
    """Another process restores the terminal's settings."""
    with job.at_terminal("print('it runs')\nimport time\ntime.sleep(600)") as terminal:
        terminal.until("it runs")
        wait_until(lambda: not terminal.settings[3] & _KEYS, "keys to be delivered one by one")
        os.kill(terminal.process.pid, signal.SIGKILL)
        terminal.ended()
        wait_until(lambda: terminal.settings == terminal.initial, "the settings to be restored")


@pytest.mark.slow
def test_files_that_were_asked_for_stay_files(job: Job, tmp_path: Path) -> None:
    """Redirected and teed streams are files, as are streams of `rallypoint run` that are no terminal."""
    script = """
import os, sys
os.write(1, b"out\\n")
os.write(2, ("err %s\\n" % [os.isatty(fd) for fd in range(3)]).encode())
"""
    for flags, redirect, seen in (
        (("-r", "3"), "", [False, False, False]),
        (("-t", "1"), "", [True, False, True]),
        (("--local-ranks-filter", "0"), "", [True, True, True]),
        ((), "2>{}/err", [True, True, False]),
        ((), ">{}/out", [True, False, True]),
        ((), ">{0}/out 2>{0}/err", [False, False, False]),
        ((), "</dev/null", [False, True, True]),
    ):
        for log in tmp_path.glob("logs/*"):
            log.rename(tmp_path / f"{log.name}.before")
        with job.at_terminal(script, *flags, redirect=redirect.format(tmp_path)) as terminal:
            assert terminal.ended() == 0, terminal.shown
        logs = job.log("stdout") + job.log("stderr")
        assert logs == f"out\nerr {seen}\n", (flags, redirect)
        elsewhere = "".join(path.read_text() for name in ("out", "err") if (path := tmp_path / name).exists())
        assert ("out" in terminal.shown + elsewhere) is ("-r" not in flags)
        assert ("[default0]:out" in terminal.shown) is ("-t" in flags)
        for name in ("out", "err"):
            (tmp_path / name).unlink(missing_ok=True)


def test_one_of_several_gets_the_terminal(job: Job) -> None:
    """It writes to the terminal directly; output of others is shown with prefix, colours and the remaining width."""
    script = """
import os, sys
names = ("FORCE_COLOR", "TTY_INTERACTIVE", "COLUMNS")
print("rank", os.environ["RANK"], [os.isatty(fd) for fd in range(3)], [os.environ.get(name) for name in names])
if os.environ["RANK"] == "1":
    print("got", input())
"""
    flags = ("--nproc-per-node", "2")
    with job.at_terminal(script, *flags, "--tty", "1", "--tee", "0:3") as terminal:
        shown = (
            "rank 1 [True, True, True] [None, None, None]",
            "[default0]:rank 0 [False, False, False] ['1', '0', '69']\r\n",
        )
        terminal.until_all(*shown)  # in any order
        terminal.type("a line\r")
        assert terminal.ended() == 0
    # Lines of the agent's log may come between, but no output of the other worker.
    assert re.search(r"a line\r\n(\x1b\[2m[^\r]*\r\n)*got a line\r\n", terminal.shown), terminal.shown
    job.environment |= {"NO_COLOR": "1", "COLUMNS": "40"}
    with job.at_terminal(script.replace('"1"', '"0"'), *flags) as terminal:
        rest = "[False, False, False] [None, None, '40']"
        terminal.until_all(f"rank 1 {rest}", f"rank 0 {rest.replace('False', 'True', 1)}\r\n")
        terminal.type("a line\r")
        assert terminal.ended() == 0
    assert "got a line\r\n" in terminal.shown
    refused = job.piped(script, *flags, "--tty", "2", stdin="")
    assert refused.stderr == "Error: --tty: there is no local rank 2; this host has 2, counted from 0\n"


def test_a_job_in_the_background_takes_no_keys(job: Job) -> None:
    """The shell reads them until the job is in the foreground; the job continues after a suspension."""
    script = """
while (line := input("more? ")) != "stop":
    print("got", line)
"""
    command = " ".join(job.command(script))
    shell = ("bash", "--norc", "--noprofile", "-i")
    with at_terminal(*shell, environment={**job.environment, "PS1": "shell> "}) as terminal:
        terminal.until("shell> ")
        shells = terminal.foreground
        terminal.type(f"{command} &\r")
        terminal.until("more? ")
        terminal.type("echo $((6 * 7))\r")
        terminal.until("42\r\n")
        terminal.type("fg\r")
        wait_until(lambda: terminal.foreground != shells, "the job in the foreground")
        terminal.type("one\r")
        terminal.until("got one")
        terminal.until("more? ")
        for number, commands in ((20, "fg"), (30, "bg; fg")):
            terminal.type("\x1a")
            terminal.until("Stopped")
            terminal.until("shell> ")
            terminal.type(f"echo $(({number} + 3))\r")
            terminal.until(f"{number + 3}\r\n")
            terminal.type(f"{commands}\r")
            wait_until(lambda: terminal.foreground != shells, "the job in the foreground")
            terminal.type(f"line {number}\r")
            terminal.until(f"got line {number}")
            terminal.until("more? ")
        terminal.type("stop\r")
        terminal.until("job succeeded")
        terminal.until("shell> ")
        terminal.type("exit\r")
        assert terminal.ended() == 0


def test_a_worker_that_never_reads_does_not_block_the_terminal(job: Job) -> None:
    """Keys are dropped or buffered, and Ctrl-C still works."""
    with job.at_terminal("print('it runs')\nimport time\ntime.sleep(600)") as terminal:
        terminal.until("it runs")
        for _ in range(40):
            terminal.type("x" * 1000)
            terminal.until("x")
        terminal.type("\x03")
        terminal.until("leaving the run")
        assert terminal.ended() == 130


def test_progress_bars_of_rich_are_drawn(job: Job) -> None:
    """A single worker draws a live bar in colours; several print only its last state."""
    script = """
from rich.console import Console
from rich.progress import track
for _ in track(range(3), console=Console()):
    pass
Console().print("[red]end[/red]", Console().width)
"""
    with job.at_terminal(script) as terminal:
        assert terminal.ended() == 0
    assert "\x1b[31mend\x1b[0m \x1b[1;36m80\x1b[0m" in terminal.shown
    assert "\x1b[2K" in terminal.shown  # a line is redrawn
    with job.at_terminal(script, "--nproc-per-node", "2") as terminal:
        assert terminal.ended() == 0
    assert terminal.shown.count("\x1b[31mend\x1b[0m \x1b[1;36m80\x1b[0m") == 2
    assert "\x1b[2K" not in terminal.shown


def test_agents_output_is_complete_when_it_is_much(job: Job) -> None:
    """All lines reach the log and the terminal, even at full speed."""
    lines = 200_000
    with job.at_terminal(
        f"import sys\nsys.stdout.write(''.join(f'{{n}}\\n' for n in range({lines})))"
    ) as terminal:
        assert terminal.ended() == 0
    assert job.log("stdout") == "".join(f"{number}\n" for number in range(lines))
    assert re.search(rf"\r\n{lines - 1}\r\n", terminal.shown)
