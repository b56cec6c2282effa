"""Files of SQLite journals, and processes that write them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from rallypoint.rendezvous.journal.journal import Entry, JournalError, Recovered
from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rendezvous.journal.entries import change, record
from support.waiting import PATIENCE

TESTS = Path(__file__).parents[2]


async def reopen(path: Path) -> Recovered:
    """Return the contents that the next process finds."""
    journal = SqliteJournal(path)
    try:
        return await journal.open()
    finally:
        await journal.close()


def recover(path: Path) -> Recovered:
    """As `reopen`, without a running event loop."""
    return asyncio.run(reopen(path))


async def append(path: Path, *calls: Sequence[Entry]) -> None:
    """Open a journal, append call by call, and close it."""
    journal = SqliteJournal(path)
    try:
        await journal.open()
        for entries in calls:
            await journal.append(entries)
    finally:
        await journal.close()


def fill(path: Path) -> None:
    """Make a journal that spans several pages, and close it."""
    records = [record(revision, padding=100) for revision in range(1, 101)]
    values = [change(f"key{number}", b"%d" % number * 20) for number in range(100)]
    asyncio.run(append(path, records, values))


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file of a folder but the lock."""
    return {each.name: each.read_bytes() for each in folder.iterdir() if not each.name.endswith(".lock")}


def refused(path: Path) -> str:
    """Return the message with which a journal is refused; its folder must stay as it was, to the last byte."""
    before = contents(path.parent)
    with pytest.raises(JournalError) as refusal:
        recover(path)
    assert contents(path.parent) == before
    message = str(refusal.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def child(
    script: str, *arguments: object, under: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a process that runs a script with the imports of these tests.

    Args:
        script: The code; `path` is its first argument.
        arguments: Of the script.
        under: A command that runs it.
        environment: On top of this process's.
    """
    head = f"""
        import asyncio, os, resource, signal, sys
        sys.path.insert(0, {str(TESTS)!r})
        from pathlib import Path
        from rallypoint.rendezvous.journal.journal import JournalError
        from rallypoint.rendezvous.journal.sqlite import SqliteJournal
        from rendezvous.journal.entries import change, checkpoint, forgotten, record
        path = Path(sys.argv[1])
    """
    program = textwrap.dedent(head) + textwrap.dedent(script)
    command = [*under, sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )


def killed(script: str, path: Path, environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the lines that a script prints before it kills its own process with SIGKILL."""
    process = child(script, path, environment=environment)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGKILL
    return output.splitlines()


def kill(process: subprocess.Popen[str]) -> list[str]:
    """End a process with SIGKILL; return the whole lines that it printed and that were not read yet."""
    process.kill()
    assert process.stdout is not None
    with process:
        rest = process.stdout.read()
    return [line for line in rest.splitlines(keepends=True) if line.endswith("\n")]
