"""After the death of agent, guard or spawner, in any combination, no process of the workers' trees survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.agent.spawner import spawner
from rallypoint.agent.spawner.spawner import ProcessStat, descendants, kill_group, read_process
from support.processes import all_there, fresh_marker, gone, living, stop_and_kill, stubborn
from support.waiting import wait_until

WORKERS = 2

AGENT = """
import asyncio, json, os, sys
from rallypoint.agent.spawner.client import Spawner
from rallypoint.agent.spawner.protocol import WorkerSpec
from rallypoint.agent.workers.processes import WorkerProcesses

def say(**what):
    print(json.dumps(what), flush=True)

async def main():
    spawner = Spawner.start()
    guard = spawner._handle.pid
    group = WorkerProcesses(spawner, lambda how: say(what="exit", rank=how.local_rank, inferred=how.inferred))
    command = json.loads(sys.argv[1])
    await group.start([
        WorkerSpec(rank, command, {**os.environ, "LOCAL_RANK": str(rank)}) for rank in range(int(sys.argv[2]))
    ])
    say(what="ready", guard=guard, spawner=spawner.pid)
    while not spawner.dead:
        await asyncio.sleep(0.01)
    say(what="death")
    report = await group.stop()
    say(what="stopped", left=report.left)
    await spawner.close()
    say(what="closed", children=len(os.listdir("/proc/self/fd")))
    await asyncio.sleep(60)

asyncio.run(main())
"""


class Agent:
    """A program with a spawner and stubborn workers, which the test may kill."""

    def __init__(self, marker: str, folder: Path) -> None:
        self.marker = marker
        command = json.dumps(stubborn(marker, folder))
        # Guard and spawner inherit the marker from the agent's environment: they must end too.
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT, command, str(WORKERS)],
            stdout=subprocess.PIPE,
            env={**os.environ, "MARKER": marker},
            text=True,
        )
        ready = self.hear("ready")
        self.pids = {"agent": self.process.pid, "guard": ready["guard"], "spawner": ready["spawner"]}
        wait_until(lambda: all_there(folder, WORKERS), "all parts of the stubborn workers")

    def hear(self, what: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said: dict[str, Any] = json.loads(line)
            if said["what"] == what:
                return said
        raise AssertionError(f"the agent ended without saying {what!r}")

    def alone(self) -> bool:
        return gone(self.marker, besides=self.process.pid)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with fresh_marker() as marker:
        agent = Agent(marker, tmp_path)
        try:
            yield agent
        finally:
            agent.close()
            wait_until(agent.alone, "the end of everything")


@pytest.mark.integration
@pytest.mark.parametrize(
    "victims",
    [("agent",), ("spawner",), ("guard",), ("agent", "spawner"), ("agent", "guard"), ("guard", "spawner")],
    ids="+".join,
)
def test_nothing_survives_the_death_of_any_two(agent: Agent, victims: tuple[str, ...]) -> None:
    """SIGKILL of one or two of the three ends all workers, children, daemons and hoppers, without help of the test."""
    assert len(living(agent.marker)) > WORKERS * 5
    stop_and_kill(agent.pids[name] for name in victims)
    wait_until(agent.alone, f"the end of the tree after the death of {victims}")
    if "agent" not in victims:
        agent.hear("death")
        agent.hear("stopped")


@pytest.mark.integration
def test_a_stopped_spawner_does_not_keep_the_tree_alive(agent: Agent) -> None:
    """The guard acts for a spawner that is suspended when the agent dies."""
    os.kill(agent.pids["spawner"], signal.SIGSTOP)
    os.kill(agent.pids["agent"], signal.SIGKILL)
    wait_until(agent.alone, "the end of the tree")


@pytest.mark.integration
def test_a_stopped_agent_does_not_keep_a_broken_tree_alive(agent: Agent) -> None:
    """The spawner acts when the guard dies, even if the agent is suspended and can't."""
    os.kill(agent.pids["agent"], signal.SIGSTOP)
    os.kill(agent.pids["guard"], signal.SIGKILL)
    wait_until(agent.alone, "the end of the tree")


@pytest.mark.integration
def test_terminal_signals_leave_spawner_and_workers_to_the_agent(agent: Agent) -> None:
    """Ctrl-C, Ctrl-\\ or a scheduler signals all processes; that ends neither spawner nor guard."""
    for name in ("guard", "spawner"):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            os.kill(agent.pids[name], number)
        process = read_process(agent.pids[name])
        assert process is not None
        assert not process.dead
        assert process.session != os.getsid(0)
    os.kill(agent.pids["agent"], signal.SIGKILL)
    wait_until(agent.alone, "the end of the tree")


def test_descendants_are_found_parents_first() -> None:
    """The walk returns the whole tree below a process, parents first, without the excluded processes."""
    program = "import os, signal; os.fork() or os.fork(); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        for _ in range(3):
            child.stdout.readline()
        tree = [process.pid for process in descendants(os.getpid())]
        below = descendants(child.pid)
        assert child.pid in tree
        assert len(below) == 2
        assert below[0].parent == child.pid
        assert below[1].parent == below[0].pid
        spared = descendants(os.getpid(), keep=lambda process: process.pid == child.pid)
        assert not {child.pid, *(process.pid for process in below)} & {process.pid for process in spared}
        for process in (*below, read_process(child.pid)):
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)


def test_a_pid_of_another_process_is_not_killed() -> None:
    """A process whose parent is outside the tree when the signal is sent is spared, and so is its group."""
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with subprocess.Popen(command, start_new_session=True) as stranger:
        was = ProcessStat(stranger.pid, "S", parent=12345678, group=stranger.pid, session=stranger.pid)
        assert kill_group([was], family={12345678}) == {}
        assert stranger.poll() is None
        (pidfd,) = kill_group([was], family={os.getpid()}).values()
        os.close(pidfd)
        assert stranger.wait() == -signal.SIGKILL


def test_an_invalid_group_is_not_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is ending may show -1 or 0 as its group: as arguments they mean "all" and "mine"."""
    signalled: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, _number: signalled.append(group))
    gone_by_now = 2**22 + 1
    victims = [ProcessStat(gone_by_now, "X", os.getpid(), group, -1) for group in (-1, 0, 1, gone_by_now)]
    assert kill_group(victims, family={os.getpid()}) == {}
    assert signalled == [gone_by_now]


def test_an_overlooked_process_is_killed_all_the_same() -> None:
    """A walk that misses a process does not end the loop: only the kernel decides that there are no children left."""
    program = """
import subprocess, sys
from rallypoint.agent.spawner import spawner

child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
look, misses = spawner.descendants, iter(range(3))
spawner.descendants = lambda root, keep: look(root, keep) if next(misses, None) is None else []
assert spawner.kill_descendants(10.0) == []
assert spawner.read_process(child.pid) is None
child.returncode = 0
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_zombie_of_a_dead_parent_is_reaped_too() -> None:
    """It was seen as its parent's zombie; the parent died too, so this process has adopted it."""
    program = """
import os, signal, time
from rallypoint.agent.spawner import spawner

spawner.become_subreaper()
told, tell = os.pipe()
parent = os.fork()
if not parent:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # dead, and not buried
    os.write(tell, str(child).encode())
    os._exit(0)
os.waitid(os.P_PID, parent, os.WEXITED | os.WNOWAIT)
child = int(os.read(told, 20))
assert spawner.read_process(child).dead
look = spawner.descendants
seen = [spawner.ProcessStat(parent, "Z", os.getpid(), 1, 1), spawner.ProcessStat(child, "Z", parent, 1, 1)]
looks = iter([seen])
spawner.descendants = lambda root, keep: next(looks, None) or look(root, keep)
assert spawner.kill_descendants(10.0, keep=lambda process: False) == []
assert spawner.read_process(child) is None
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_program_needs_only_the_standard_library() -> None:
    """The file runs isolated, without site-packages, and imports no module that is unsafe to fork."""
    check = (
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='looked_at'); "
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('grpc', 'google', 'asyncio', "
        "'threading', 'rallypoint')))"
    )
    ran = subprocess.run(
        [sys.executable, "-I", "-S", "-c", check, spawner.__file__],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == "[]"
