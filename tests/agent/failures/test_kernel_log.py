"""The kernel's log shows which processes the OOM killer killed, and whose limit was reached."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rallypoint.agent.failures.out_of_memory import KernelLog, OomKill

CHOSEN = (
    "6,1,2,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/job/step0,"
    "task_memcg=/job/step0/w1,task=python3,pid=4711,uid=0\n"
)
OF_HOST = (
    "6,1,2,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,"
    "task_memcg=/a,task=python3,pid=4712,uid=0\n"
)
KILLED = "3,3,4,-;Memory cgroup out of memory: Killed process 4713 (python3) total-vm:1kB, anon-rss:1kB, file-rss:1kB\n"
KILLED_OF_HOST = "3,3,4,-;Out of memory: Killed process 4714 (python3) total-vm:1kB\n"
OLD_WORDS = "3,3,4,-;Out of memory: Kill process 4715 (python3) score 900 or sacrifice child\n"


@pytest.mark.parametrize(
    ("record", "pid", "expected"),
    [
        (CHOSEN, 4711, OomKill(of_cgroup=True, cgroup="/job/step0")),
        (OF_HOST, 4712, OomKill(of_cgroup=False, cgroup="")),
        (KILLED, 4713, OomKill(of_cgroup=True, cgroup="")),
        (KILLED_OF_HOST, 4714, OomKill(of_cgroup=False, cgroup="")),
        (OLD_WORDS, 4715, OomKill(of_cgroup=False, cgroup="")),
        ("6,1,2,-;python3[4716]: segfault at 0 ip 0 sp 0 error 4\n", 4716, None),
    ],
)
def test_the_kernel_s_lines_are_parsed(
    tmp_path: Path, record: str, pid: int, expected: OomKill | None
) -> None:
    """Each format of the kernel's lines is parsed, and no other line; a process that they don't name was not killed."""
    pipe = tmp_path / "kmsg"
    os.mkfifo(pipe)
    holder = os.open(pipe, os.O_RDWR)
    log = KernelLog(pipe)
    try:
        assert log.kill_of(pid) is None
        os.write(holder, record.encode())
        assert log.kill_of(pid) == expected
        assert log.kill_of(1) is None
    finally:
        log.close()
        os.close(holder)


def test_earlier_lines_are_not_read(tmp_path: Path) -> None:
    """A PID in an old line may belong to another process now."""
    path = tmp_path / "kmsg"
    path.write_text(CHOSEN)
    log = KernelLog(path)
    assert log.kill_of(4711) is None
    with open(path, "a") as file:
        file.write(OF_HOST)
    assert log.kill_of(4712) == OomKill(of_cgroup=False, cgroup="")
    log.close()
    assert log.kill_of(4712) is not None


def test_an_unreadable_log_reports_no_kill(tmp_path: Path) -> None:
    """Most users may not read the kernel's log."""
    log = KernelLog(tmp_path / "none")
    assert log.kill_of(1) is None
    log.close()
