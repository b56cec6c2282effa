"""The table of timers that a worker process shares with its agent: the layout, and both ends of it.

A worker that entered a scope with a message would pay for a system call and for waking its agent, thousands of
times a second. So it writes into shared memory, and rings only if the agent does not look by itself just then.
docs/timer-socket.md describes the bytes for other languages.

Both ends run at once and neither can lock the other out, for the worker may be killed at any instruction:

- A slot is valid if its words agree with their check, and its text with the text's check among them, so a
  half-written one is not taken for a timer, whatever the order in which the machine makes the words visible.
- Whoever frees a slot clears its token before anything else. So a reader that finds the same token after it
  copied the scope has copied the scope of that timer; where a machine reorders writes, the text's check tells.
- The worker reads the clock *after* it has written. If that is later than `listening_until`, it rings. The agent
  looks once more after that moment, and later by far than a write takes to become visible. So whatever was
  written is either seen by that look or rung for.
- Before that look the agent writes 0 there. A worker that frees a slot rings only if it finds that: what it frees
  unseen is seen with the next thing that happens, and in any case before anybody is judged.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from binascii import crc32
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from threading import Lock
from typing import NamedTuple, TypeAlias

# Anything that struct reads and writes in place: an mmap, a bytearray.
Memory: TypeAlias = "memoryview | bytearray"

MAX_SCOPE_BYTES = 256
SLOTS = 1024
"""Timers that one process may hold at once; those beyond are not guarded, and counted."""
LEARNED = 256
"""Scopes of which one process may tell how long they take; those beyond are not told of."""

_MAGIC = (
    0x3130_7479_6C6C_6172  # "rallyt01", where the low byte comes first; all words are in the host's own order
)
_ENTRY = 320  # bytes of a slot, and of a learned scope
_TEXT = 64  # where its text begins
_HEADER = 64
_LEARNED_AT = _HEADER + SLOTS * _ENTRY
SIZE = _LEARNED_AT + LEARNED * _ENTRY
"""Bytes of a table. Only what is used takes memory."""

# magic, listening_until (the agent's to write), slots used so far, learned scopes used so far,
# step, when it was reached, their check, timers that found no slot
_HEAD = struct.Struct("=QQQQQQQQ")
_LISTENING, _SLOTS_USED, _LEARNED_USED, _PROGRESS, _DROPPED = 8, 16, 24, 32, 56
_PROGRESS_WORDS = struct.Struct("=QQQ")
# token, since, after, kind, check. Kind: size of the scope | signal << 16 | 1 + learned index << 32 | the text's
# check << 48, where 0 means that the text is not checked.
_SLOT = struct.Struct("=QQQQQ")
_INDEX, _CHECKED = 0xFFFF, 48
# completions, longest, size of the scope
_OBSERVED = struct.Struct("=QQ")
_LEARNED_SIZE = 16
_WORD = struct.Struct("=Q")
# What is written is visible to other processors long before so many nanoseconds have passed.
_VISIBLE = 1_000_000
NEVER = 2**64 - 1
"""As `listening_until`: there is nobody to ring for."""
SLOT_WORD, SLOT_WORDS = _HEADER // 8, _ENTRY // 8
"""The word where the slots begin, and the words of one: for who writes `TableWriter.acquire` out, for speed."""


class MalformedTable(Exception):
    """The memory is no table of this layout."""


class TimerSlot(NamedTuple):
    """A timer that a process holds. Nanoseconds; `since` is by CLOCK_MONOTONIC, which all processes share."""

    token: int
    since: int
    # 0: to be learned.
    after: int
    # Asked for; 0: the agent's choice. 255: none, the expiry is only reported.
    signal: int
    scope: bytes
    # Whether how long it takes is to be learned.
    learns: bool


class Observation(NamedTuple):
    """How often a process has left a scope, and the longest time that it took, in nanoseconds."""

    scope: bytes
    completions: int
    longest: int


class StepSlot(NamedTuple):
    """The step that a process has come to, and when, in nanoseconds of CLOCK_MONOTONIC."""

    step: int
    when: int


class TableWriter:
    """The worker's end. Any thread may use it, and so may a signal handler that interrupts one.

    The attributes are for rallypoint.timer.worker.expires, which has `acquire` and `release` written out.
    """

    __slots__ = (
        "_count",
        "_described",
        "_indexes",
        "_learned",
        "_notes",
        "_noting",
        "_used",
        "give",
        "laid",
        "listening",
        "memory",
        "ring",
        "take",
        "texts",
        "tick",
        "words",
    )

    def __init__(self, memory: memoryview, ring: Callable[[], None] = lambda: None) -> None:
        """Makes an empty table.

        Args:
            memory: SIZE bytes of zeros.
            ring: to be called by who has written something when the agent does not look by itself.
        """
        _HEAD.pack_into(memory, 0, _MAGIC, 0, 0, 0, 0, 0, 0, 0)
        self._lay(memory)
        self.ring = ring
        # The slot used last is taken first: its scope is likely the one wanted, and its memory warm.
        free = list(range(SLOTS - 1, -1, -1))
        self.take = free.pop  # one thread gets it
        self.give = free.append
        # Of this table only: what is released after a reconnect can't hit another timer.
        self.tick = count(1).__next__
        # What lay_out was last called for.
        self.laid: list[object] = [None] * SLOTS
        self.texts: list[bytes | None] = [None] * SLOTS
        self._used = bytearray(SLOTS)
        self._learned: dict[bytes, int] = {}
        self._indexes = count(0)
        self._described = bytearray(LEARNED)
        self._notes: deque[tuple[int, int]] = deque(maxlen=SLOTS)
        self._noting = Lock()
        self._count = 0

    def _lay(self, memory: memoryview) -> None:
        self.memory = memory
        self.words = memory.cast("Q")
        # Until when the agent looks by itself; element 0, in nanoseconds of CLOCK_MONOTONIC.
        self.listening = self.words[1:2]

    def disown(self, memory: memoryview) -> None:
        """In a forked child: what is written from now on goes elsewhere, and is never rung for.

        Args:
            memory: SIZE bytes of zeros.
        """
        self._lay(memory)
        self.mute()

    def mute(self) -> None:
        """There is nobody to ring for."""
        self.listening[0] = NEVER

    def acquire(self, token: int, since: int, after: int, scope: bytes, kind: int) -> int:
        """Takes a slot for a timer.

        Args:
            token: more than 0, never used before in this table.
            since: nanoseconds of CLOCK_MONOTONIC.
            after: nanoseconds; 0: to be learned.
            scope: 1 to MAX_SCOPE_BYTES bytes.
            kind: see `kind_of`.

        Returns:
            The slot; -1: there is none left.
        """
        try:
            slot = self.take()
        except IndexError:
            self.drop()
            return -1
        self.lay_out(slot, None, scope, after, kind)
        words, at = self.words, SLOT_WORD + slot * SLOT_WORDS
        words[at + 1] = since
        words[at + 4] = token ^ since ^ after ^ kind
        words[at] = token
        return slot

    def lay_out(self, slot: int, place: object, scope: bytes, after: int, kind: int) -> None:
        """Writes what all timers of one place in the program have in common into a slot that was taken.

        Args:
            slot: stays as it is here when it is given back, for as long as `laid` says that it is this place's.
            place: that place; None: no place in particular.
            scope: as for `acquire`, and the others too.
            after: likewise.
            kind: likewise.
        """
        self.laid[slot] = None
        if self.texts[slot] != scope:
            at = _HEADER + slot * _ENTRY + _TEXT
            self.memory[at : at + len(scope)] = scope
            self._used[slot] = 1
            if self.words[_SLOTS_USED // 8] <= slot:
                # Not by what is marked: a signal handler that raises may have kept it from being told.
                self._cover(_SLOTS_USED, self._used)
            self.texts[slot] = scope
        words, at = self.words, SLOT_WORD + slot * SLOT_WORDS
        words[at + 2] = after
        words[at + 3] = kind
        self.laid[slot] = place

    def _cover(self, at: int, used: bytearray) -> None:
        """Tells the reader how far to read: up to the last that is in use.

        Two threads may do this at once, and the lower number be written last. But whoever writes looks at what
        is in use once more, and who marked more than that before then is seen; who marks it later writes later.
        """
        while _WORD.unpack_from(self.memory, at)[0] != (last := used.rfind(1) + 1):
            _WORD.pack_into(self.memory, at, last)

    def drop(self) -> None:
        """Counts a timer that found no slot."""
        self._count += 1
        _WORD.pack_into(self.memory, _DROPPED, self._count)

    def release(self, slot: int) -> None:
        """Frees a slot that `acquire` gave, once."""
        self.words[SLOT_WORD + slot * SLOT_WORDS] = 0
        self.give(slot)

    def kind_of(self, scope: bytes, signal: int, learns: bool) -> int:
        """What `acquire` takes as `kind`.

        Args:
            scope: the same as there.
            signal: see Slot.
            learns: see Slot.
        """
        kind = plain_kind(scope, signal)
        return kind | self._learned_index(scope) + 1 << 32 if learns else kind

    def _learned_index(self, scope: bytes) -> int:
        known = self._learned.get(scope)
        if known is not None:
            return known
        if len(self._learned) >= LEARNED or (index := next(self._indexes)) >= LEARNED:
            return LEARNED
        at = _LEARNED_AT + index * _ENTRY
        self.memory[at + _TEXT : at + _TEXT + len(scope)] = scope
        _WORD.pack_into(self.memory, at + _LEARNED_SIZE, len(scope))
        self._described[index] = 1
        self._cover(_LEARNED_USED, self._described)
        # Of two threads, one wins; the other's entry counts nothing, and readers pass it over.
        return self._learned.setdefault(scope, index)

    def observe(self, kind: int, duration: int) -> None:
        """Notes that a scope that learns took so many nanoseconds. Not for two threads at once."""
        index = (kind >> 32 & _INDEX) - 1
        if 0 <= index < LEARNED:
            at = _LEARNED_AT + index * _ENTRY
            completions, longest = _OBSERVED.unpack_from(self.memory, at)
            # The longest first: a count is worth nothing without it.
            _WORD.pack_into(self.memory, at + 8, max(longest, duration))
            _WORD.pack_into(self.memory, at, completions + 1)

    def note(self, kind: int, duration: int) -> None:
        """`observe`, from any thread, and from a signal handler that interrupts one.

        Who can't have the lock leaves it to the one who has it, who looks once more after letting go of it.
        """
        self._notes.append((kind, duration))
        while self._notes and self._noting.acquire(blocking=False):
            try:
                while self._notes:
                    self.observe(*self._notes.popleft())
            finally:
                self._noting.release()

    def progress(self, step: int, when: int) -> None:
        """Notes the step that the process has come to, and when, in nanoseconds of CLOCK_MONOTONIC."""
        _PROGRESS_WORDS.pack_into(self.memory, _PROGRESS, step, when, step ^ when)


def plain_kind(scope: bytes, signal: int) -> int:
    """What `TableWriter.acquire` takes as `kind` for a scope that does not learn, in any table."""
    return len(scope) | signal << 16 | text_check(scope) << _CHECKED


def text_check(scope: bytes) -> int:
    """The check of a text: never 0."""
    return crc32(scope) & 0xFFFF or 1


class TableReader:
    """The agent's end."""

    def __init__(self, memory: memoryview) -> None:
        """Reads a table.

        Raises:
            MalformedTable: it is none of this layout.
        """
        if len(memory) != SIZE:
            raise MalformedTable(f"a table has {SIZE} bytes, not {len(memory)}")
        if _WORD.unpack_from(memory, 0)[0] != _MAGIC:
            raise MalformedTable("the memory does not begin as a table does")
        self._memory = memory
        self._seen = b""

    def listen_until(self, when: int) -> None:
        """Promises to look once more after that moment of CLOCK_MONOTONIC, in nanoseconds, but not before it.

        What is written down is a little earlier: a write of just then takes some time to become visible. 0: it looks
        no more after the next time.
        """
        _WORD.pack_into(self._memory, _LISTENING, max(when - _VISIBLE, 0))

    def changed(self) -> bool:
        """Whether anything was written since the last call."""
        memory = self._memory
        used = min(_WORD.unpack_from(memory, _SLOTS_USED)[0], SLOTS)
        learned = min(_WORD.unpack_from(memory, _LEARNED_USED)[0], LEARNED)
        seen = b"".join(
            (
                memory[_SLOTS_USED:_HEADER],
                memory[_HEADER : _HEADER + used * _ENTRY],
                memory[_LEARNED_AT : _LEARNED_AT + learned * _ENTRY],
            )
        )
        if seen == self._seen:
            return False
        self._seen = seen
        return True

    def slots(self) -> Iterator[TimerSlot]:
        """The timers that the process holds now."""
        memory = self._memory
        used = min(_WORD.unpack_from(memory, _SLOTS_USED)[0], SLOTS)
        for at in range(_HEADER, _HEADER + used * _ENTRY, _ENTRY):
            token, since, after, kind, check = _SLOT.unpack_from(memory, at)
            if not token or token ^ since ^ after ^ kind != check:
                continue
            scope = bytes(memory[at + _TEXT : at + _TEXT + min(kind & 0xFFFF, MAX_SCOPE_BYTES)])
            if _WORD.unpack_from(memory, at)[0] == token and kind >> _CHECKED in (0, text_check(scope)):
                yield TimerSlot(token, since, after, kind >> 16 & 0xFF, scope, bool(kind >> 32 & _INDEX))

    def observations(self) -> Iterator[Observation]:
        """What the process has seen of scopes that learn, ever."""
        memory = self._memory
        used = min(_WORD.unpack_from(memory, _LEARNED_USED)[0], LEARNED)
        for at in range(_LEARNED_AT, _LEARNED_AT + used * _ENTRY, _ENTRY):
            count, longest = _OBSERVED.unpack_from(memory, at)
            size = min(_WORD.unpack_from(memory, at + _LEARNED_SIZE)[0], MAX_SCOPE_BYTES)
            if count and size:
                yield Observation(bytes(memory[at + _TEXT : at + _TEXT + size]), count, longest)

    def forget(self, scope: bytes) -> None:
        """Has the longest time of a scope found anew.

        If the process leaves the scope just then, that time may not be seen, or the one before come back.
        """
        memory = self._memory
        used = min(_WORD.unpack_from(memory, _LEARNED_USED)[0], LEARNED)
        for at in range(_LEARNED_AT, _LEARNED_AT + used * _ENTRY, _ENTRY):
            size = min(_WORD.unpack_from(memory, at + _LEARNED_SIZE)[0], MAX_SCOPE_BYTES)
            if memory[at + _TEXT : at + _TEXT + size] == scope:
                _WORD.pack_into(memory, at + 8, 0)

    def step(self) -> StepSlot | None:
        """The step that the process has come to; None if it told none, or is just telling another one."""
        step, when, check = _PROGRESS_WORDS.unpack_from(self._memory, _PROGRESS)
        return StepSlot(step, when) if when and step ^ when == check else None

    @property
    def dropped(self) -> int:
        """How many timers found no slot, ever."""
        return int(_WORD.unpack_from(self._memory, _DROPPED)[0])


# ---- Tells whether a descriptor number is still of the file that it was opened for.
#
# A program may close all descriptors that it does not know, as those do that make a daemon of themselves; the
# next
# file that it opens gets the number. Writing to it, or closing it, would harm a file that is none of ours.


class DescriptorCheck:
    """An open file, by what the kernel calls it."""

    __slots__ = ("_file",)

    def __init__(self, descriptor: int) -> None:
        """Takes note of the file that the descriptor is of.

        Raises:
            OSError: it is of none.
        """
        self._file = _file_of(descriptor)

    def is_behind(self, descriptor: int) -> bool:
        """Whether the descriptor is of that file now."""
        try:
            return _file_of(descriptor) == self._file
        except OSError:
            return False


def _file_of(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


# ---- Memory that a process can give another one a look into.


# F_ADD_SEALS and F_SEAL_* of Linux, which not every build of Python has names for.
_ADD_SEALS, _SEAL, _SHRINK, _GROW = 1033, 0x1, 0x2, 0x4

# Memory whose descriptors the program has closed. A map closes one of its own when it is freed, which would be
# another file's by now.
_never_freed: list[memoryview] = []


class SharedMemory:
    """Some zeros, in memory that any process can map that is sent the descriptor. It can't change its size."""

    def __init__(self, size: int) -> None:
        """Makes it.

        Args:
            size: bytes. Only those that are written to take memory.

        Raises:
            OSError: there is none to be had, or this kernel doesn't share memory so.
        """
        self._descriptor = -1
        # None until all is made: a signal handler that raises may come in between.
        self._file: DescriptorCheck | None = None
        try:
            self._descriptor = os.memfd_create("rallypoint-timers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._descriptor, size)
            # Else whoever maps it could be killed by its owner, who makes it shorter.
            fcntl.fcntl(self._descriptor, _ADD_SEALS, _SEAL | _SHRINK | _GROW)
            self.memory = memoryview(mmap.mmap(self._descriptor, size))
            self._file = DescriptorCheck(self._descriptor)
        except (AttributeError, ValueError) as error:
            raise OSError(f"this Python can't share memory: {error}") from error

    @property
    def descriptor(self) -> int:
        """What another process can map it by; -1 once that is closed, be it by the program."""
        descriptor = self._descriptor
        return descriptor if self._file is None or self._file.is_behind(descriptor) else -1

    def close(self) -> None:
        """Lets go of the descriptor. The memory stays for as long as somebody refers to it."""
        descriptor = self.descriptor
        if descriptor >= 0:
            os.close(descriptor)
        elif self._descriptor >= 0:
            _never_freed.append(self.memory)
        self._descriptor = -1

    def __del__(self) -> None:
        self.close()


def private_memory(size: int) -> memoryview:
    """So many zeros that no other process sees, not even a forked one. Those not written to take no memory."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
