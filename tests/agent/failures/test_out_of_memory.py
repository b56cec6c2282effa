"""A kill by the kernel OOM killer is distinguished from a kill by a process, and the limit's owner is found."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rallypoint.agent.failures.out_of_memory import KernelLog, MemoryGroup, MemoryWatch, memory_groups
from rallypoint.agent.spawner.client import Spawner
from rallypoint.agent.spawner.protocol import WorkerExit, WorkerSpec
from support.small_cgroup import GLUTTON, small_cgroup
from support.spawning import spawn_one
from support.waiting import PATIENCE

MIB = 1 << 20
KILLED = WorkerExit(0, 4711, None, signal.SIGKILL, at=5.0, time=1.8e9, max_rss=60 * MIB)
OWN = MemoryGroup("/job/step0", None, kills=3, hits=0)
ABOVE = MemoryGroup("/job", 64 * MIB, kills=3, hits=1)
PEAK = "; its peak was 60.0 MiB"


class Scene:
    """Cgroups and a kernel log with the content that a test sets."""

    def __init__(self, folder: Path) -> None:
        self.groups = [OWN, ABOVE]
        self._kmsg = folder / "kmsg"
        self._kmsg.touch()
        self.watch = MemoryWatch(lambda: self.groups, KernelLog(self._kmsg))

    def write_kernel_log(self, text: str) -> None:
        """Write a line to the kernel's log."""
        with open(self._kmsg, "a") as file:
            file.write(f"6,1,2,-;{text}\n")


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """A host with earlier kills by the kernel."""
    made = Scene(tmp_path)
    yield made
    made.watch.close()


def test_a_kill_by_another_process_is_no_oom_kill(scene: Scene) -> None:
    """Counts and log have no kill; a worker that ended in another way is not an OOM kill either."""
    assert scene.watch.explain(KILLED) is None
    assert scene.watch.hint(KILLED) == "; another process sent it, not the kernel OOM killer"
    assert scene.watch.hint(replace(KILLED, inferred=True)) == ""
    scene.groups = [replace(OWN, kills=4), ABOVE]
    assert scene.watch.explain(replace(KILLED, signal=signal.SIGSEGV)) is None


def test_a_grown_count_is_enough_and_the_lowest_reached_limit_is_named(scene: Scene) -> None:
    """The kernel's log is not needed; containers may not read it."""
    scene.groups = [replace(OWN, kills=4), replace(ABOVE, kills=4, hits=2)]
    told = "killed by the kernel OOM killer (SIGKILL): "
    assert scene.watch.explain(KILLED) == f"{told}its cgroup /job reached its memory limit of 64.0 MiB{PEAK}"
    scene.groups = [replace(OWN, kills=4), replace(ABOVE, kills=4)]
    assert scene.watch.explain(KILLED) == f"{told}the host had no memory left{PEAK}"


@pytest.mark.parametrize(
    ("word", "whose"),
    [
        (
            "oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/pods/job,task_memcg=/pods/job/step0,task=x,pid=4711,uid=0",
            "its cgroup /job reached its memory limit of 64.0 MiB",
        ),
        (
            "oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/elsewhere,task_memcg=/elsewhere/a,task=x,pid=4711,uid=0",
            "its cgroup /elsewhere reached its memory limit",
        ),
        ("Memory cgroup out of memory: Killed process 4711 (x) ", "its cgroup reached its memory limit"),
        (
            "oom-kill:constraint=CONSTRAINT_NONE,global_oom,task=x,pid=4711,uid=0",
            "the host had no memory left",
        ),
    ],
)
def test_the_kernel_s_log_is_enough(scene: Scene, word: str, whose: str) -> None:
    """No count needs to be readable."""
    scene.write_kernel_log(word)
    explained = scene.watch.explain(KILLED)
    assert explained == f"killed by the kernel OOM killer (SIGKILL): {whose}{PEAK}"


def test_an_oom_kill_of_a_child_is_reported(scene: Scene) -> None:
    """A data loader that was killed makes its trainer raise."""
    raised = replace(KILLED, signal=None, exit_code=1)
    assert scene.watch.hint(raised) == ""
    scene.groups = [replace(OWN, kills=5), ABOVE]
    expected = (
        "; the kernel OOM killer has killed 2 processes in this agent's cgroup since the workers were started"
    )
    assert scene.watch.hint(raised) == expected


def test_without_counts_and_log_the_hint_names_dmesg(scene: Scene) -> None:
    """There is no cgroup with counts, and only root may read the log."""
    scene.groups = []
    assert scene.watch.explain(KILLED) is None
    assert scene.watch.hint(KILLED) == "; sent by another process, or by the kernel OOM killer: see dmesg"
    assert scene.watch.hint(replace(KILLED, signal=None, exit_code=1)) == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a cgroup")
async def test_the_kernel_kills_a_real_one(tmp_path: Path) -> None:
    """A worker exceeds the limit of its own cgroup: the report has the limit, the cgroup and the peak."""
    (tmp_path / "sys").symlink_to("/sys")
    with small_cgroup(64 * MIB) as folder:

        def groups() -> list[MemoryGroup]:
            memberships = (tmp_path / "proc/self/cgroup", tmp_path / "proc/self/mountinfo")
            memberships[0].parent.mkdir(parents=True, exist_ok=True)
            old = folder.parent.name == "memory"
            memberships[0].write_text(f"4:memory:/{folder.name}\n" if old else f"0::/{folder.name}\n")
            kind = "cgroup cgroup rw,memory" if old else "cgroup2 cgroup2 rw"
            memberships[1].write_text(f"1 2 0:1 / {folder.parent} rw - {kind}\n")
            return memory_groups(tmp_path)

        assert groups()[0].name == f"/{folder.name}"
        watch = MemoryWatch(groups)
        ended: asyncio.Future[WorkerExit] = asyncio.get_running_loop().create_future()
        async with Spawner.start() as spawner:
            program = f"open({str(folder / 'cgroup.procs')!r}, 'w').write('0')\n{GLUTTON}"
            argv = [sys.executable, "-S", "-c", program]
            await spawn_one(spawner, WorkerSpec(0, argv, dict(os.environ)), ended.set_result)
            how = await asyncio.wait_for(ended, PATIENCE)
        explained = watch.explain(how)
        watch.close()
    assert how.signal == signal.SIGKILL
    assert explained is not None
    expected = f"its cgroup /{folder.name} reached its memory limit of 64.0 MiB; its peak was "
    assert expected in explained
    peak = float(explained.removesuffix(" MiB").rpartition(" ")[2])
    # Pages of files, which other processes may also have in memory, count too.
    assert 40 < peak < 200
