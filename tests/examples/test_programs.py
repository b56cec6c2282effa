"""Child programs: their output is read, their end is noticed, and none of their processes stays."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import programs
from programs import ClusterError, Deaths, Feed, Line, Program
from support.processes import fresh_marker, gone
from support.waiting import PATIENCE, wait_until


@asynccontextmanager
async def running(folder: Path, script: str, *arguments: str) -> AsyncIterator[Program]:
    """Run a Python script as a program; kill it at the end if need be."""
    program = Program("it", [sys.executable, "-uc", script, *arguments], folder, os.environ)
    try:
        yield program
    finally:
        await program.kill()


# --- Feeds ----------------------------------------------------------------------------------------------


async def test_a_feed_finds_present_and_future_entries() -> None:
    """The result is the first match, in order, past the entries to skip."""
    feed: Feed[int] = Feed()
    for number in (1, 2, 3):
        feed.put(number)
    assert await feed.first("one", lambda number: number > 1) == 2
    assert await feed.first("one", lambda number: number > 1, since=2) == 3
    waiting = asyncio.create_task(feed.first("a large one", lambda number: number > 9))
    await asyncio.sleep(0)
    feed.put(4)
    feed.put(10)
    feed.put(11)
    assert await waiting == 10


async def test_the_error_of_a_wait_in_vain_names_its_subject() -> None:
    """It ends after its timeout, or as soon as nothing can come any more, with a sentence."""
    feed: Feed[int] = Feed()
    with pytest.raises(ClusterError, match=r"waited 0\.01 s in vain for a sign"):
        await feed.first("a sign", bool, timeout=0.01)
    waiting = asyncio.create_task(feed.first("a sign", bool))
    await asyncio.sleep(0)
    feed.end("nobody is left")
    with pytest.raises(ClusterError, match="waited for a sign, but nobody is left"):
        await waiting
    feed.put(5)  # earlier entries are still found after the end
    assert await feed.first("a sign", bool) == 5


def test_a_log_record_is_distinguished_from_other_text() -> None:
    """Only a JSON object is a record; anything else is text, and no error."""
    assert Line.parse("it", '{"event": "ready", "port": 1}').fields["port"] == 1
    for text in ("ready", "17", "[1]", '"ready"', "{", "", '{"event": ', "\x00"):
        line = Line.parse("it", text)
        assert (line.text, line.event, dict(line.fields)) == (text, "", {})


# --- Programs -------------------------------------------------------------------------------------------


async def test_the_output_of_a_program_is_read_and_kept(tmp_path: Path) -> None:
    """Records, reports and output are separated by line, and are in files as they were written."""
    script = """if True:
        import sys
        print("a" * 300_000)
        print("no end of line", end="")
        print('{"event": "ready"}', file=sys.stderr)
        sys.stderr.buffer.write(b"not \\xff text\\n")
    """
    async with running(tmp_path, script) as program:
        assert await program.ended(PATIENCE) == 0
        assert [line.text for line in program.output.items] == ["a" * 300_000, "no end of line"]
        assert [line.event for line in program.log.items] == ["ready", ""]
        assert program.report == "not \ufffd text"
        assert (tmp_path / "it.log").read_bytes() == b'{"event": "ready"}\nnot \xff text\n'
        assert (tmp_path / "it.out").stat().st_size == 300_001 + 14


async def test_a_wait_for_a_program_that_ends_reports_how_it_ended(tmp_path: Path) -> None:
    """No timeout must pass: the exit code and the program's last output are in the error."""
    async with running(tmp_path, "import sys; sys.exit('it is Sunday')") as program:
        with pytest.raises(
            ClusterError, match="waited for it to work, but it ended with exit code 1: it is Sunday"
        ):
            await program.log.first("it to work", lambda line: line.event == "working")
        assert not program.told_to_end


HAS_A_CHILD = """if True:
    import os, signal
    child = os.fork()
    if child:
        print(child)
    signal.pause()
"""


async def test_a_killed_program_must_end_its_descendants(tmp_path: Path) -> None:
    """A descendant that lives on is an error that names it; it is killed, too."""
    async with running(tmp_path, HAS_A_CHILD) as program:
        line = await program.output.first("the child", lambda _: True)
        child = Deaths([int(line.text)])
        with pytest.raises(ClusterError, match=rf"processes \[{line.text}\] were alive 0.1 s after"):
            await program.kill(patience=0.1)
        await child.all(PATIENCE)


async def test_a_killed_program_names_its_processes(tmp_path: Path) -> None:
    """The result of the kill has the killed processes, and how long the last one lived."""
    script = HAS_A_CHILD.replace("    signal.pause()", "    os.wait() if child else signal.pause()")
    async with running(tmp_path, script) as program:
        line = await program.output.first("the child", lambda _: True)
        child, parent = Deaths([int(line.text)]), Deaths([program.pid])
        killing = asyncio.create_task(program.kill())
        await parent.all(PATIENCE)  # else the parent would have ended by itself
        os.kill(int(line.text), signal.SIGKILL)
        killed = await killing
        assert killed.pids == {program.pid, int(line.text)}
        assert killed.all_dead == pytest.approx(await child.all(0), abs=0.05)
        assert killed.all_dead > killed.at
    assert await program.ended() == -signal.SIGKILL
    # A second kill: nothing happens, and no other process is killed.
    assert (await program.kill()).pids == frozenset()


async def test_a_program_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    """A program can't refuse to stop for longer than the grace."""
    script = "import signal; signal.signal(15, signal.SIG_IGN); print('up'); signal.pause()"
    async with running(tmp_path, script) as program:
        await program.output.first("it to be up", lambda _: True)
        assert program.running
        assert await program.stop(grace=0.1) == -signal.SIGKILL
        assert not program.running


def test_programs_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Even SIGKILL of their parent leaves none behind."""
    script = """if True:
        import asyncio, os, signal, sys
        from pathlib import Path
        from programs import Program

        async def main():
            program = Program("it", [sys.executable, "-uc", "import signal; print(1); signal.pause()"],
                              Path(sys.argv[1]), os.environ)
            await program.output.first("it to be up", lambda _: True)
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
    """
    examples = str(Path(programs.__file__).parent)
    with fresh_marker() as marker:
        environment = {**os.environ, "PYTHONPATH": examples, "MARKER": marker}
        command = [sys.executable, "-c", script, str(tmp_path)]
        assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
        wait_until(lambda: gone(marker), "the program to die, too")
