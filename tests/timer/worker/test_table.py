"""The shared table: a reader never takes other bytes for a timer, and sees all that was written."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rallypoint.timer.worker import table
from rallypoint.timer.worker.table import (
    LEARNED,
    SIZE,
    SLOTS,
    MalformedTable,
    Observation,
    SharedMemory,
    StepSlot,
    TableReader,
    TableWriter,
    TimerSlot,
)

SCOPES = st.binary(min_size=1, max_size=table.MAX_SCOPE_BYTES)
NANOSECONDS = st.integers(1, 2**63)
SLOT_AT = table.SLOT_WORD * 8


def ends() -> tuple[TableWriter, TableReader]:
    memory = memoryview(bytearray(SIZE))
    return TableWriter(memory), TableReader(memory)


def hold(writer: TableWriter, scope: bytes, after: int = 60) -> int:
    """Take a slot as a worker does."""
    return writer.acquire(
        writer.tick(), time.monotonic_ns(), after, scope, writer.kind_of(scope, 0, not after)
    )


TIMERS = st.builds(
    TimerSlot, st.integers(1, 2**64 - 1), NANOSECONDS, NANOSECONDS, st.integers(0, 255), SCOPES, st.booleans()
)


@given(TIMERS)
def test_a_timer_arrives_as_it_was_written(timer: TimerSlot) -> None:
    """All its fields are read, and nothing is left after its end."""
    writer, reader = ends()
    kind = writer.kind_of(timer.scope, timer.signal, timer.learns)
    slot = writer.acquire(timer.token, timer.since, timer.after, timer.scope, kind)
    assert list(reader.slots()) == [timer]
    writer.release(slot)
    assert list(reader.slots()) == []


class Model(RuleBasedStateMachine):
    """For all acquisitions and releases in any order, the reader sees exactly the held timers."""

    def __init__(self) -> None:
        super().__init__()
        self.writer, self.reader = ends()
        self.held: dict[int, TimerSlot] = {}
        self.observed: dict[bytes, Observation] = {}
        self.touched = True

    @rule(after=st.integers(0, 9), scope=SCOPES, signal=st.sampled_from([0, 15, 255]))
    def acquire(self, after: int, scope: bytes, signal: int) -> None:
        token, since = self.writer.tick(), time.monotonic_ns()
        kind = self.writer.kind_of(scope, signal, not after)
        slot = self.writer.acquire(token, since, after, scope, kind)
        self.held[slot] = TimerSlot(token, since, after, signal, scope, not after)
        self.touched = True

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[slot]
        self.writer.release(slot)
        self.touched = True

    @rule(scope=st.sampled_from([b"a", b"b"]), duration=st.integers(0, 2**40))
    def observe(self, scope: bytes, duration: int) -> None:
        self.writer.note(self.writer.kind_of(scope, 0, True), duration)
        before = self.observed.get(scope, Observation(scope, 0, 0))
        self.observed[scope] = Observation(scope, before.completions + 1, max(before.longest, duration))
        self.touched = True

    @invariant()
    def the_reader_sees_it(self) -> None:
        assert sorted(self.reader.slots()) == sorted(self.held.values())
        assert {seen.scope: seen for seen in self.reader.observations()} == self.observed
        assert self.reader.changed() is self.touched
        self.touched = False


TestModel = Model.TestCase


@given(st.binary(max_size=400), st.integers(0, SIZE))
def test_any_bytes_can_be_read(noise: bytes, at: int) -> None:
    """A worker that writes over its table harms only itself."""
    memory = memoryview(bytearray(SIZE))
    writer, reader = TableWriter(memory), TableReader(memory)
    hold(writer, b"s")
    hold(writer, b"s", after=0)
    end = min(at + len(noise), SIZE)
    memory[at:end] = noise[: end - at]
    memory[16:32] = b"\xff" * 16  # as if all slots were in use
    reader.changed()
    for slot in reader.slots():
        assert slot.token
        assert len(slot.scope) <= table.MAX_SCOPE_BYTES
    list(reader.observations())
    reader.step()
    assert reader.dropped >= 0


def test_memory_that_is_no_table_is_refused() -> None:
    """It has another size, or another beginning."""
    with pytest.raises(MalformedTable, match=f"{SIZE} bytes, not 100"):
        TableReader(memoryview(bytearray(100)))
    with pytest.raises(MalformedTable, match="begin"):
        TableReader(memoryview(bytearray(SIZE)))


@pytest.mark.parametrize("word", range(5))
def test_a_half_written_slot_is_no_timer(word: int) -> None:
    """This holds if any of its words is still the former one's: a worker may be killed in the middle."""
    memory = memoryview(bytearray(SIZE))
    writer, reader = TableWriter(memory), TableReader(memory)
    slot = writer.acquire(7, 1000, 60, b"former", writer.kind_of(b"former", 0, False))
    former = bytes(memory[SLOT_AT : SLOT_AT + 40])
    writer.release(slot)
    writer.acquire(8, 2000, 70, b"scope", writer.kind_of(b"scope", 9, False))
    at = SLOT_AT + word * 8
    memory[at : at + 8] = former[word * 8 : word * 8 + 8]
    assert list(reader.slots()) == []


def test_a_text_of_another_timer_is_not_taken_for_this_ones() -> None:
    """On machines that make writes visible in another order, the words may come before the text."""
    memory = memoryview(bytearray(SIZE))
    writer, reader = TableWriter(memory), TableReader(memory)
    hold(writer, b"new scope")
    memory[SLOT_AT + 64 : SLOT_AT + 67] = b"old"
    assert list(reader.slots()) == []


def test_timers_beyond_the_last_slot_are_counted() -> None:
    """Timers that have one are not disturbed."""
    writer, reader = ends()
    slots = [hold(writer, b"s") for _ in range(SLOTS + 3)]
    assert slots[-3:] == [-1, -1, -1]
    assert reader.dropped == 3
    assert len(list(reader.slots())) == SLOTS
    writer.release(slots[0])
    assert hold(writer, b"t") == slots[0]


def test_scopes_beyond_the_learning_limit_are_still_guarded() -> None:
    """They learn from others; and a program that generates scopes fills no memory."""
    writer, reader = ends()
    for number in range(LEARNED + 50):
        kind = writer.kind_of(b"scope %d" % number, 0, True)
        writer.note(kind, number)
        slot = writer.acquire(writer.tick(), 5, 0, b"scope %d" % number, kind)
        assert next(iter(reader.slots())).learns
        writer.release(slot)
    assert len(list(reader.observations())) == LEARNED
    assert len(writer._learned) == LEARNED


def test_a_step_is_read_whole_or_not_at_all() -> None:
    """There is none before the first, and none while it is being written."""
    memory = memoryview(bytearray(SIZE))
    writer, reader = TableWriter(memory), TableReader(memory)
    assert reader.step() is None
    writer.progress(2**64 - 1, 5)
    assert reader.step() == StepSlot(2**64 - 1, 5)
    struct.pack_into("<Q", memory, 32, 3)
    assert reader.step() is None


def test_the_promise_written_is_earlier_than_the_look() -> None:
    """The difference is far more than a write takes to become visible; later writers ring."""
    writer, reader = ends()
    reader.listen_until(10_000_000_000)
    assert 10_000_000_000 - 10_000_000 < writer.listening[0] < 10_000_000_000 - 100_000
    reader.listen_until(0)
    assert writer.listening[0] == 0


def test_a_disowned_table_touches_nothing_that_was_its() -> None:
    """Its held slots and later ones are not written; and it never rings."""
    memory = memoryview(bytearray(SIZE))
    writer = TableWriter(memory)
    slot = hold(writer, b"s")
    before = bytes(memory)
    writer.disown(memoryview(bytearray(SIZE)))
    writer.release(slot)
    hold(writer, b"t")
    hold(writer, b"auto", after=0)
    writer.progress(5, 5)
    assert memory == before
    assert time.monotonic_ns() < writer.listening[0]


def test_the_layout_is_the_documented_one() -> None:
    """The layout of docs/timer-socket.md for other languages."""
    memory = memoryview(bytearray(SIZE))
    writer = TableWriter(memory)
    kind = writer.kind_of(b"train.py#12", 10, True)
    writer.acquire(1, 2, 0, b"train.py#12", kind)
    writer.observe(kind, 77)
    writer.progress(4, 5)
    words = memory.cast("Q")
    assert SIZE == 409_664
    assert bytes(memory[:8]) == b"rallyt01"
    assert list(words[1:8]) == [0, 1, 1, 4, 5, 4 ^ 5, 0]
    check = table.text_check(b"train.py#12")
    assert kind == 11 | 10 << 16 | 1 << 32 | check << 48
    assert list(words[8:13]) == [1, 2, 0, kind, 1 ^ 2 ^ kind]
    assert bytes(memory[128:139]) == b"train.py#12"
    assert list(words[40_968:40_971]) == [1, 77, 11]
    assert bytes(memory[327_744 + 64 : 327_744 + 75]) == b"train.py#12"


def _run(*tasks: Callable[[], None]) -> None:
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_share_a_table() -> None:
    """No thread gets another's slot, the reader knows how far to read, and no completion is lost."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            writer, reader = ends()
            gate = threading.Barrier(8)

            def work(number: int, gate: threading.Barrier = gate, writer: TableWriter = writer) -> None:
                scope = b"scope %d" % number
                gate.wait()
                held = []
                for _ in range(100):
                    held.append(hold(writer, scope))
                    writer.note(writer.kind_of(b"shared", 0, True), number)
                for slot in held[20:]:
                    writer.release(slot)

            _run(*(lambda number=number: work(number) for number in range(8)))
            scopes = [slot.scope for slot in reader.slots()]
            assert sorted(scopes) == sorted(b"scope %d" % number for number in range(8) for _ in range(20))
            assert list(reader.observations()) == [Observation(b"shared", 800, 7)]
    finally:
        sys.setswitchinterval(interval)


class Interrupted(bytearray):
    """A bytearray that runs another call in the middle, once: just after the search for free slots."""

    meanwhile: Callable[[], object] | None = None

    def rfind(self, *what: int) -> int:  # type: ignore[override]
        found = super().rfind(*what)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return found


def test_two_slots_taken_at_once_are_both_read() -> None:
    """This holds if the writer of the smaller count is the last."""
    writer, reader = ends()
    used = writer._used = Interrupted(writer._used)
    used.meanwhile = lambda: hold(writer, b"second")
    hold(writer, b"first")
    assert sorted(slot.scope for slot in reader.slots()) == [b"first", b"second"]


def test_a_slot_whose_first_taker_was_interrupted_is_read_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal handler raised before the slot was covered for the reader: the next taker covers it."""
    writer, reader = ends()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(TableWriter, "_cover", interrupt)
        with pytest.raises(KeyboardInterrupt):
            hold(writer, b"interrupted")
    writer.give(0)
    hold(writer, b"hangs")
    assert [slot.scope for slot in reader.slots()] == [b"hangs"]


def test_a_completion_left_to_another_thread_is_not_lost() -> None:
    """This holds if the other had just finished and only had to release the lock."""
    writer, reader = ends()
    kind = writer.kind_of(b"s", 0, True)
    late = [(kind, 5)]

    class Lock:
        def acquire(self, *, blocking: bool) -> bool:
            return True

        def release(self) -> None:
            writer._notes.extend(late)
            late.clear()

    writer._noting = Lock()  # type: ignore[assignment]
    writer.note(kind, 3)
    assert list(reader.observations()) == [Observation(b"s", 2, 5)]


def test_no_torn_timer_is_ever_read() -> None:
    """One process writes as fast as it can, changing every field of a timer each time; another reads."""
    shared = SharedMemory(SIZE)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(shared.descriptor)],
        pass_fds=[shared.descriptor],
        stdout=subprocess.PIPE,
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"writing\n"
        reader = TableReader(shared.memory)
        tokens: set[int] = set()
        while len(tokens) < 1000:
            for slot in reader.slots():
                tokens.add(slot.token)
                assert slot.since == 2 * slot.token, "token and since are of two timers"
                assert slot.after == slot.token * 3 + 1, "token and after are of two timers"
                size = slot.token % 200 + 1
                assert slot.scope == bytes([slot.token % 251 + 1]) * size, "the scope is of another timer"
            step = reader.step()
            assert step is None or step.when == step.step * 7 + 1
    finally:
        writer.kill()
        writer.wait()
        assert writer.stdout is not None
        writer.stdout.close()


# Takes and frees a few slots in turn, for as long as the parent lives.
WRITER = """
import mmap, os, sys
from rallypoint.timer.worker.table import SIZE, TableWriter
memory = memoryview(mmap.mmap(int(sys.argv[1]), SIZE))
writer = TableWriter(memory)
print("writing", flush=True)
parent, held = os.getppid(), []
while os.getppid() == parent:
    token = writer.tick()
    scope = bytes([token % 251 + 1]) * (token % 200 + 1)
    held.append(writer.acquire(token, 2 * token, token * 3 + 1, scope, writer.kind_of(scope, 0, False)))
    writer.progress(token, token * 7 + 1)
    if len(held) > 3:
        writer.release(held.pop(0))
        writer.release(held.pop())
"""
