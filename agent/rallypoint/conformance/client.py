"""The program under test: its process and its output; and the workers that an agent starts."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from rallypoint.rpc.endpoint import SettingError
from rallypoint.rpc.text import clip_start, printable

_ENDED = 5.0  # seconds that a killed process may take to end
_SHOWN_BYTES = 1_500
_LONGEST_LINE = 16 * 1024 * 1024  # bytes: a value of 4 MiB, in hexadecimal, and more
# In the client's environment, so that the kit sees whether workers get it. No client reads it.
PLANTED_SECRET = "RALLYPOINT_TLS_CONFORMANCE"  # noqa: S105 (a name)


def parse_command(option: str, command: str, placeholders: Sequence[str]) -> list[str]:
    """Split a command line, and check it; `placeholders`: the names that must be in it, in braces.

    Raises:
        SettingError: It is not usable; one line that names the mistake.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise SettingError(f"{option}: {command!r} can't be split into words: {error}") from None
    if not words:
        raise SettingError(f"{option} COMMAND is missing: the command line of the program under test")
    text = command.replace("{addresses}", "{address}")  # either will do
    missing = [f"{{{name}}}" for name in placeholders if f"{{{name}}}" not in text]
    if missing:
        raise SettingError(
            f"{option}: {', '.join(missing)} is missing in the command; the kit puts a value there"
        )
    if shutil.which(words[0]) is None:
        raise SettingError(f"{option}: there is no program {words[0]!r}")
    return words


@dataclass(frozen=True)
class StartedWorker:
    """A worker process that has begun; `bound`: True if it could bind the master port; None: it did not have to."""

    pid: int
    folder: Path = field(repr=False)
    environment: Mapping[str, str] = field(repr=False)
    child: bool
    bound: bool | None

    @property
    def round(self) -> str:
        """RALLYPOINT_ROUND."""
        return self.environment.get("RALLYPOINT_ROUND", "")

    @property
    def alive(self) -> bool:
        """True while it lives; a zombie does not."""
        return _command_line(self.pid).find(os.fsencode(self.folder)) >= 0

    @property
    def terminated(self) -> bool:
        """True if it got SIGTERM."""
        return (self.folder / f"{self.pid}.term").exists()

    def end(self, code: int) -> None:
        """Make it end with an exit code."""
        self._order("end", code)

    def turn(self, times: int) -> None:
        """Make it end its timer, and start it again so many times."""
        self._order("turns", times)

    def _order(self, name: str, number: int) -> None:
        order = self.folder / f"{self.pid}.{name}"
        draft = order.with_suffix(".draft")
        draft.write_text(str(number))
        draft.rename(order)  # the worker reads it as soon as it is there


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


class TestedProcess:
    """One process of a program under test, in a folder of its own."""

    def __init__(self, words: list[str], folder: Path) -> None:
        """Make the folder, which does not exist yet; start nothing yet."""
        folder.mkdir(parents=True)
        self._folder = folder
        self._output = folder / "output"
        self._process: asyncio.subprocess.Process | None = None
        self._words = words

    async def launch(
        self, environment: Mapping[str, str], *, pipes: bool = False
    ) -> asyncio.subprocess.Process:
        """Start it, in a session of its own: Ctrl-C reaches the kit alone, which ends the program.

        `pipes`: its standard input and output are the kit's; otherwise it has no input.
        """
        temporary = self._folder / "tmp"
        temporary.mkdir()
        with self._output.open("wb") as file:
            self._process = await asyncio.create_subprocess_exec(
                *self._words,
                stdin=asyncio.subprocess.PIPE if pipes else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if pipes else file,
                stderr=file,
                env={**environment, "TMPDIR": str(temporary)},
                start_new_session=True,
                limit=_LONGEST_LINE,
            )
        return self._process

    @property
    def exit_code(self) -> int | None:
        """Its exit code; None: it runs."""
        return self._process.returncode if self._process is not None else None

    @property
    def output(self) -> str:
        """The output so far."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    @property
    def last_lines(self) -> str:
        """The end of the output, on one line."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return printable(clip_start(" | ".join(lines[-5:]), _SHOWN_BYTES, "…")) or "no output"

    async def kill(self) -> None:
        """Kill it, and remove its folder: workers that are left end by themselves then."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _ENDED)
        shutil.rmtree(self._folder, ignore_errors=True)


class TestedClient(TestedProcess):
    """One process of an agent.

    Attributes:
        given: The placeholders that its command line has.
    """

    def __init__(self, words: list[str], folder: Path, values: Mapping[str, str]) -> None:
        """Set up; start nothing yet.

        Args:
            words: Its command line, with placeholders.
            folder: A folder that does not exist yet.
            values: The values of the placeholders, without `worker`.
        """
        super().__init__(words, folder)
        self.given = {name for name in values if any(f"{{{name}}}" in word for word in words)}
        self._workers = folder / "workers"
        self._seen: dict[int, StartedWorker] = {}
        program = self._workers / "worker.py"
        for name, value in {**values, "worker": str(program)}.items():
            self._words = [word.replace(f"{{{name}}}", value) for word in self._words]
        self._workers.mkdir()
        text = files("rallypoint.conformance").joinpath("worker_program.py").read_text()
        program.write_text(f"#!{sys.executable} -IS\n{text}")
        program.chmod(0o700)
        self.plan()

    def plan(self, **plan: object) -> None:
        """Decide how workers behave that start from now on; see `worker_program`."""
        (self._workers / "plan.json").write_text(json.dumps(plan))

    async def start(self) -> None:
        """Start it, with a credential in its environment."""
        await self.launch({**os.environ, PLANTED_SECRET: "secret"})

    @property
    def workers(self) -> list[StartedWorker]:
        """All workers that have begun so far, without their children."""
        return [each for each in self._processes() if not each.child]

    @property
    def alive(self) -> list[StartedWorker]:
        """The workers that are alive, without their children."""
        return [each for each in self.workers if each.alive]

    @property
    def children(self) -> list[StartedWorker]:
        """The living child processes of workers."""
        return [each for each in self._processes() if each.child and each.alive]

    def _processes(self) -> list[StartedWorker]:
        for path in self._workers.glob("*.json"):
            if path.stem.isdigit() and (pid := int(path.stem)) not in self._seen:
                record = json.loads(path.read_text())
                self._seen[pid] = StartedWorker(
                    pid, self._workers, record["environment"], record["child"], record["bound"]
                )
        return list(self._seen.values())

    def terminate(self) -> None:
        """Send SIGTERM to it."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
