"""Terminals of 80 columns and 24 lines on two hosts: shells in tmux; each host is a network namespace."""

from __future__ import annotations

import asyncio
import re
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from cli.cli_process import clean_environment
from ha.namespaces import Namespaces, why_no_namespaces
from ha.network import AGENTS, claim_number, missing
from support.waiting import until

WIDTH, HEIGHT = 80, 24
# Seconds, of one command; an installation takes the longest.
PATIENCE = 600.0

# A host has its own name, its own table of names, and its own folder of sockets. Paths in the output are short. Process
# ids have five digits on every machine: names of nodes contain them, and a shorter name changes the layout of a table.
_LAST_PID = "/proc/sys/kernel/ns_last_pid"
_HOST = """\
echo 9999 >{last_pid}
hostname {name}
mount --bind {folder}/hosts /etc/hosts
mount --bind {folder}/demo /srv && cd /srv
mkdir -p -m 0700 /run/rallypoint && mount -t tmpfs -o mode=0700 none /run/rallypoint
export PS1='{name}$ '
exec bash --norc --noprofile -i
"""


def why_not() -> str:
    """Return the reason why this machine has no such terminals; "": it has."""
    if lacking := missing("tmux", "git", "openssl"):
        return f"the transcript needs {', '.join(lacking)}"
    if not Path(_LAST_PID).exists():
        return f"the transcript needs {_LAST_PID}: Linux with CONFIG_CHECKPOINT_RESTORE"
    return why_no_namespaces()


def output(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a command; return its output. Raises CalledProcessError."""
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=PATIENCE, env=environment
    ).stdout


class Terminal:
    """A shell in a window of tmux.

    Attributes:
        prompt: Its prompt, without the space behind it.
    """

    def __init__(self, tmux: Sequence[str], window: str, prompt: str) -> None:
        """Use a window in which the shell has been started; `tmux`: the command that reaches its server."""
        self.prompt = prompt
        self._tmux = tmux
        self._window = window
        self._taken = 0
        self._typed = False

    def lines(self) -> list[str]:
        """Return the lines since the last `take`, with those that scrolled away; a wrapped line is one line."""
        shown = self._do("capture-pane", "-p", "-J", "-S", "-", "-t", self._window)
        return [line.rstrip() for line in shown.rstrip().splitlines()][self._taken :]

    def take(self) -> list[str]:
        """Return the lines since the last call, without the prompt that waits for a command."""
        lines = self.lines()
        if lines and lines[-1] == self.prompt:
            lines.pop()
        self._taken += len(lines)
        self._typed = False
        return lines

    def type(self, command: str) -> None:
        """Type a command and Enter."""
        self._typed = True
        self._do("send-keys", "-t", self._window, "-l", command)
        self._do("send-keys", "-t", self._window, "Enter")

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self._do("send-keys", "-t", self._window, "C-c")

    async def reaches(self, pattern: str) -> None:
        """Wait until the lines since the last `take` have a match of a regular expression.

        Raises:
            AssertionError: They had none for `PATIENCE` seconds.
        """
        match = re.compile(pattern, re.MULTILINE).search
        try:
            await until(lambda: match("\n".join(self.lines())) is not None, pattern, PATIENCE)
        except AssertionError as error:
            raise AssertionError("\n".join([str(error), "the terminal shows:", *self.lines()])) from None

    async def returns(self) -> None:
        """Wait until the command typed last has ended, and the prompt is there again."""
        prompt = re.escape(self.prompt)
        await self.reaches(rf"(?s)\A{prompt} .*^{prompt}\Z" if self._typed else rf"^{prompt}\Z")

    def _do(self, *arguments: str) -> str:
        return output(*self._tmux, *arguments)


class Hosts:
    """Hosts that reach each other by name, and terminals on them.

    Attributes:
        demo: The folder in which the terminals begin, empty at first.
    """

    def __init__(self, folder: Path, network: Namespaces, tmux: Sequence[str]) -> None:
        """Use a network that is open, and a tmux server that has not begun."""
        self.demo = folder / "demo"
        self._folder = folder
        self._network = network
        self._tmux = tmux
        self._number = 0

    async def terminal(self, host: str, *, online: bool = False) -> Terminal:
        """Open a terminal on a host; all hosts share the folder, as hosts with a network file system do.

        Args:
            host: Its name.
            online: Use the network of this machine, which reaches package registries, but no other host.
        """
        self._number += 1
        window = f"{host}-{self._number}"
        script = self._folder / f"{host}.sh"
        script.write_text(_HOST.format(name=host, folder=self._folder, last_pid=_LAST_PID))
        apart = ("unshare", "--uts", "--mount-proc", "--pid", "--fork", "--kill-child")
        command = self._network.command(AGENTS if online else host, *apart, "bash", str(script))
        environment = clean_environment(PIP_DISABLE_PIP_VERSION_CHECK="1", HOME=str(self._folder))
        for name in ("VIRTUAL_ENV", "TMUX"):
            environment.pop(name, None)
        new = ["new-session", "-d", "-s", window, "-x", str(WIDTH), "-y", str(HEIGHT), "--", *command]
        await asyncio.to_thread(output, *self._tmux, *new, environment=environment)
        terminal = Terminal(self._tmux, window, f"{host}$")
        await terminal.returns()
        return terminal

    async def power_off(self, host: str) -> None:
        """End a host as a power cut does."""
        await self._network.power_off(host)


@asynccontextmanager
async def hosts(*names: str) -> AsyncIterator[Hosts]:
    """Hosts with these names, which share a folder."""
    number, claim = claim_number()
    network = Namespaces(number, names)
    with claim, tempfile.TemporaryDirectory(prefix="first_hour_", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        (folder / "demo").mkdir()
        tmux = ["tmux", "-f", "/dev/null", "-S", str(folder / "tmux")]
        await network.open()
        try:
            table = "".join(f"{network.address(name)} {name}\n" for name in names)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{table}")
            yield Hosts(folder, network, tmux)
        finally:
            with suppress(subprocess.CalledProcessError):  # it never began
                await asyncio.to_thread(output, *tmux, "kill-server")
            await network.close()
