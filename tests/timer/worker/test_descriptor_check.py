"""A program that closes all unknown descriptors keeps its files intact, and its watchdog."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rallypoint.timer.worker import wire
from rallypoint.timer.worker.table import DescriptorCheck, SharedMemory
from support.timer_agent import Agent
from support.waiting import PATIENCE

# Uses timers, then closes all descriptors. Files opened next get the watchdog's former numbers.
CLOSES_ALL = """
import gc, os, socket, sys, time
from rallypoint import timer

with timer.expires(after=60, scope="first"):
    pass
sys.stdin.readline()
os.closerange(3, 64)
pairs = [socket.socketpair() for _ in range(4)]
ends = [end for pair in pairs for end in pair]
time.sleep(1.1)  # a connection that lived for less is not tried again at once
"""

USES_TIMERS = """
for _ in range(3):
    with timer.expires(after=60, scope="second"):
        timer.progress(1)
"""

ALL_ENDS_ARE_WHOLE = """
for one, other in pairs:
    one.send(b"mine")
    assert other.recv(100) == b"mine"
    other.send(b"yours")
    assert one.recv(100) == b"yours"
"""


def start(agent: Agent, program: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "RALLYPOINT_TIMER_SOCKET": agent.path}
    return subprocess.Popen(
        [sys.executable, "-c", CLOSES_ALL + program], stdin=subprocess.PIPE, text=True, env=environment
    )


def test_a_number_that_became_another_files_is_noticed(tmp_path: Path) -> None:
    """This includes a closed one, and one that is again of the same kind of file."""
    first, second = socket.socketpair()
    own = DescriptorCheck(first.fileno())
    assert own.is_behind(first.fileno())
    assert not own.is_behind(second.fileno())
    os.dup2(second.fileno(), first.fileno())
    assert not own.is_behind(first.fileno())
    first.close()
    assert not own.is_behind(first.fileno())
    assert not own.is_behind(-1)
    second.close()


@pytest.mark.parametrize(
    "afterwards",
    [
        pytest.param("", id="it uses timers"),
        pytest.param("timer.configure(required=False)\ngc.collect()\n", id="it configures anew"),
        pytest.param("if child := os.fork():\n    assert os.waitpid(child, 0)[1] == 0\n", id="it forks"),
    ],
)
def test_files_of_the_program_are_neither_written_nor_closed(agent: Agent, afterwards: str) -> None:
    """This holds for any later use of timers, in the process and in its children."""
    with start(agent, USES_TIMERS + afterwards + USES_TIMERS + ALL_ENDS_ARE_WHOLE) as process:
        agent.welcome()
        process.communicate("go\n", timeout=60)
    assert process.returncode == 0


def test_its_timers_are_still_sent(agent: Agent) -> None:
    """They are sent as messages, because its table can't be sent to the agent any more."""
    hangs = 'timer.expires(after=60, scope="hangs").__enter__()\nsys.stdin.readline()\n'
    with start(agent, hangs) as process:
        agent.welcome()
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        told = agent.accept().receive()
        process.communicate(timeout=PATIENCE)
    assert isinstance(told, wire.Acquire)
    assert told.scope == "hangs"


def test_unfinished_memory_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler raised while it was made: no descriptor stays open, and no error is reported."""
    made: list[tuple[int, os.stat_result]] = []
    make = os.memfd_create

    def remember(*how: Any) -> int:
        number = make(*how)
        made.append((number, os.fstat(number)))
        return number

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rallypoint.timer.worker.table.os.memfd_create", remember)
    monkeypatch.setattr("rallypoint.timer.worker.table.os.ftruncate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        SharedMemory(4096)
    gc.collect()
    ((number, memory),) = made
    with suppress(OSError):  # another thread of the tests may have opened a file under the same number since
        assert not os.path.samestat(os.fstat(number), memory)
