"""`expires` guards blocks and functions, says clearly when it can't, and costs a worker nothing but the guard."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rallypoint.timer import configure, expires, worker
from rallypoint.timer.uplink import Uplink


class Recording(Uplink):
    """Remembers instead of telling."""

    def __init__(self) -> None:
        super().__init__("nowhere", 1.0)
        self.events: list[tuple[str, object]] = []
        self.running: dict[int, tuple[float, str]] = {}

    def acquire(self, after: float, scope: bytes) -> int:
        token = len(self.events) + 1
        self.events.append(("acquire", scope.decode()))
        self.running[token] = (after, scope.decode())
        return token

    def release(self, token: int) -> None:
        self.events.append(("release", self.running.pop(token)[1]))

    @property
    def scopes(self) -> list[str]:
        return sorted(scope for _, scope in self.running.values())


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> worker._Process:
    """Each test is a process that has chosen nothing yet."""
    monkeypatch.delenv(worker.SOCKET_VARIABLE, raising=False)
    fresh = worker._Process()
    monkeypatch.setattr(worker, "_process", fresh)
    return fresh


@pytest.fixture
def uplink(process: worker._Process) -> Iterator[Recording]:
    process.uplink = Recording()
    yield process.uplink
    assert process.uplink.running == {}


def test_a_block_is_guarded_from_its_first_to_its_last_statement(uplink: Recording) -> None:
    """Also when it raises."""
    with expires(after=60, scope="step"):
        assert uplink.running == {1: (60, "step")}
    with pytest.raises(ZeroDivisionError), expires(after=60, scope="step"):
        1 / 0  # noqa: B018
    assert uplink.events == [("acquire", "step"), ("release", "step")] * 2


def test_the_default_scope_is_the_callers_line(uplink: Recording) -> None:
    """As file#line, which is how torch names it."""
    with expires(after=60):
        assert uplink.scopes == [f"{__file__}#{sys._getframe().f_lineno - 1}"]


def test_blocks_nest_with_equal_scopes(uplink: Recording) -> None:
    """The inner one's end doesn't end the outer one."""
    with expires(60, "s"):
        with expires(5, "s"):
            assert sorted(uplink.running.values()) == [(5, "s"), (60, "s")]
        assert list(uplink.running.values()) == [(60, "s")]


def test_one_object_guards_one_block_after_the_other(uplink: Recording) -> None:
    """Not two at once: it couldn't know which of them ends."""
    guard = expires(60, "s")
    for _ in range(2):
        with guard:
            assert uplink.scopes == ["s"]
    with guard, pytest.raises(RuntimeError, match=r"guards a block already \(scope s\)"), guard:
        pass
    assert uplink.scopes == []


def test_a_function_is_guarded_during_each_call(uplink: Recording) -> None:
    """Recursion and threads included; the scope is the decorator's line."""

    @expires(after=60)
    def depth(levels: int) -> int:
        """Doc."""
        return len(uplink.running) if levels == 1 else depth(levels - 1)

    assert depth(3) == 3
    assert depth.__doc__ == "Doc."
    assert uplink.running == {}
    lines = {scope for _, scope in uplink.events}
    assert lines == {f"{__file__}#{depth.__wrapped__.__code__.co_firstlineno}"}  # type: ignore[attr-defined]


async def test_a_coroutine_function_is_guarded_while_it_runs(uplink: Recording) -> None:
    """Until it returns or is cancelled, not only until its coroutine was made; tasks don't disturb each other."""
    go = asyncio.Event()

    @expires(after=60, scope="task")
    async def wait() -> str:
        await go.wait()
        return "done"

    first, second = asyncio.create_task(wait()), asyncio.create_task(wait())
    await asyncio.sleep(0)
    assert uplink.scopes == ["task", "task"]
    first.cancel()
    await asyncio.wait({first})
    assert uplink.scopes == ["task"]
    go.set()
    assert await second == "done"
    assert uplink.running == {}


def test_a_generator_function_is_refused() -> None:
    """Its calls return at once, so guarding them would guard nothing."""
    with pytest.raises(TypeError, match="generator"):

        @expires(after=60)
        def numbers() -> Iterator[int]:
            yield 1


@pytest.mark.parametrize("after", [0, -1, float("nan"), float("inf"), 1e12])
def test_a_duration_that_makes_no_sense_is_refused(after: float) -> None:
    """Where it is written, before any agent is asked."""
    with pytest.raises(ValueError, match="after is"):
        expires(after=after)


def test_what_is_no_duration_or_scope_is_refused() -> None:
    """With the value in the message."""
    with pytest.raises(TypeError, match="after is '60'"):
        expires(after="60")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="scope is 5"):
        expires(after=60, scope=5)  # type: ignore[arg-type]


def test_of_a_long_scope_the_end_is_kept(uplink: Recording) -> None:
    """256 bytes, cut between characters: in a path, the end says most."""
    with expires(60, "/" + "ü" * 200 + ".py#7"):
        (scope,) = uplink.scopes
    assert len(scope.encode()) in (255, 256)
    assert scope.endswith("üü.py#7")


def test_places_do_not_fill_memory(uplink: Recording) -> None:
    """A program that makes up file names, as notebooks do, is bounded."""
    for number in range(10_000):
        code = compile("guard = expires(60)", f"<cell {number}>", "exec")
        exec(code, {"expires": expires})  # noqa: S102
    assert len(worker._places) <= worker._MAX_PLACES


def test_without_an_agent_expires_says_so() -> None:
    """Nobody should believe to be guarded who is not. Making or decorating is fine, entering is not."""

    @expires(60)
    def step() -> None: ...

    with pytest.raises(RuntimeError, match="RALLYPOINT_TIMER_SOCKET is not set"):
        step()
    with pytest.raises(RuntimeError, match="required=False"):
        configure()


def test_without_an_agent_by_choice_expires_does_nothing() -> None:
    """For scripts that also run by themselves."""
    configure(required=False)
    with expires(60), expires(60):
        pass


def test_under_an_agent_the_environment_is_enough(
    process: worker._Process, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is read when a block is first entered; an agent that is gone is no reason to fail."""
    monkeypatch.setenv(worker.SOCKET_VARIABLE, str(tmp_path / "gone"))
    with expires(60):
        pass
    assert isinstance(process.uplink, Uplink)
    assert process.uplink._path == str(tmp_path / "gone")


def test_threads_choose_one_uplink(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """However many enter their first block at once."""
    monkeypatch.setenv(worker.SOCKET_VARIABLE, str(tmp_path / "gone"))
    gate, seen = threading.Barrier(8), set()

    def enter() -> None:
        gate.wait()
        with expires(60) as _:
            seen.add(id(worker._process.uplink))

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 1


def test_a_block_is_released_where_it_was_acquired(process: worker._Process) -> None:
    """Also when another socket is configured inside of it."""
    process.uplink = former = Recording()
    with expires(60, "s"):
        process.uplink = Recording()
    assert former.events == [("acquire", "s"), ("release", "s")]
    assert process.uplink.events == []


@pytest.mark.parametrize("patience", [0, -1, 61, float("nan")])
def test_patience_has_bounds(patience: float) -> None:
    """A worker that waits for ever for its watchdog is what we must not make possible."""
    with pytest.raises(ValueError, match="patience"):
        configure("/tmp/socket", patience=patience)  # noqa: S108


def test_importing_it_is_light() -> None:
    """No gRPC, protobuf or asyncio in a worker: they are slow to import, and gRPC doesn't survive a fork."""
    script = (
        "import sys; import rallypoint.timer; from rallypoint.timer import expires; "
        "heavy = {'grpc', 'google', 'google.protobuf', 'asyncio', 'inspect', 'dataclasses', 'logging'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert shown.stdout == "[]\n"
