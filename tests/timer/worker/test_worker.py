"""`expires` guards blocks and functions, raises a clear error when it can't, and costs a worker only the guard."""

from __future__ import annotations

import asyncio
import inspect
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.timer import Client, configure, expires
from rallypoint.timer.worker import scopes as place
from rallypoint.timer.worker.connection import AgentConnection
from rallypoint.timer.worker.expires import progress
from rallypoint.timer.worker.process import SOCKET_VARIABLE, ProcessTimers, process
from rallypoint.timer.worker.table import (
    NEVER,
    SIZE,
    SLOTS,
    TableReader,
    TableWriter,
    TimerSlot,
    private_memory,
)
from support.processes import modules_after

SECOND = 1_000_000_000


class Watched:
    """A process's table, as its agent sees it."""

    def __init__(self, chosen: ProcessTimers) -> None:
        memory = private_memory(SIZE)
        self.rings = 0
        self.writer = TableWriter(memory, self._rung)
        self.reader = TableReader(memory)
        self.reader.listen_until(NEVER // 2)
        chosen.table = self.writer

    def _rung(self) -> None:
        self.rings += 1

    @property
    def slots(self) -> list[TimerSlot]:
        return list(self.reader.slots())

    @property
    def running(self) -> list[tuple[float, str]]:
        return sorted((slot.after / SECOND, slot.scope.decode()) for slot in self.slots)

    @property
    def scopes(self) -> list[str]:
        return sorted(slot.scope.decode() for slot in self.slots)


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessTimers]:
    """Reset the process, so that each test starts with nothing chosen."""
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    process.table = process.connection = process.client = None
    yield process
    if process.connection is not None:
        process.connection.close()
    process.table = process.connection = process.client = None


@pytest.fixture
def watched(chosen: ProcessTimers) -> Iterator[Watched]:
    watched = Watched(chosen)
    yield watched
    assert watched.running == []
    free = [watched.writer.take() for _ in range(SLOTS)]
    assert len(set(free)) == SLOTS, "a slot is lost or given out twice"


def test_a_block_is_guarded_from_its_first_to_its_last_statement(watched: Watched) -> None:
    """It is guarded too when the block raises."""
    before = time.monotonic_ns()
    with expires(after=60, scope="step"):
        (slot,) = watched.slots
        assert before <= slot.since <= time.monotonic_ns()
        assert (slot.after, slot.scope, slot.signal, slot.learns) == (60 * SECOND, b"step", 0, False)
    assert watched.slots == []
    with pytest.raises(ZeroDivisionError), expires(after=60, scope="step"):
        1 / 0  # noqa: B018
    assert watched.slots == []


def test_the_default_scope_is_the_callers_line(watched: Watched) -> None:
    """It is file#line, torch's form; each line has its own, the same each time."""
    for _ in range(3):
        with expires(after=60):
            assert watched.scopes == [f"{__file__}#{inspect.currentframe().f_lineno - 1}"]  # type: ignore[union-attr]
        with expires(after=60), expires(after=60):
            assert len(watched.scopes) == 2
            assert set(watched.scopes) == {f"{__file__}#{inspect.currentframe().f_lineno - 2}"}  # type: ignore[union-attr]


def test_a_place_may_give_another_duration_each_time(watched: Watched) -> None:
    """Data cached for a call site never replaces its present arguments."""
    for after in (1, 60.5, 2**20, 1, 60.5, "auto", 3):
        for number in (None, 0, 10, None):
            with expires(after, signal=number), expires(after, "s", signal=number):
                expected = (0 if after == "auto" else after * SECOND, {None: 0, 0: 255, 10: 10}[number])
                assert [(slot.after, slot.signal) for slot in watched.slots] == [expected] * 2


def test_blocks_nest_with_equal_scopes(watched: Watched) -> None:
    """The inner one's end doesn't end the outer one."""
    with expires(60, "s"):
        with expires(5, "s"):
            assert watched.running == [(5, "s"), (60, "s")]
        assert watched.running == [(60, "s")]


def test_one_object_guards_one_block_after_the_other(watched: Watched) -> None:
    """Not two at once: it couldn't know which of them ends."""
    once = expires(60, "s")
    for _ in range(2):
        with once:
            assert watched.scopes == ["s"]
    with once, pytest.raises(RuntimeError, match=r"guards a block already \(scope s\)"), once:
        pass
    assert watched.scopes == []


def test_a_function_is_guarded_during_each_call(watched: Watched) -> None:
    """Recursion and threads are covered; the scope is the decorator's line."""
    lines = set()

    @expires(after=60)
    def depth(levels: int) -> int:
        """Doc."""
        lines.update(watched.scopes)
        return len(watched.running) if levels == 1 else depth(levels - 1)

    assert depth(3) == 3
    assert depth.__doc__ == "Doc."
    assert watched.running == []
    assert lines == {f"{__file__}#{depth.__wrapped__.__code__.co_firstlineno}"}  # type: ignore[attr-defined]


async def test_a_coroutine_function_is_guarded_while_it_runs(watched: Watched) -> None:
    """The guard ends when it returns or is cancelled, not when its coroutine was made; tasks are independent."""
    go = asyncio.Event()

    @expires(after=60, scope="task")
    async def wait() -> str:
        await go.wait()
        return "done"

    first, second = asyncio.create_task(wait()), asyncio.create_task(wait())
    await asyncio.sleep(0)
    assert watched.scopes == ["task", "task"]
    first.cancel()
    await asyncio.wait({first})
    assert watched.scopes == ["task"]
    go.set()
    assert await second == "done"
    assert watched.running == []


def test_threads_do_not_disturb_each_other(watched: Watched) -> None:
    """This holds however often they are switched."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def work(number: int) -> None:
        for _ in range(2000):
            with expires(number, "outer"), expires(number, "inner"):
                pass

    try:
        with expires(60, "kept"):
            threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert watched.running == [(60, "kept")]
    finally:
        sys.setswitchinterval(interval)


def test_a_generator_function_is_refused() -> None:
    """Its calls return at once, so guarding them would guard nothing."""
    with pytest.raises(TypeError, match="generator"):

        @expires(after=60)
        def numbers() -> Iterator[int]:
            yield 1


@pytest.mark.parametrize("after", [0, -1, float("nan"), float("inf"), 1e12])
def test_a_duration_that_makes_no_sense_is_refused(after: float) -> None:
    """The call raises, before any connection to the agent."""
    with pytest.raises(ValueError, match="after is"):
        expires(after=after)


def test_an_invalid_duration_scope_or_signal_is_refused() -> None:
    """The error has the value."""
    with pytest.raises(TypeError, match="after is '60'; expected a number of seconds, or \"auto\""):
        expires(after="60")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="after is None"):
        expires(after=None)  # type: ignore[arg-type]
    for scope in (5, b"s", ["s"]):
        with pytest.raises(TypeError, match="scope is"):
            expires(after=60, scope=scope)  # type: ignore[arg-type]
    for number in (-1, 65, 1000):
        with pytest.raises(ValueError, match=f"signal is {number}; expected 1 to 64, or 0"):
            expires(after=60, signal=number)
    for wrong in ("SIGTERM", 1.5, True):
        with pytest.raises(TypeError, match="signal is"):
            expires(after=60, signal=wrong)  # type: ignore[arg-type]


def test_a_signal_to_be_sent_first_may_be_chosen(watched: Watched) -> None:
    """It is given by number or name; with 0, as in torch, the expiry is only reported."""
    for given_signal, told in ((None, 0), (signal.SIGUSR1, 10), (9, 9), (0, 255)):
        with expires(60, signal=given_signal):
            assert [slot.signal for slot in watched.slots] == [told]


def test_the_shortest_duration_is_no_learning(watched: Watched) -> None:
    """A duration below a nanosecond becomes one; like all short ones it rings for the agent."""
    with expires(1e-12):
        assert [(slot.after, slot.learns) for slot in watched.slots] == [(1, False)]
    assert watched.rings == 1
    with expires(0.099):
        assert watched.rings == 2
    with expires(0.1), expires("auto"):
        assert watched.rings == 2


def test_completions_of_blocks_that_learn_are_observed(watched: Watched) -> None:
    """Each completion counts, also of a block that raised, and the longest; nested ones and others too."""

    @expires("auto", "save")
    def save() -> None:
        with expires("auto", "save"):
            assert [(slot.after, slot.learns) for slot in watched.slots] == [(0, True)] * 2
            time.sleep(0.002)

    save()
    with pytest.raises(ZeroDivisionError), expires("auto", "save"):
        1 / 0  # noqa: B018
    with expires("auto", "load"), expires(60, "save"):
        pass
    seen = {each.scope: each for each in watched.reader.observations()}
    assert {scope: each.completions for scope, each in seen.items()} == {b"save": 3, b"load": 1}
    assert 2_000_000 <= seen[b"save"].longest < 60 * SECOND
    assert seen[b"load"].longest < 2_000_000_000


def test_of_a_long_scope_the_end_is_kept(watched: Watched) -> None:
    """256 bytes, cut between characters: the end of a path is the most specific."""
    with expires(60, "/" + "ü" * 200 + ".py#7"):
        (scope,) = watched.scopes
    assert len(scope.encode()) in (255, 256)
    assert scope.endswith("üü.py#7")


def test_places_do_not_fill_memory(watched: Watched) -> None:
    """A program that generates file names, as notebooks do, or scopes is bounded; no entry replaces another."""
    for number in range(10_000):
        code = compile("once = expires(60)", f"<cell {number}>", "exec")
        names: dict[str, object] = {"expires": expires}
        exec(code, names)  # noqa: S102
        assert names["once"]._call_site.scope == b"<cell %d>#1" % number  # type: ignore[attr-defined]
        expires(60, f"scope {number}")
    for number in range(5_000):
        expires("auto", f"scope {number}")
    for places in (place.by_code, place.by_scope, place._learning_by_scope):
        assert len(places) <= place._MOST


def test_more_blocks_than_a_process_may_hold_go_unguarded(watched: Watched) -> None:
    """They are counted, and the others are not disturbed."""
    guards = [expires(60, "s") for _ in range(SLOTS + 2)]
    for each in guards:
        each.__enter__()
    assert watched.reader.dropped == 2
    for each in guards:
        each.__exit__(None, None, None)


def test_a_ring_follows_each_change_while_no_agent_listens(watched: Watched) -> None:
    """It rings after entering, leaving, and progress; never while the agent listens."""
    with expires(60):
        progress(1)
    assert watched.rings == 0
    watched.reader.listen_until(0)
    with expires(60):
        assert watched.rings == 1
    assert watched.rings == 2
    with expires("auto"):
        assert watched.rings == 3
    assert watched.rings == 4
    progress(2)
    assert watched.rings == 5


class HandlerError(Exception):
    """The exception that a test's signal handler raises."""


@pytest.mark.parametrize("after", [60, "auto"])
def test_a_signal_handler_that_raises_leaves_no_timer_behind(watched: Watched, after: float) -> None:
    """This holds at any point of entering a block: else the timer would never be released.

    A trace function raises where a signal handler could: before each line, and in called functions.
    """
    strikes = 0
    for when in range(1000):
        remaining = [when]

        def strike(frame: object, event: str, _: object, remaining: list[int] = remaining) -> object:
            # No handler runs when a function returns.
            if event != "return" and remaining[0] == 0:
                sys.settrace(None)
                raise HandlerError
            remaining[0] -= event != "return"
            return strike

        once = expires(after, "s")
        sys.settrace(strike)  # type: ignore[arg-type]
        try:
            once.__enter__()
        except HandlerError:
            sys.settrace(None)
            strikes += 1
            assert watched.slots == []
            continue
        sys.settrace(None)
        once.__exit__(None, None, None)
        break
    assert strikes > 10, "it hardly ever struck: this shows nothing"


@pytest.mark.parametrize("after", [60, "auto"])
def test_a_signal_handler_that_raises_while_a_block_is_left_does_not_keep_its_timer(
    watched: Watched, after: float
) -> None:
    """The timer ends before any call that a handler could interrupt."""
    watched.reader.listen_until(0)
    entered: list[int] = []

    def strike() -> None:
        assert watched.slots == [] or not entered
        if entered:
            raise HandlerError

    watched.writer.ring = strike
    once = expires(after, "s")
    once.__enter__()
    entered.append(1)
    with pytest.raises(HandlerError):
        once.__exit__(None, None, None)
    entered.clear()
    with once:
        assert watched.scopes == ["s"]


@given(st.integers(0, 2**64 - 1))
def test_progress_is_reported(step: int) -> None:
    """The step and its time are reported."""
    watched = Watched(process)
    before = time.monotonic_ns()
    progress(step)
    told = watched.reader.step()
    assert told is not None
    assert told.step == step
    assert before <= told.when <= time.monotonic_ns()


def test_progress_takes_whole_numbers_only(watched: Watched) -> None:
    """Those of numpy are included, and none that a table can't hold."""

    class Whole:
        def __index__(self) -> int:
            return 7

    progress(Whole())  # type: ignore[arg-type]
    assert watched.reader.step() is not None
    for step in (-1, 2**64):
        with pytest.raises(ValueError, match=f"step is {step}"):
            progress(step)
    for wrong in (1.0, "1", None):
        with pytest.raises(TypeError, match="whole number"):
            progress(wrong)  # type: ignore[arg-type]


def test_expires_without_an_agent_raises() -> None:
    """An unguarded block must not look guarded. Making or decorating is fine, entering is not."""

    @expires(60)
    def step() -> None: ...

    with pytest.raises(RuntimeError, match="RALLYPOINT_TIMER_SOCKET is not set"):
        step()
    with pytest.raises(RuntimeError, match="RALLYPOINT_TIMER_SOCKET is not set"):
        progress(1)
    with pytest.raises(RuntimeError, match="required=False"):
        configure()
    with pytest.raises(RuntimeError, match="required=False"):
        Client()


def test_without_an_agent_by_choice_expires_does_nothing() -> None:
    """This is for scripts that also run without an agent."""
    configure(required=False)
    with expires(60), expires("auto"), expires(0.01):
        progress(1)


def test_under_an_agent_the_environment_is_enough(
    chosen: ProcessTimers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is read when a block is first entered; a missing agent is no error."""
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "gone"))
    with expires(60):
        progress(1)
    assert isinstance(chosen.connection, AgentConnection)
    assert chosen.connection._path == str(tmp_path / "gone")


def test_threads_choose_one_connection(
    chosen: ProcessTimers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This holds for any number that enter their first block at once."""
    monkeypatch.setenv(SOCKET_VARIABLE, str(tmp_path / "gone"))
    gate, seen = threading.Barrier(8), set()

    def enter() -> None:
        gate.wait()
        with expires(60) as _:
            seen.add((id(chosen.connection), id(chosen.table)))

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 1


def test_a_block_is_released_where_it_was_acquired(chosen: ProcessTimers) -> None:
    """This holds when another agent is chosen inside the block."""
    former = Watched(chosen)
    with expires(60, "s"):
        latter = Watched(chosen)
    assert former.slots == []
    assert not latter.reader.changed() or latter.slots == []


@pytest.mark.parametrize("patience", [0, -1, 61, float("nan")])
def test_patience_has_bounds(patience: float) -> None:
    """A worker must never wait for ever for its watchdog."""
    with pytest.raises(ValueError, match="patience"):
        configure("/tmp/socket", patience=patience)  # noqa: S108


def test_exports_of_the_package_do_not_depend_on_other_imports() -> None:
    """A module of the service with the name of an export would replace it."""
    script = (
        "import rallypoint.timer as timer; import rallypoint.timer.server.service, rallypoint.timer.client.client; "
        "print([name for name in timer.__all__ if not callable(getattr(timer, name))])"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


def test_importing_it_is_light() -> None:
    """No gRPC, protobuf or asyncio in a worker: they are slow to import, and gRPC doesn't survive a fork."""
    heavy = {"grpc", "google", "google.protobuf", "asyncio", "inspect", "dataclasses", "logging"}
    assert modules_after("from rallypoint.timer import expires").isdisjoint(heavy)
