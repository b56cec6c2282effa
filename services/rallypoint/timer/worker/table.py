"""The table of timers that a worker process shares with its agent: the layout, and both ends of it.

A worker that sent a message at each entry of a scope would pay for a system call and for waking its agent, thousands
of times a second. So it writes into shared memory, and rings (sends a message) only if the agent is not about to poll
the table. docs/timer-socket.md describes the bytes for other languages.

Both ends run at once and neither can lock the other out, for the worker may be killed at any instruction:

- A slot is valid if its words match their check, and its text matches the text's check, which is one of these
words. So a half-written slot is not taken for a timer, even if the machine makes words visible out of order.
- A worker that frees a slot clears its token first. So a reader that finds the same token after copying the scope
has copied the scope of that timer; where a machine reorders writes, the text's check detects it.
- The worker reads the clock *after* it has written. If that is later than `listening_until`, it rings. The agent
polls once more after that time, later by far than a write takes to become visible. So each write is either seen by
that poll or followed by a ring.
- Before that poll the agent writes 0 there. A worker that frees a slot rings only if it finds 0: the agent sees an
unseen release with the next ring or poll, and in any case before it acts on an expiry.
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
from typing import NamedTuple

MAX_SCOPE_BYTES = 256
SLOTS = 1024
"""Most timers of one process at once; further ones are not guarded, but counted."""
LEARNED = 256
"""Most learned scopes of one process; durations of further ones are not reported."""

_MAGIC = 0x3130_7479_6C6C_6172  # "rallyt01" with the low byte first; all words are in host byte order
_ENTRY = 320  # bytes of a slot, and of a learned scope
_TEXT = 64  # where its text begins
_HEADER = 64
_LEARNED_AT = _HEADER + SLOTS * _ENTRY
SIZE = _LEARNED_AT + LEARNED * _ENTRY
"""Bytes of a table. Only the used part takes memory."""

# magic, listening_until (written by the agent), slots used so far, learned scopes used so far, step, when it was
# reported, their check, timers that found no slot
_HEAD = struct.Struct("=QQQQQQQQ")
_LISTENING, _SLOTS_USED, _LEARNED_USED, _PROGRESS, _DROPPED = 8, 16, 24, 32, 56
_PROGRESS_WORDS = struct.Struct("=QQQ")
# token, since, after, kind, check. Kind: size of the scope | signal << 16 | 1 + learned index << 32 | the text's check
# << 48; a check of 0 means that the text is not checked.
_SLOT = struct.Struct("=QQQQQ")
_INDEX, _CHECKED = 0xFFFF, 48
# completions, longest, size of the scope
_OBSERVED = struct.Struct("=QQ")
_LEARNED_SIZE = 16
_WORD = struct.Struct("=Q")
# Nanoseconds after which a write is visible to other processors, with a large margin.
_VISIBLE = 1_000_000
NEVER = 2**64 - 1
"""The value of `listening_until` if there is no agent to ring."""
SLOT_WORD, SLOT_WORDS = _HEADER // 8, _ENTRY // 8
"""The first word of the slots, and the words per slot: for the inlined `TableWriter.acquire` in `expires`."""


class MalformedTable(Exception):
    """The memory is not a table of this layout."""


class TimerSlot(NamedTuple):
    """A timer that a process holds. Nanoseconds; `since` is by CLOCK_MONOTONIC, which all processes share."""

    token: int
    since: int
    # 0: learned.
    after: int
    # The requested signal; 0: the agent's choice; 255: none, the expiry is only reported.
    signal: int
    scope: bytes
    # True: its duration is learned from.
    learns: bool


class Observation(NamedTuple):
    """The completions of a scope by a process, and the longest of them, in nanoseconds."""

    scope: bytes
    completions: int
    longest: int


class StepSlot(NamedTuple):
    """The step that a process has reached, and when, in nanoseconds of CLOCK_MONOTONIC."""

    step: int
    when: int


class TableWriter:
    """The worker's end. Any thread may use it, and so may a signal handler that interrupts one.

    The public attributes are for rallypoint.timer.worker.expires, which inlines `acquire` and `release`.
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
        """Create an empty table in SIZE zero bytes. A writer calls `ring` if the agent does not poll."""
        _HEAD.pack_into(memory, 0, _MAGIC, 0, 0, 0, 0, 0, 0, 0)
        self._lay(memory)
        self.ring = ring
        # The slot used last is taken first: its scope is likely the one needed, and its memory is in the caches.
        free = list(range(SLOTS - 1, -1, -1))
        self.take = free.pop  # atomic: one thread gets it
        self.give = free.append
        # Tokens of this table only: a release after a reconnect can't hit another timer.
        self.tick = count(1).__next__
        # For each slot, the call site of the last `lay_out`.
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
        # Until when the agent polls by itself; element 0, in nanoseconds of CLOCK_MONOTONIC.
        self.listening = self.words[1:2]

    def disown(self, memory: memoryview) -> None:
        """In a forked child: write to `memory`, SIZE private bytes of zeros, from now on, and never ring."""
        self._lay(memory)
        self.mute()

    def mute(self) -> None:
        """Never ring again: there is no agent."""
        self.listening[0] = NEVER

    def acquire(self, token: int, since: int, after: int, scope: bytes, kind: int) -> int:
        """Take a slot for a timer.

        Args:
            token: more than 0, never used before in this table.
            since: nanoseconds of CLOCK_MONOTONIC.
            after: nanoseconds; 0: learned.
            scope: 1 to MAX_SCOPE_BYTES bytes.
            kind: see `kind_of`.

        Returns:
            The slot; -1: all slots are in use.
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

    def lay_out(self, slot: int, site: object, scope: bytes, after: int, kind: int) -> None:
        """Write the values that all timers of one call site have in common into a slot that was taken.

        A freed slot keeps them for as long as `laid` holds this call site for it. `site` is None for no particular
        call site; the other arguments are as for `acquire`.
        """
        self.laid[slot] = None
        if self.texts[slot] != scope:
            at = _HEADER + slot * _ENTRY + _TEXT
            self.memory[at : at + len(scope)] = scope
            self._used[slot] = 1
            if self.words[_SLOTS_USED // 8] <= slot:
                # Compare with the table, not with `_used`: a signal handler that raises may have come between marking
                # and writing.
                self._cover(_SLOTS_USED, self._used)
            self.texts[slot] = scope
        words, at = self.words, SLOT_WORD + slot * SLOT_WORDS
        words[at + 2] = after
        words[at + 3] = kind
        self.laid[slot] = site

    def _cover(self, at: int, used: bytearray) -> None:
        """Write for the reader how far to read: up to the last entry in use.

        Two threads may do this at once, and the lower number may be written last. But each writer compares with `used`
        once more after its write, and so sees a higher entry that was marked before; a thread that marks one later
        writes later.
        """
        while _WORD.unpack_from(self.memory, at)[0] != (last := used.rfind(1) + 1):
            _WORD.pack_into(self.memory, at, last)

    def drop(self) -> None:
        """Count a timer that found no slot."""
        self._count += 1
        _WORD.pack_into(self.memory, _DROPPED, self._count)

    def release(self, slot: int) -> None:
        """Free a slot that `acquire` returned, once."""
        self.words[SLOT_WORD + slot * SLOT_WORDS] = 0
        self.give(slot)

    def kind_of(self, scope: bytes, signal: int, learns: bool) -> int:
        """Return the `kind` for `acquire`; the arguments are as in TimerSlot."""
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
        # If two threads add the same scope, one wins; the other's entry counts nothing, and readers skip it.
        return self._learned.setdefault(scope, index)

    def observe(self, kind: int, duration: int) -> None:
        """Record one completion of a learned scope, of so many nanoseconds. Not for two threads at once."""
        index = (kind >> 32 & _INDEX) - 1
        if 0 <= index < LEARNED:
            at = _LEARNED_AT + index * _ENTRY
            completions, longest = _OBSERVED.unpack_from(self.memory, at)
            # The longest first: a count is useless without it.
            _WORD.pack_into(self.memory, at + 8, max(longest, duration))
            _WORD.pack_into(self.memory, at, completions + 1)

    def note(self, kind: int, duration: int) -> None:
        """Call `observe` from any thread, or from a signal handler that interrupts one.

        A thread that can't get the lock leaves its note to the holder, which checks once more after releasing the
        lock.
        """
        self._notes.append((kind, duration))
        while self._notes and self._noting.acquire(blocking=False):
            try:
                while self._notes:
                    self.observe(*self._notes.popleft())
            finally:
                self._noting.release()

    def progress(self, step: int, when: int) -> None:
        """Record the step that the process has reached, and when, in nanoseconds of CLOCK_MONOTONIC."""
        _PROGRESS_WORDS.pack_into(self.memory, _PROGRESS, step, when, step ^ when)


def plain_kind(scope: bytes, signal: int) -> int:
    """Return the `kind` for `TableWriter.acquire` of a scope that does not learn; it is valid in any table."""
    return len(scope) | signal << 16 | text_check(scope) << _CHECKED


def text_check(scope: bytes) -> int:
    """Return the check of a text: never 0."""
    return crc32(scope) & 0xFFFF or 1


class TableReader:
    """The agent's end."""

    def __init__(self, memory: memoryview) -> None:
        """Open a table.

        Raises:
            MalformedTable: it does not have this layout.
        """
        if len(memory) != SIZE:
            raise MalformedTable(f"a table has {SIZE} bytes, not {len(memory)}")
        if _WORD.unpack_from(memory, 0)[0] != _MAGIC:
            raise MalformedTable("the memory does not begin with the magic number of a table")
        self._memory = memory
        self._seen = b""

    def listen_until(self, when: int) -> None:
        """Promise to poll once more after that time of CLOCK_MONOTONIC, in nanoseconds, but not before it.

        The written time is a little earlier, because a last write before it takes some time to become visible. 0: the
        agent polls no more after the next time.
        """
        _WORD.pack_into(self._memory, _LISTENING, max(when - _VISIBLE, 0))

    def changed(self) -> bool:
        """Return True if anything was written since the last call."""
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
        """Yield the timers that the process holds now."""
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
        """Yield all completions of learned scopes that the process has ever recorded."""
        memory = self._memory
        used = min(_WORD.unpack_from(memory, _LEARNED_USED)[0], LEARNED)
        for at in range(_LEARNED_AT, _LEARNED_AT + used * _ENTRY, _ENTRY):
            count, longest = _OBSERVED.unpack_from(memory, at)
            size = min(_WORD.unpack_from(memory, at + _LEARNED_SIZE)[0], MAX_SCOPE_BYTES)
            if count and size:
                yield Observation(bytes(memory[at + _TEXT : at + _TEXT + size]), count, longest)

    def forget(self, scope: bytes) -> None:
        """Reset the longest time of a scope.

        If the process leaves the scope at the same time, that duration may be lost, or the old longest may come back.
        """
        memory = self._memory
        used = min(_WORD.unpack_from(memory, _LEARNED_USED)[0], LEARNED)
        for at in range(_LEARNED_AT, _LEARNED_AT + used * _ENTRY, _ENTRY):
            size = min(_WORD.unpack_from(memory, at + _LEARNED_SIZE)[0], MAX_SCOPE_BYTES)
            if memory[at + _TEXT : at + _TEXT + size] == scope:
                _WORD.pack_into(memory, at + 8, 0)

    def step(self) -> StepSlot | None:
        """Return the last reported step; None if there is none, or another one is being written."""
        step, when, check = _PROGRESS_WORDS.unpack_from(self._memory, _PROGRESS)
        return StepSlot(step, when) if when and step ^ when == check else None

    @property
    def dropped(self) -> int:
        """The number of timers that ever found no slot."""
        return int(_WORD.unpack_from(self._memory, _DROPPED)[0])


# ---- A check that a descriptor number still belongs to the file that it was opened for.
#
# A program may close all descriptors that it does not know, as daemons do when they start; the next file that it opens
# gets the number. Writing to it, or closing it, would harm a file of the program.


class DescriptorCheck:
    """Identifies an open file by its device and inode."""

    __slots__ = ("_file",)

    def __init__(self, descriptor: int) -> None:
        """Remember the file of the descriptor.

        Raises:
            OSError: the descriptor is not open.
        """
        self._file = _file_of(descriptor)

    def is_behind(self, descriptor: int) -> bool:
        """Return True if the descriptor belongs to that file now."""
        try:
            return _file_of(descriptor) == self._file
        except OSError:
            return False


def _file_of(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


# ---- Memory that a process can share with another one.


# F_ADD_SEALS and F_SEAL_* of Linux, for which not every build of Python has names.
_ADD_SEALS, _SEAL, _SHRINK, _GROW = 1033, 0x1, 0x2, 0x4

# Memory whose descriptors the program has closed. A map closes its own duplicate of the descriptor when it is freed;
# that number may belong to another file by now, so these maps are never freed.
_never_freed: list[memoryview] = []


class SharedMemory:
    """Zeroed memory that any process with the descriptor can map. No process can change its size."""

    def __init__(self, size: int) -> None:
        """Allocate `size` bytes; only pages that are written to take memory.

        Raises:
            OSError: there is no memory, or this kernel can't share memory in this way.
        """
        self._descriptor = -1
        # None until everything is created: a signal handler that raises may interrupt before.
        self._file: DescriptorCheck | None = None
        try:
            self._descriptor = os.memfd_create("rallypoint-timers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._descriptor, size)
            # Otherwise the owner could shrink the file, and a process that maps it would be killed by SIGBUS.
            fcntl.fcntl(self._descriptor, _ADD_SEALS, _SEAL | _SHRINK | _GROW)
            self.memory = memoryview(mmap.mmap(self._descriptor, size))
            self._file = DescriptorCheck(self._descriptor)
        except (AttributeError, ValueError) as error:
            raise OSError(f"this Python can't share memory: {error}") from error

    @property
    def descriptor(self) -> int:
        """The descriptor with which another process can map it; -1 once it is closed, also if the program closed it."""
        descriptor = self._descriptor
        return descriptor if self._file is None or self._file.is_behind(descriptor) else -1

    def close(self) -> None:
        """Close the descriptor. The memory stays while there are references to it."""
        descriptor = self.descriptor
        if descriptor >= 0:
            os.close(descriptor)
        elif self._descriptor >= 0:
            _never_freed.append(self.memory)
        self._descriptor = -1

    def __del__(self) -> None:
        self.close()


def private_memory(size: int) -> memoryview:
    """Return zeroed memory that is private, also after a fork. Only pages that are written to take memory."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
