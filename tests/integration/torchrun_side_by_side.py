"""Typical first scenes under torchrun and under `rallypoint run`: the first useful line, and the time until it.

    PYTHONPATH=tests .venv/torch/bin/python -m integration.torchrun_side_by_side            # each scene five times
    PYTHONPATH=tests .venv/torch/bin/python -m integration.torchrun_side_by_side --times 1 hello requeue

There is one worker, which does not import torch, so that the launcher takes nearly all of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

from cli.cli_process import clean_environment, service
from integration.torchrun_twice import LAUNCHERS, PATIENCE
from support.mortal import mortal
from support.ports import free_port
from support.small_cgroup import GLUTTON, small_cgroup
from support.terminal import at_terminal

_LONGEST = 110  # characters of a line in the table
_MEMORY = 64 << 20  # bytes for the worker of the out-of-memory scene
_PREFIX = re.compile(r"[EWI]\d{4} \S+ \d+ \S+\] |\d\d:\d\d:\d\d ")
_STORE = (
    "import sys, torch.distributed as dist\n"
    "store = dist.TCPStore('127.0.0.1', int(sys.argv[1]), is_master=True, wait_for_workers=False)\n"
    "print('ready', flush=True)\n"
    "sys.stdin.read()\n"
)
"""A store of torch's c10d rendezvous that outlives a job; it ends when its standard input ends."""


@dataclass(frozen=True)
class Scene:
    """An event that a new user meets.

    Attributes:
        event: Its text in the table.
        useful: The definition of the first useful line, the same for both launchers.
        line: A regular expression of that line, searched in each line of stdout and stderr.
        source: The program of the worker; empty: `program` names it.
        program: The command line after the flags.
        stdin: Text on standard input.
        terminal: True if all three streams are a terminal.
        again: True if it is the second start of a run that has failed.
        outlived: True if the rendezvous of this run outlives the job.
    """

    event: str
    useful: str
    line: str
    source: str = ""
    program: Sequence[str] = ("program.py",)
    stdin: str = ""
    terminal: bool = False
    again: bool = False
    outlived: bool = False


_FAILS_ONCE = """
import pathlib, sys
marker = pathlib.Path("started")
if not marker.exists():
    marker.touch()
    sys.exit(3)
print("running again", flush=True)
"""
_REQUEUED = Scene(
    "requeue: the same `--rdzv-id` once more, after the job has failed; an agent hosts the rendezvous",
    "the second job's own output, or the refusal",
    r"^running again|RendezvousClosedError|RUN_CLOSED|is closed",
    _FAILS_ONCE,
    again=True,
)
SCENES: Mapping[str, Scene] = {
    "hello": Scene(
        "hello", "the program's own output", r"^hello from", "print('hello from a worker', flush=True)"
    ),
    "missing": Scene("the script is missing", "names the file", r"missing\.py'", program=["missing.py"]),
    "exit": Scene(
        "`sys.exit(3)`",
        "has the exit code and the rank",
        r"(?i)rank.*code\W+3\b|code\W+3\b.*rank",
        "import sys; sys.exit(3)",
    ),
    "segfault": Scene(
        "a segmentation fault", "names the signal", "SIGSEGV", "import ctypes; ctypes.string_at(0)"
    ),
    "exception": Scene(
        "an exception",
        "a line of the launcher's with the text of the exception",
        r"^.+ValueError: a bad batch",
        "raise ValueError('a bad batch')",
    ),
    "traceback": Scene(
        "the same",
        "the last line of the worker's own traceback",
        r"^ValueError: a bad batch",
        "raise ValueError('a bad batch')",
    ),
    "oom": Scene(
        "the kernel's OOM killer, in a memory cgroup of 64 MiB",
        "names the kill",
        r"SIGKILL|OOM",
        "import sys; open(sys.argv[1], 'w').write('0')\n" + GLUTTON,
        program=["program.py", "{procs}"],
    ),
    "stdin": Scene(
        r"`echo hi \| … --no-python cat`", "the echo", r"^hi$", program=["--no-python", "cat"], stdin="hi\n"
    ),
    "breakpoint": Scene(
        "`breakpoint()` at a terminal",
        "the prompt of pdb",
        r"\(Pdb\) ",
        "breakpoint()\nprint('done')",
        terminal=True,
    ),
    "requeue": _REQUEUED,
    "requeue-service": Scene(
        "the same, with a rendezvous that outlives the job: a TCPStore, or `rallypoint serve rendezvous`",
        _REQUEUED.useful,
        _REQUEUED.line,
        _FAILS_ONCE,
        again=True,
        outlived=True,
    ),
}


@dataclass(frozen=True)
class Outcome:
    """One run of a scene under one launcher.

    Attributes:
        seconds: From the start of the launcher to the first useful line; None: there was none.
        line: That line as printed; empty: there was none.
        ended: Seconds until the end of the launcher.
        exit_code: Exit code of the launcher.
        output: All lines, for the diagnosis of a failure.
    """

    seconds: float | None
    line: str
    ended: float
    exit_code: int
    output: str

    @property
    def text(self) -> str:
        """The line without time, source and folders of this machine, cut to the width of the table."""
        text = re.sub(r"/\S*/(?=[\w.]+)", "", _PREFIX.sub("", self.line)).strip()
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def play(scene: Scene, launcher: str, folder: Path) -> Outcome:
    """Play a scene under a launcher, in an empty folder."""
    folder.mkdir(parents=True)
    (folder / "temporary").mkdir()
    (folder / "program.py").write_text(scene.source)
    environment = clean_environment(TMPDIR=str(folder / "temporary"))
    with contextlib.ExitStack() as stack:
        flags = (
            stack.enter_context(_rendezvous(launcher, scene.outlived)) if scene.again else ["--standalone"]
        )
        program = list(scene.program)
        if "{procs}" in program:
            program[-1] = str(stack.enter_context(small_cgroup(_MEMORY)) / "cgroup.procs")
        command = [*LAUNCHERS[launcher], *flags, *program]
        if scene.again:
            first = _with_pipes(scene, command, environment, folder)
            assert first.exit_code == 1, first.output
        return (_at_terminal if scene.terminal else _with_pipes)(scene, command, environment, folder)


@contextlib.contextmanager
def _rendezvous(launcher: str, outlived: bool) -> Iterator[list[str]]:
    """Yield the flags of a run with an id."""
    run = ["--nnodes", "1", "--rdzv-id", "job-17"]
    endpoint = f"127.0.0.1:{free_port()}"
    if not outlived:
        yield [*run, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    elif launcher == "rallypoint":
        with service("rendezvous", "--journal", "memory") as address:
            yield [*run, "--rdzv-endpoint", address]
    else:
        store = mortal(sys.executable, "-c", _STORE, endpoint.partition(":")[2])
        with subprocess.Popen(store, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
            yield [*run, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-conf", "is_host=0"]
            process.communicate()


def _with_pipes(
    scene: Scene, command: Sequence[str], environment: Mapping[str, str], folder: Path
) -> Outcome:
    began = time.monotonic()
    found: tuple[float | None, str] = (None, "")
    output = []
    with subprocess.Popen(
        mortal(*command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=folder,
        env=environment,
    ) as process:
        late = threading.Timer(PATIENCE, process.kill)
        late.start()
        assert process.stdin
        assert process.stdout
        process.stdin.write(scene.stdin)
        process.stdin.close()
        for line in process.stdout:
            if not found[1] and re.search(scene.line, line):
                found = (time.monotonic() - began, line)
            output.append(line)
        exit_code = process.wait()
        late.cancel()
    return Outcome(*found, time.monotonic() - began, exit_code, "".join(output))


def _at_terminal(
    scene: Scene, command: Sequence[str], environment: Mapping[str, str], folder: Path
) -> Outcome:
    """Play the scene of the debugger."""
    began = time.monotonic()
    with at_terminal(*command, environment=environment, folder=folder) as terminal:
        terminal.until("(Pdb) ")
        seconds = time.monotonic() - began
        terminal.type("continue\r")
        exit_code = terminal.ended()
    return Outcome(seconds, "(Pdb)", time.monotonic() - began, exit_code, terminal.shown)


def cell(outcomes: Sequence[Outcome]) -> str:
    """Format the outcomes of a scene under a launcher as a cell of the table."""
    last = outcomes[-1]
    exit_code = "/".join(sorted({str(outcome.exit_code) for outcome in outcomes}))
    seconds = [outcome.seconds for outcome in outcomes if outcome.seconds is not None]
    if len(seconds) < len(outcomes):
        return f"no such line; exit code {exit_code} after {median(o.ended for o in outcomes):.2f} s"
    return f"{median(seconds):.2f} s: `{last.text}`; exit code {exit_code}"


def main() -> None:
    """Play scenes in turns under both launchers, and print the table."""
    parser = argparse.ArgumentParser(
        description="Compare the first useful lines of torchrun and rallypoint run."
    )
    parser.add_argument(
        "scenes", nargs="*", metavar="SCENE", help=f"of {', '.join(SCENES)}; all if none is given"
    )
    parser.add_argument("--times", type=int, default=5, help="times to play each; the table has the median")
    options = parser.parse_args()
    if unknown := set(options.scenes) - SCENES.keys():
        parser.error(f"no scene has the name {', '.join(sorted(unknown))}")
    names = options.scenes or list(SCENES)
    outcomes: dict[tuple[str, str], list[Outcome]] = {}
    with tempfile.TemporaryDirectory(prefix="side-by-side-") as temporary:
        for time_ in range(options.times):
            for name in names:
                for launcher in LAUNCHERS:
                    try:
                        outcome = play(SCENES[name], launcher, Path(temporary, f"{name}-{launcher}-{time_}"))
                    except pytest.skip.Exception as missing:
                        print(f"{name}: left out: {missing}", file=sys.stderr)
                        continue
                    outcomes.setdefault((name, launcher), []).append(outcome)
                    print(f"{name} {launcher}: {cell([outcome])}", file=sys.stderr, flush=True)
    print("| event | first useful line | `torchrun` | `rallypoint run` |\n| --- | --- | --- | --- |")
    for name in names:
        if (name, "torchrun") in outcomes:
            cells = [cell(outcomes[name, launcher]) for launcher in LAUNCHERS]
            print(f"| {SCENES[name].event} | {SCENES[name].useful} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
