"""Runs a command line under torchrun and `rallypoint run`, and records the environment and output of the workers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from cli.cli_process import clean_environment
from integration.torchrun_cases import PROBE, Case
from support.mortal import mortal
from support.ports import free_port
from support.terminal import at_terminal

PATIENCE = 120.0
"""Seconds that a job may take on a busy machine."""

_BIN = Path(sys.executable).parent
LAUNCHERS: Mapping[str, tuple[str, ...]] = {
    "torchrun": (str(_BIN / "torchrun"),),
    "rallypoint": (str(_BIN / "rallypoint"), "run"),
}
# The probe's lines, with the launcher's prefix. (Indented ones are quotes in a failure report.)
_LINE = re.compile(r"^(?:\S.*?)??(?:out|err) \d+ (?:apple|orange)$", re.MULTILINE)
_MADE_UP = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|standalone-[0-9a-f]{8}")


@dataclass(frozen=True)
class Worker:
    """The record of one start of a worker.

    Attributes:
        environment: The variables that are new or have another value than before.
        rest: Arguments, interpreter, working directory and the like.
    """

    environment: Mapping[str, str]
    rest: Mapping[str, Any]


@dataclass(frozen=True)
class Seen:
    """The result of a command line.

    Attributes:
        exit_codes: Exit code of each node.
        workers: Records by rank and restart count.
        stdout: Lines of the workers on the console, sorted.
        stderr: The same for stderr.
        files: Content by path below the folder of logs; random parts of a name are `*`.
        `said`: All output of the launcher, for the diagnosis of a failure.
    """

    exit_codes: tuple[int, ...]
    workers: Mapping[str, Worker]
    stdout: tuple[str, ...]
    stderr: tuple[str, ...]
    files: Mapping[str, str]
    said: str = field(compare=False)


def see(case: Case, launcher: str, folder: Path) -> Seen:
    """Run a case to its end under one launcher, in an empty folder."""
    for name in ("probe", "logs", "temporary"):
        (folder / name).mkdir(parents=True)
    shutil.copy(Path(__file__).with_name(PROBE), folder)
    (folder / PROBE).chmod(0o755)
    port = free_port(2)
    places = {"logs": folder / "logs", "port": port, "folder": folder, "python": sys.executable}
    environment = clean_environment(
        **{name: _put(value, places) for name, value in case.environment.items()},
        PROBE_FOLDER=str(folder / "probe"),
        TMPDIR=str(folder / "temporary"),
    )
    command = LAUNCHERS[launcher]
    if case.module and launcher == "torchrun":
        command = (str(_BIN / "python3"), "-m", case.module)  # the interpreter of torchrun
    arguments = [(*case.flags, *more, *case.program) for more in case.nodes]
    if case.here and launcher == "rallypoint":
        arguments = [case.here]
    commands = [[*command, *(_put(argument, places) for argument in of_node)] for of_node in arguments]
    exit_codes, said = (_at_terminal if case.terminal else _with_pipes)(case, commands, environment, folder)
    probes = sorted((folder / "probe").iterdir())
    return Seen(
        exit_codes=exit_codes,
        workers={path.name: _worker(path, environment, folder, port) for path in probes},
        stdout=_lines("".join(stdout for stdout, _ in said)),
        stderr=_lines("".join(stderr for _, stderr in said)),
        files=_files(folder / "logs"),
        said="\n".join(part for pair in said for part in pair),
    )


_Outputs: TypeAlias = tuple[tuple[int, ...], list[tuple[str, str]]]


def _with_pipes(
    case: Case, commands: Sequence[Sequence[str]], environment: Mapping[str, str], folder: Path
) -> _Outputs:
    """Run nodes; return their exit codes and output."""
    nodes = [
        subprocess.Popen(
            mortal(*command),
            stdin=subprocess.PIPE if case.stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment,
        )
        for command in commands
    ]
    said = [node.communicate(case.stdin or None, timeout=PATIENCE) for node in nodes]
    return tuple(node.returncode for node in nodes), said


def _at_terminal(
    case: Case, commands: Sequence[Sequence[str]], environment: Mapping[str, str], folder: Path
) -> _Outputs:
    (command,) = commands
    with at_terminal(*command, environment=environment, folder=folder) as terminal:
        terminal.type(case.stdin)
        exit_code = terminal.ended()
    return (exit_code,), [(terminal.shown.replace("\r\n", "\n"), "")]


def _put(argument: str, places: Mapping[str, object]) -> str:
    for name, place in places.items():
        argument = argument.replace(f"{{{name}}}", str(place))
    return argument


def _worker(path: Path, environment: Mapping[str, str], folder: Path, port: int) -> Worker:
    seen = json.loads(path.read_text())
    given = seen.pop("environment")
    changed = {
        name: _regular(value, folder) for name, value in given.items() if environment.get(name) != value
    }
    changed["MASTER_PORT"] = "as given" if given["MASTER_PORT"] == str(port) else "some free port"
    seen = {name: _regular(value, folder) for name, value in seen.items()}
    return Worker(changed, seen)


def _regular(value: Any, folder: Path) -> Any:
    """Replace values that are random for every job."""
    if not isinstance(value, str):
        return value
    value = _MADE_UP.sub("<made up>", value.replace(str(folder), "<folder>"))
    value = re.sub(r"/temporary/(torchelastic|rallypoint)_\w+", "/temporary/*", value)
    return re.sub(r"[^/]+_\w{8}/attempt_", "*/attempt_", value)


def _lines(text: str) -> tuple[str, ...]:
    return tuple(sorted(found.group() for found in _LINE.finditer(text)))


def _files(logs: Path) -> dict[str, str]:
    def name(path: Path) -> str:
        parts = list(path.relative_to(logs).parts)
        parts[0] = _MADE_UP.sub("<made up>", re.sub(r"_\w{8}$", "_*", parts[0]))
        return "/".join(parts)

    def content(path: Path) -> str:
        text = path.read_text(errors="replace")
        return text if path.name == "reply.json" else "\n".join(_lines(text))

    return {name(path): content(path) for path in sorted(logs.rglob("*")) if path.is_file()}
