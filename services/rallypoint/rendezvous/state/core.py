"""Fenced states, and decisions on a batch of changes to them. Pure: no clock, no randomness, no I/O.

Changes are decided in batches against a `StatesDraft`, a view of the states after the batch. The caller makes the
draft's entries durable and only then applies it, so readers see durable state at any time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from zlib import crc32

from rallypoint.rendezvous.base.entries import (
    RESERVED,
    Operation,
    OperationRecord,
    StoreChange,
    Writer,
    is_repetition,
)
from rallypoint.rendezvous.base.limits import SharedTotals, StateLimits
from rallypoint.rendezvous.base.refusals import StatesFull, TooManyStates

# ---- Fencing tokens: each identifies one state of one run, and never another. Pure.
#
# A token is a number, which grows by one with each state that replaces another, and a nonce drawn for this state alone.
# The number orders the states of a run. The nonce fences: in all cases that reset the numbers (the state is dropped and
# set again, a journal in memory dies with its process, an old backup is restored), a token that was given out once is
# not given out again.


NONCE_BYTES = 16
_NUMBER_BYTES = 8
TOKEN_BYTES = _NUMBER_BYTES + NONCE_BYTES


def next_token(before: bytes | None, nonce: bytes) -> bytes:
    """Return the token of a state that replaces the one with the token `before`; None: it is the first.

    Args:
        before: A token of this module.
        nonce: `NONCE_BYTES` random bytes, drawn for this token.
    """
    if len(nonce) != NONCE_BYTES:
        raise ValueError(f"a nonce has {NONCE_BYTES} bytes, not {len(nonce)}")
    number = 0 if before is None else number_of(before)
    return (number + 1).to_bytes(_NUMBER_BYTES) + nonce


def number_of(token: bytes) -> int:
    """Return the number in a token of this module."""
    return int.from_bytes(token[:_NUMBER_BYTES])


# The journal space of the fenced states: a run's own is 0, and rounds have positive numbers.
SPACE = -1
STATE_KEY = "state"

# Memory of a run's state besides its bytes, and of each recorded operation: their Python objects.
STATE_OVERHEAD_BYTES = 512
OPERATION_BYTES = 384

# First byte of a state's journal entry: the layout of the rest. 1: a token, then the state.
_LAYOUT = b"\x01"


@dataclass(frozen=True, slots=True)
class FencedState:
    """A state and its token."""

    state: bytes
    token: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SetState:
    """A state, and the condition for setting it.

    Attributes:
        run_id: Name of the run.
        state: The state.
        token: Token of the state to replace; None: set only if there is none.
        operation: The client's name for the request; None: a repetition is a new request.
        writer: The node whose lease must be held; None: no lease is checked.
        client: The client, for the limits of one; "": unknown.
    """

    run_id: str
    state: bytes
    token: bytes | None = None
    operation: Operation | None = None
    writer: Writer | None = None
    client: str = ""

    @property
    def queued_bytes(self) -> int:
        """Bytes that the request holds while it waits."""
        return len(self.state) + len(self.token or b"") + STATE_OVERHEAD_BYTES

    def fingerprint(self) -> int:
        """Return a checksum of the request."""
        # The length keeps a token and a state apart; -1 keeps no token and an empty one apart.
        checksum = crc32(b"%d " % (-1 if self.token is None else len(self.token)))
        return crc32(self.state, crc32(self.token or b"", checksum))


@dataclass(frozen=True, slots=True)
class SetOutcome:
    """The result of a set.

    Attributes:
        current: The present state: the request's own state if it was set; None: there is none, and none was set.
        has_set: True if the request's state was set.
    """

    current: FencedState | None
    has_set: bool


@dataclass(frozen=True, slots=True)
class HeldState:
    """The entries of one run.

    Attributes:
        current: The state.
        operations: Last set of each slot by its record key, the least recently used first.
    """

    current: FencedState
    operations: Mapping[str, OperationRecord] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def used_bytes(self) -> int:
        """Bytes that count towards the limit."""
        return len(self.current.state) + STATE_OVERHEAD_BYTES + OPERATION_BYTES * len(self.operations)


class States:
    """The durable states of all runs."""

    def __init__(self) -> None:
        self._held: dict[str, HeldState] = {}
        self.used_bytes = 0

    @classmethod
    def restore(cls, entries: Iterable[StoreChange]) -> Generator[None, None, States]:
        """Build the states from a journal's entries, one per key; in small steps (see `cooperative.Work`).

        Raises:
            ValueError: An entry is not a fenced state, or of a newer version.
        """
        current: dict[str, FencedState] = {}
        operations: dict[str, dict[str, OperationRecord]] = {}
        for entry in entries:
            if entry.value is None:
                raise ValueError(f"the entry {entry.key!r} of run {entry.run_id!r} is a deletion")
            if entry.key == STATE_KEY:
                current[entry.run_id] = _decode(entry.run_id, entry.value)
            elif entry.key.startswith(RESERVED):
                record = OperationRecord.decode(entry.value)
                operations.setdefault(entry.run_id, {})[entry.key] = record
            else:
                raise ValueError(
                    f"unknown entry {entry.key!r} of run {entry.run_id!r} among the fenced states"
                )
            yield
        states = cls()
        for run_id, state in current.items():
            # A journal that keeps one row per key does not keep the order of use; the stamps do.
            records = sorted(operations.get(run_id, {}).items(), key=lambda item: item[1].stamp)
            states.apply(run_id, HeldState(state, dict(records)))
            yield
        return states

    def __len__(self) -> int:
        return len(self._held)

    def runs(self) -> list[str]:
        """Return the runs that have a state."""
        return list(self._held)

    def held(self, run_id: str) -> HeldState | None:
        """Return the state and operations of a run; None: it has no state."""
        return self._held.get(run_id)

    def apply(self, run_id: str, held: HeldState | None) -> None:
        """Apply a durable change."""
        before = self._held.pop(run_id, None)
        self.used_bytes -= 0 if before is None else before.used_bytes
        if held is not None:
            self._held[run_id] = held
            self.used_bytes += held.used_bytes


class StateCreators:
    """The clients that have created states since this process serves them, with the bytes of each state."""

    def __init__(self, limits: StateLimits, totals: SharedTotals) -> None:
        """Begin with no state; `totals`: the sums for each client, over all shards."""
        self._limits = limits
        self._counts, self._bytes = totals.states_by_client, totals.state_bytes_by_client
        self._states: dict[str, tuple[str, int]] = {}

    def check(self, run_id: str, client: str, used_bytes: int) -> None:
        """Raise TooManyStates or StatesFull if the creator of a state has no room for that many bytes of it.

        Args:
            client: Its creator, if it is new; "": it is not, or the client is unknown.
        """
        is_new = run_id not in self._states
        owner, before = self._states.get(run_id, (client, 0))
        if not owner or used_bytes <= before:
            return
        if is_new and self._counts.used(owner) >= self._limits.states_per_client:
            raise TooManyStates(self._limits.states_per_client, owner)
        used = self._bytes.used(owner) + used_bytes - before
        if used > self._limits.client_bytes:
            raise StatesFull(run_id, used, self._limits.client_bytes, owner)

    def record(self, run_id: str, client: str, used_bytes: int) -> None:
        """Set the size of a state; see `check`. 0: it is dropped."""
        owner, before = self._states.pop(run_id, (client, 0))
        if not owner:
            return
        self._counts.add(owner, (used_bytes > 0) - (before > 0))
        self._bytes.add(owner, used_bytes - before)
        if used_bytes:
            self._states[run_id] = owner, used_bytes

    def release(self) -> None:
        """Subtract all states from the totals."""
        for run_id in [*self._states]:
            self.record(run_id, "", 0)


class StatesDraft:
    """The states after a batch of changes."""

    def __init__(
        self,
        states: States,
        limits: StateLimits,
        creators: StateCreators,
        other_states: int = 0,
        other_bytes: int = 0,
    ) -> None:
        """Begin with no changes.

        Args:
            creators: The clients that have created states; changed with each decision.
            other_states: Number of states in other shards of the service.
            other_bytes: Bytes of these.
        """
        self._states = states
        self._limits = limits
        self._creators = creators
        self._used_bytes = states.used_bytes
        self._count = len(states)
        self._other_states = other_states
        self._other_bytes = other_bytes
        self._entries: dict[tuple[str, str], bytes | None] = {}
        self.changed: dict[str, HeldState | None] = {}

    def held(self, run_id: str) -> HeldState | None:
        """Return the state and operations of a run after the changes decided so far."""
        return self.changed[run_id] if run_id in self.changed else self._states.held(run_id)

    @property
    def count(self) -> int:
        """Number of states after the batch."""
        return self._count

    @property
    def used_bytes(self) -> int:
        """Bytes of the states after the batch."""
        return self._used_bytes

    @property
    def entry_count(self) -> int:
        """Number of entries to be made durable."""
        return len(self._entries)

    def entries(self) -> list[StoreChange]:
        """Return the entries to be made durable, each key once."""
        return [StoreChange(run_id, SPACE, key, value) for (run_id, key), value in self._entries.items()]

    def repetition(self, request: SetState) -> SetOutcome | None:
        """Return the result of an earlier copy of a request; None: there was none.

        Raises:
            Refused: Its operation comes too late, or belongs to another request.
        """
        operation, held = request.operation, self.held(request.run_id)
        if operation is None or held is None:
            return None
        record = held.operations.get(operation.record_key)
        if record is None or not is_repetition(operation, request.fingerprint, record):
            return None
        token = record.result.to_bytes(TOKEN_BYTES)
        return SetOutcome(FencedState(request.state, token), has_set=True)

    def set(self, request: SetState, nonce: bytes) -> SetOutcome:
        """Set a state, if its token is the current one.

        Args:
            request: A request that is not a repetition.
            nonce: Random bytes, drawn for this call.

        Raises:
            Refused: There is no room for it; the draft is unchanged.
        """
        held = self.held(request.run_id)
        current = None if held is None else held.current
        # None means "there is none" on both sides; bytes, even empty ones, match nothing if there is no state.
        if request.token != (None if current is None else current.token):
            return SetOutcome(current, has_set=False)
        token = next_token(request.token, nonce)
        state = FencedState(request.state, token)
        operations = {} if held is None else dict(held.operations)
        entries: dict[tuple[str, str], bytes | None] = {
            (request.run_id, STATE_KEY): _LAYOUT + token + request.state
        }
        if (operation := request.operation) is not None:
            record = OperationRecord(
                operation.sequence, number_of(token), request.fingerprint(), int.from_bytes(token)
            )
            operations.pop(operation.record_key, None)  # the latest used goes to the end
            operations[operation.record_key] = record
            entries[request.run_id, operation.record_key] = record.encode()
            for key in list(islice(operations, max(0, len(operations) - self._limits.operations))):
                del operations[key]
                entries[request.run_id, key] = None
        self._change(request.run_id, HeldState(state, operations), request.client if held is None else "")
        self._entries |= entries
        return SetOutcome(state, has_set=True)

    def drop(self, run_id: str) -> None:
        """Drop a run's state and the record of its operations, if there is one."""
        held = self.held(run_id)
        if held is None:
            return
        self._change(run_id, None)
        for key in (STATE_KEY, *held.operations):
            self._entries[run_id, key] = None

    def _change(self, run_id: str, held: HeldState | None, client: str = "") -> None:
        before = self.held(run_id)
        count = self._count + (held is not None) - (before is not None)
        size = 0 if held is None else held.used_bytes
        used = self._used_bytes + size - (0 if before is None else before.used_bytes)
        # A change that adds nothing is always allowed: a service whose limits were lowered must still serve.
        if count > max(self._limits.states - self._other_states, self._count):
            raise TooManyStates(self._limits.states)
        if used > max(self._limits.state_bytes - self._other_bytes, self._used_bytes):
            raise StatesFull(run_id, used + self._other_bytes, self._limits.state_bytes)
        self._creators.check(run_id, client, size)
        self._creators.record(run_id, client, size)
        self._count, self._used_bytes = count, used
        self.changed[run_id] = held


def _decode(run_id: str, value: bytes) -> FencedState:
    head = len(_LAYOUT)
    if value[:head] != _LAYOUT or len(value) < head + TOKEN_BYTES:
        raise ValueError(f"the entry of the fenced state of run {run_id!r} begins with {value[:head]!r}")
    return FencedState(state=value[head + TOKEN_BYTES :], token=value[head : head + TOKEN_BYTES])


# ---- Times of last use, to drop names that are unused for long. Pure.


class LastUsed:
    """Names in the order of their last use; all have the same time to live after it."""

    def __init__(self, ttl: float) -> None:
        """Start with no names.

        Args:
            ttl: Time that a name lives after its last use, seconds.
        """
        self._ttl = ttl
        self._used: dict[str, float] = {}  # the least recently used first

    def touch(self, name: str, now: float) -> None:
        """Record a use."""
        self._used.pop(name, None)  # the latest used goes to the end
        self._used[name] = now

    def discard(self, name: str) -> None:
        """Forget a name, if it is known."""
        self._used.pop(name, None)

    def next_deadline(self) -> float | None:
        """Return the time at which the next name expires unless it is used before; None: there is none."""
        return next((used + self._ttl for used in self._used.values()), None)

    def due(self, now: float) -> Iterator[str]:
        """Yield the expired names, the least recently used first. Touch or discard each."""
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            yield next(iter(self._used))

    def __contains__(self, name: str) -> bool:
        """Return True if a name is known; it may be due."""
        return name in self._used


class SampledUse:
    """Samples uses that are counted at another place: forwards one use per name and period."""

    def __init__(self, period: float) -> None:
        """Forward the next use of every name.

        Args:
            period: Seconds. The receiver must let names live longer by this time.
        """
        self._passed_on = LastUsed(period)

    def pass_on(self, name: str, now: float) -> bool:
        """Record a use; return True if it must be forwarded."""
        for old in self._passed_on.due(now):
            self._passed_on.discard(old)
        if name in self._passed_on:
            return False
        self._passed_on.touch(name, now)
        return True
