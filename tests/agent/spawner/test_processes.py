"""A worker is started exactly as requested, every exit is reported once and correctly, and nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rallypoint.agent.spawner.client import Spawner
from rallypoint.agent.spawner.protocol import SpawnError, WorkerExit, WorkerSpec
from rallypoint.agent.spawner.spawner import descendants, read_process
from support.spawning import spawn_one
from support.waiting import PATIENCE, until

ENVIRONMENT = {"PATH": os.environ["PATH"]}


@pytest.fixture
async def spawner() -> AsyncIterator[Spawner]:
    async with Spawner.start() as spawner:
        yield spawner


def python(program: str, local_rank: int = 0, **more: Any) -> WorkerSpec:
    return WorkerSpec(local_rank, [sys.executable, "-c", program], ENVIRONMENT, **more)


async def ends(spawner: Spawner, *specs: WorkerSpec) -> list[WorkerExit]:
    """Run workers to their end; return their exits in the order of the specs."""
    exits: dict[int, WorkerExit] = {}
    workers = spawner.submit(specs, lambda how: exits.update({how.local_rank: how}))
    await spawner.wait_started(workers)
    await until(lambda: len(exits) == len(specs), "the workers' ends")
    return [exits[spec.local_rank] for spec in specs]


async def test_exit_codes_and_signals_are_distinguished(spawner: Spawner) -> None:
    """The exit code or signal of a worker is reported unchanged, with the time and the used resources."""
    before = asyncio.get_running_loop().time()
    fine, coded, killed, big = await ends(
        spawner,
        python("", 0),
        python("raise SystemExit(7)", 1),
        python("import os; os.kill(os.getpid(), 15)", 2),
        python("block = b'x' * (64 << 20)", 3),
    )
    assert (fine.exit_code, fine.signal, fine.succeeded) == (0, None, True)
    assert (coded.exit_code, coded.signal, coded.succeeded) == (7, None, False)
    assert (killed.exit_code, killed.signal, killed.succeeded) == (None, signal.SIGTERM, False)
    assert before <= killed.at <= asyncio.get_running_loop().time()
    assert big.max_rss > 64 << 20
    assert big.user_seconds + big.system_seconds > 0
    assert not big.inferred


async def test_a_worker_starts_from_a_clean_slate(spawner: Spawner, tmp_path: Path) -> None:
    """Own session and group; no inherited descriptors, variables or ignored signals; it dies with its spawner."""
    program = """
import ctypes, json, os, signal
death = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death), 0, 0, 0)
print(json.dumps({
    "leader": os.getsid(0) == os.getpgid(0) == os.getpid(),
    "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1],
    "stdin": os.readlink("/proc/self/fd/0"),
    "cwd": os.getcwd(),
    "death": death.value,
    "environment": sorted(os.environ),
    "masked": [int(line.split()[1], 16) for line in open("/proc/self/status") if line.startswith("SigBlk")],
    "ignored": [n.name for n in signal.Signals if signal.getsignal(n) == signal.SIG_IGN],
}))
"""
    out = tmp_path / "out"
    (how,) = await ends(spawner, python(program, cwd=tmp_path, stdout=out))
    assert how.succeeded
    found = json.loads(out.read_text())
    assert found["leader"]
    assert found["descriptors"] == [0, 1, 2]
    assert found["stdin"] == "/dev/null"
    assert found["cwd"] == str(tmp_path)
    assert found["death"] == signal.SIGKILL
    assert set(found["environment"]) - {"LC_CTYPE"} == {"PATH", "RALLYPOINT_SPAWN_ID"}
    assert found["masked"] == [0]
    assert found["ignored"] == ["SIGPIPE", "SIGXFSZ"]  # set by Python itself


async def test_bytes_survive(spawner: Spawner, tmp_path: Path) -> None:
    """Arguments, environment and paths that are not UTF-8 arrive byte for byte; output is appended to files."""
    odd = os.fsdecode(b"\xff\xfe caf\xe9 \xe2\x82\xac")
    out = tmp_path / odd
    out.write_bytes(b"before ")
    program = "import os, sys; os.write(1, os.fsencode(sys.argv[1]) + os.environb[b'ODD'])"
    spec = WorkerSpec(0, [sys.executable, "-c", program, odd], {**ENVIRONMENT, "ODD": odd}, tmp_path, out)
    (how,) = await ends(spawner, spec)
    assert how.succeeded
    assert out.read_bytes() == b"before " + os.fsencode(odd) * 2


@pytest.mark.parametrize(
    ("argv", "more", "expected"),
    [
        (["no-such-program"], {}, r"no program 'no-such-program' in PATH=.*; check its name"),
        (["/no/such/program"], {}, "there is no program '/no/such/program'; check the path"),
        (["{folder}/text"], {}, "'.*/text' is not executable; chmod"),
        (
            ["{folder}/orphan"],
            {},
            "'.*/orphan' names an interpreter that does not exist; check its first line",
        ),
        (["{folder}/blank"], {}, "this machine cannot run '.*/blank'; does a script lack its #!"),
        (["sleep", "x" * (1 << 20)], {}, "the arguments and environment of 'sleep' are larger than"),
        (["sleep", "a\0b"], {}, "cannot run 'sleep' .*null byte"),
        ([], {}, "no program was given"),
        (["sleep"], {"cwd": Path("/no/such")}, "cannot enter its working directory '/no/such'"),
        (["sleep"], {"stdout": Path("/no/such/out")}, "cannot open its log file '/no/such/out'"),
        (["sleep"], {"stderr": Path("/no/such/err")}, "cannot open its log file '/no/such/err'"),
    ],
)
async def test_a_failed_start_has_the_reason(
    spawner: Spawner, tmp_path: Path, argv: list[str], more: dict[str, Any], expected: str
) -> None:
    """A failed start raises a one-line SpawnError with the reason, and reports no exit; other workers are unharmed."""
    (tmp_path / "text").write_text("words")
    for name, content in (("orphan", "#!/no/such/interpreter\n"), ("blank", "words")):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    argv = [argument.replace("{folder}", str(tmp_path)) for argument in argv]
    exits: list[WorkerExit] = []
    with pytest.raises(SpawnError, match=f"^cannot start worker 3: {expected}[^\n]*$") as caught:
        await spawn_one(spawner, WorkerSpec(3, argv, ENVIRONMENT, **more), exits.append)
    assert caught.value.local_rank == 3
    (fine,) = await ends(spawner, python(""))
    assert fine.succeeded
    assert exits == []


async def test_two_hundred_workers_leave_nothing(spawner: Spawner) -> None:
    """Many starts and exits use up no descriptor and leave no zombie, here or in the spawner."""
    (first,) = await ends(spawner, python(""))
    assert first.succeeded
    assert spawner.pid is not None
    folders = [f"/proc/{pid}/fd" for pid in (os.getpid(), spawner.pid)]
    before = [len(os.listdir(folder)) for folder in folders]
    true = WorkerSpec(0, ["true"], ENVIRONMENT)
    for _ in range(10):
        exits: list[WorkerExit] = []
        workers = spawner.submit([true] * 20, exits.append)
        await spawner.wait_started(workers)
        await asyncio.wait([worker.cleared for worker in workers])
        assert [how.exit_code for how in exits] == [0] * 20
        assert len({how.pid for how in exits}) == 20
    assert descendants(spawner.pid) == []
    assert [len(os.listdir(folder)) for folder in folders] == before


async def test_orphans_are_reaped(spawner: Spawner) -> None:
    """A grandchild whose parent has ended is adopted, and reaped when it ends."""
    program = "import os, time; os.fork() or (os.fork() or time.sleep(0.05), os._exit(0)); os.wait()"
    (how,) = await ends(spawner, python(program))
    assert how.succeeded
    pid = spawner.pid
    assert pid is not None
    await until(lambda: descendants(pid) == [], "the orphans' burial")


async def test_ends_that_come_together_are_all_reported(spawner: Spawner, tmp_path: Path) -> None:
    """SIGCHLD signals merge; one wake-up reaps all dead children, also adopted ones that come before the workers."""
    orphan = tmp_path / "orphan"
    program = (
        "import os, signal, sys; os.fork() and os._exit(0); print(os.getpid(), flush=True); signal.pause()"
    )
    (how,) = await ends(spawner, python(program, stdout=orphan))
    assert how.succeeded
    await until(lambda: orphan.read_text().endswith("\n"), "the orphan")
    exits: list[WorkerExit] = []
    worker = await spawn_one(spawner, WorkerSpec(1, ["sleep", "60"], ENVIRONMENT), exits.append)
    assert spawner.pid is not None
    assert worker.pid is not None
    os.kill(spawner.pid, signal.SIGSTOP)
    for pid in (int(orphan.read_text()), worker.pid):
        os.kill(pid, signal.SIGKILL)
        await until(lambda: (found := read_process(pid)) is None or found.dead, "its death")  # noqa: B023
    os.kill(spawner.pid, signal.SIGCONT)
    await until(lambda: len(exits) == 1, "the worker's end")


async def test_signals_wait_for_exec_and_reach_only_the_chosen_workers(spawner: Spawner) -> None:
    """A signal sent together with the start is neither lost nor too early."""
    exits: list[WorkerExit] = []
    workers = spawner.submit(
        [WorkerSpec(rank, ["sleep", "60"], ENVIRONMENT) for rank in range(3)], exits.append
    )
    spawner.signal(workers[1:], signal.SIGINT, group=True)
    await until(lambda: len(exits) == 2, "the two that were signalled")
    assert {(how.local_rank, how.signal) for how in exits} == {(1, signal.SIGINT), (2, signal.SIGINT)}
    assert workers[0].alive
    spawner.signal(workers, signal.SIGKILL, group=False)
    await until(lambda: len(exits) == 3, "the third")


async def test_a_callback_that_raises_loses_no_other_exit(spawner: Spawner) -> None:
    """An exception in one worker's on_exit is reported to the loop; the other exits are still reported."""
    complaints: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: complaints.append(context["message"]))
    exits: list[WorkerExit] = []

    def on_exit(how: WorkerExit) -> None:
        if how.local_rank == 0:
            raise ValueError("of no interest")
        exits.append(how)

    spawner.submit([python("", 0), python("", 1)], on_exit)
    await until(lambda: len(exits) == 1 and len(complaints) == 1, "both ends")
    assert complaints == ["on_exit of worker 0 raised"]


async def test_a_dead_spawner_is_noticed_and_its_workers_have_exits() -> None:
    """After SIGKILL of the spawner each worker has an inferred exit, and new ones get an error."""
    exits: list[WorkerExit] = []
    spawner = Spawner.start()
    sleep = WorkerSpec(0, ["sleep", "60"], ENVIRONMENT)
    worker = await spawn_one(spawner, sleep, exits.append)
    assert spawner.pid is not None
    os.kill(spawner.pid, signal.SIGKILL)
    await until(lambda: bool(exits), "the worker's end")
    assert spawner.dead
    (how,) = exits
    assert (how.pid, how.signal, how.inferred) == (worker.pid, signal.SIGKILL, True)
    assert read_process(how.pid) is None
    with pytest.raises(SpawnError, match="spawner process is dead"):
        await spawn_one(spawner, sleep, exits.append)
    assert (await spawner.sweep()).left == ()
    await spawner.close()
    assert len(exits) == 1


async def test_a_spawner_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A suspended spawner counts as dead after a time limit, and all its processes are killed."""
    monkeypatch.setattr("rallypoint.agent.spawner.client.ANSWER_MARGIN", 0.0)
    exits: list[WorkerExit] = []
    spawner = Spawner.start()
    worker = await spawn_one(spawner, WorkerSpec(0, ["sleep", "60"], ENVIRONMENT), exits.append)
    assert spawner.pid is not None
    assert worker.pid is not None
    os.kill(spawner.pid, signal.SIGSTOP)
    assert (await spawner.sweep(timeout=0.1)).left == ()
    assert spawner.dead
    assert read_process(worker.pid) is None
    assert read_process(spawner.pid) is None
    await spawner.close()


async def test_closing_leaves_no_process_and_no_descriptor() -> None:
    """After close, also a second one, the helper process, its workers and every descriptor are gone."""
    before = len(os.listdir("/proc/self/fd"))
    spawner = Spawner.start()
    exits: list[WorkerExit] = []
    worker = await spawn_one(spawner, WorkerSpec(0, ["sleep", "60"], ENVIRONMENT), exits.append)
    assert worker.pid is not None
    await spawner.close()
    await spawner.close()
    assert read_process(worker.pid) is None
    assert spawner.pid is not None
    assert read_process(spawner.pid) is None
    assert len(os.listdir("/proc/self/fd")) == before


async def test_one_spawner_dies_without_the_other() -> None:
    """The death of one, with its helper process, harms neither the other spawner nor this process."""
    other_child = await asyncio.create_subprocess_exec("sleep", "60")
    async with Spawner.start() as one, Spawner.start() as other:
        exits: list[WorkerExit] = []
        sleep = WorkerSpec(0, ["sleep", "60"], ENVIRONMENT)
        theirs = await spawn_one(other, sleep, exits.append)
        ours = await spawn_one(one, sleep, exits.append)
        assert one.pid is not None
        guard = read_process(one.pid)
        assert guard is not None
        os.kill(guard.parent, signal.SIGKILL)
        os.kill(one.pid, signal.SIGKILL)
        await until(lambda: ours.exit is not None, "the worker's end")
        assert theirs.alive
        (fine,) = await ends(other, python("", 1))
        assert fine.succeeded
        assert other_child.returncode is None
    other_child.kill()
    await other_child.wait()


async def test_a_spawner_ends_although_no_descriptor_is_left() -> None:
    """The descriptor that shows its end exists from the start: a job without free descriptors must not hang."""
    spawner = Spawner.start()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        spawner.attach()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    async with asyncio.timeout(PATIENCE):
        await spawner.close()
    assert spawner.dead
