"""A report has the path of a worker's core dump, or a hint to get one."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import time
from pathlib import Path

import pytest

from rallypoint.agent.failures.core_dump import CoreDump, find_core_dump, judge
from rallypoint.agent.spawner.client import Spawner
from rallypoint.agent.spawner.protocol import WorkerExit, WorkerSpec
from support.spawning import spawn_one
from support.waiting import PATIENCE

DUMPED = WorkerExit(0, 4711, None, signal.SIGSEGV, at=5.0, time=1.8e9, core_dumped=True)
NOT_DUMPED = WorkerExit(0, 4711, None, signal.SIGSEGV, at=5.0, time=1.8e9)
CWD = Path("/runs/[a]")


def judged(
    pattern: str, how: WorkerExit = DUMPED, *, limit: int = -1, adds_pid: bool = False, there: bool = True
) -> tuple[CoreDump, list[str]]:
    """Return the result, and the wildcards of the search."""
    wildcards: list[str] = []

    def newest(wildcard: str) -> str:
        wildcards.append(wildcard)
        return "/found" if there else ""

    told = judge(pattern, how, cwd=CWD, limit=limit, adds_pid=adds_pid, newest=newest)
    return told, wildcards


@pytest.mark.parametrize(
    ("pattern", "adds_pid", "wildcard"),
    [
        ("core", False, "/runs/[[]a]/core"),
        ("core", True, "/runs/[[]a]/core.4711"),
        ("core.%p", True, "/runs/[[]a]/core.4711"),
        ("/cores/%e.%p.%s.%t.%%", False, "/cores/*.4711.11.*.%"),
        ("/cores/%h-%P-%u*", False, f"/cores/{socket.gethostname()}-*-*[*]"),
        ("/cores/core%", False, "/cores/core"),
    ],
)
def test_a_file_is_looked_for_by_the_kernel_s_pattern(pattern: str, adds_pid: bool, wildcard: str) -> None:
    """Values that only the process knew match anything; special characters of wildcards are escaped."""
    told, wildcards = judged(pattern, adds_pid=adds_pid)
    assert wildcards == [wildcard]
    assert told == CoreDump("/found")


@pytest.mark.parametrize(
    ("pattern", "how", "limit", "hint"),
    [
        ("|/usr/lib/systemd/systemd-coredump %P %u", DUMPED, 0, "; for its core dump: coredumpctl info 4711"),
        ("|/usr/lib/systemd/systemd-coredump %P %u", NOT_DUMPED, 0, ""),
        ("|/usr/share/apport/apport -p%p", DUMPED, -1, "; its core dump went to apport"),
        ("core", NOT_DUMPED, 0, "; for a core dump, run with --rlimit core=-1"),
        ("", NOT_DUMPED, -1, "; for a core dump, set kernel.core_pattern, which is empty"),
        (
            "/none/core",
            NOT_DUMPED,
            -1,
            "; it left no core dump: check that it can write to core_pattern '/none/core'",
        ),
        ("core", DUMPED, -1, "; it left a core dump that was not found (core_pattern 'core')"),
    ],
)
def test_a_missing_core_dump_has_a_hint(pattern: str, how: WorkerExit, limit: int, hint: str) -> None:
    """The hint may also name the program that has it."""
    assert judged(pattern, how, limit=limit, there=False)[0] == CoreDump(hint=hint)


def test_ends_without_a_core_dump_need_no_hint() -> None:
    """Examples are an exit code, and a signal that dumps no core."""
    for how in (
        WorkerExit(0, 1, 1, None, at=5.0, time=1.8e9),
        WorkerExit(0, 1, None, signal.SIGKILL, at=5.0, time=1.8e9),
        WorkerExit(0, 1, None, 40, at=5.0, time=1.8e9),
    ):
        assert find_core_dump(how, cwd=CWD, rlimits={}, started=0.0) is None


@pytest.mark.parametrize("limit", [0, resource.RLIM_INFINITY])
async def test_a_real_one_is_found_where_the_kernel_writes_files(tmp_path: Path, limit: int) -> None:
    """The test depends on this machine's core_pattern; if the limit is 0, the hint names the flag."""
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()  # noqa: ASYNC240
    if pattern.startswith(("|", "/")) or not pattern:
        pytest.skip("on this machine core dumps go elsewhere than to the working directory")
    if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        pytest.skip("no process here may dump a core")
    ended: asyncio.Future[WorkerExit] = asyncio.get_running_loop().create_future()
    started = time.time()
    async with Spawner.start() as spawner:
        argv = ["sh", "-c", f"ulimit -c {'unlimited' if limit else 0}; kill -SEGV $$"]
        await spawn_one(spawner, WorkerSpec(0, argv, dict(os.environ), cwd=tmp_path), ended.set_result)
        how = await asyncio.wait_for(ended, PATIENCE)
    found = find_core_dump(how, cwd=tmp_path, rlimits={"core": (limit, limit)}, started=started)
    assert found is not None
    assert how.core_dumped is bool(limit)
    if limit:
        assert Path(found.file).read_bytes()[:4] == b"\x7fELF"  # noqa: ASYNC240
        assert Path(found.file).parent == tmp_path
        # An old core dump of another job is not reported.
        os.utime(found.file, (started - 60, started - 60))
        found = find_core_dump(how, cwd=tmp_path, rlimits={}, started=started)
        assert found == CoreDump(hint=f"; it left a core dump that was not found (core_pattern {pattern!r})")
    else:
        assert found == CoreDump(hint="; for a core dump, run with --rlimit core=-1")
