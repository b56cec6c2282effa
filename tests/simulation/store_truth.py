"""A model of store and fenced state: it keeps every durable value by key, and checks every response against it.

With few exceptions, no value is written twice, so a value identifies the moment at which it was current. Four rules are
checked for every key, on requests and responses as a server receives and sends them:

- an acknowledged write is durable, and stays: the next value builds on it;
- a write takes effect once, even if it is sent several times;
- a read returns no value older than the newest that a client had received when the server took the request;
- no write of a round is accepted after a node was sent the end of the round, and none under a lease that is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import eq
from typing import Any, TypeAlias

from rallypoint.rendezvous.base.entries import RESERVED, StoreChange
from rallypoint.rendezvous.state.core import SPACE, STATE_KEY, TOKEN_BYTES, number_of
from rallypoint.rendezvous.v1 import state_service_pb2 as state_pb
from rallypoint.rendezvous.v1 import store_service_pb2 as pb
from rendezvous.core.ledger import Violation, require

Key: TypeAlias = tuple[str, int, str]
"""Run, space and name of a key."""
_Operation: TypeAlias = tuple[str, int, int]

COUNTER, LOG, REGISTER, PAIR, CHAIN = "counter", "log", "register", "pair", "chain"
"""Kinds of keys, the prefixes of their names: incremented by one, appended to, set by one client, set in pairs by one
client, and compared and set."""
END = b";"
"""Ends each entry of a log. No name contains it."""


@dataclass(slots=True)
class Lifeline:
    """All values that a key had, the durable one last; and the index of the earliest that may still be read."""

    values: list[bytes | None] = field(default_factory=lambda: [None])
    told: int = 0

    @property
    def current(self) -> bytes | None:
        """The durable value; None: the key is absent."""
        return self.values[-1]

    def tell(self, index: int) -> None:
        """Note that a client knows the value."""
        self.told = max(self.told, index)

    def find(self, holds: Callable[[Any], bool], since: int = 0) -> int:
        """Return the index of the first value, from `since` on, for which `holds` is true; -1: there is none."""
        for index in range(since, len(self.values)):
            if holds(self.values[index]):
                return index
        return -1


@dataclass(slots=True)
class Asked:
    """A request that a server has received."""

    request: Any
    # By key: the earliest value that the response may contain.
    since: dict[Key, int]
    # True if it may repeat a write: an earlier request for it may have been carried out, as far as is known.
    repeated: bool
    at: float


@dataclass(slots=True)
class StoreTruth:
    """The checks of the durable entries of all stores and fenced states, and of the calls to them."""

    # Called with a violation; raising it here would raise it in the product's code.
    blame: Callable[[Violation], None]
    note: Callable[..., None]
    # Returns True if a node's lease is over, by durable facts.
    lease_over: Callable[[str, str, int], bool]
    # Returns the newest round of a run whose end is durable.
    round_over: Callable[[str], int]
    now: Callable[[], float] = lambda: 0.0
    lines: dict[Key, Lifeline] = field(default_factory=dict)
    # By operation: the request of a write; the time at which its record became durable.
    writes: dict[_Operation, Any] = field(default_factory=dict)
    durable_at: dict[_Operation, float] = field(default_factory=dict)
    # Requests for a write, less those for which a server replied that it did nothing.
    attempts: dict[_Operation, int] = field(default_factory=dict)
    # By counter: operations received, and operations acknowledged, by their sums.
    added: dict[Key, set[_Operation]] = field(default_factory=dict)
    sums: dict[Key, dict[int, _Operation]] = field(default_factory=dict)
    # By run: when a server first sent the end of a round to a node, as (round, time), both growing.
    ends: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    # By fencing token: its state.
    states: dict[bytes, bytes] = field(default_factory=dict)
    # By fenced state: its token.
    tokens: dict[bytes, bytes] = field(default_factory=dict)
    forgotten: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)

    def line(self, key: Key) -> Lifeline:
        """Return the values of a key."""
        line = self.lines.get(key)
        if line is None:
            line = self.lines[key] = Lifeline()
        return line

    # ---- the journal

    def durable(self, change: StoreChange) -> None:
        """A change became durable."""
        key = change.run_id, change.round, change.key
        if change.key.startswith(RESERVED):
            self._record(change)
            return
        line = self.line(key)
        if change.value == line.current and change.value is None:
            return
        try:
            self._judge_change(key, line.current, change.value)
        except Violation as violation:
            self.note("stored", *key, change.value)
            self.blame(violation)
        line.values += _values_between(key, line.current, change.value)

    def _record(self, change: StoreChange) -> None:
        if change.value is None:
            return
        client_id, _, slot = change.key.removeprefix(f"{RESERVED}operation/").rpartition("/")
        operation = client_id, int(slot), int(change.value.split()[0])
        if operation in self.durable_at:
            if change.run_id not in self.forgotten:
                self.blame(Violation("a write takes effect once"))
            return
        self.durable_at[operation] = self.now()
        writer = getattr(self.writes.get(operation), "writer", None)
        if writer is not None and writer.lease:
            over = self.lease_over(change.run_id, writer.node_id, writer.lease)
            if over:
                self.blame(Violation("nothing is written under a lease that is over"))

    def _judge_change(self, key: Key, before: bytes | None, value: bytes | None) -> None:
        run_id, space, name = key
        if run_id in self.forgotten:
            return
        kind = name.partition("/")[0]
        if space == SPACE:
            self._judge_state(before, value)
        elif value is None:
            over = space > 0 and self.round_over(run_id) >= space
            require(over or kind == REGISTER, "what was written is deleted at the end of its round only")
        elif kind == LOG:
            require(value.startswith(before or b""), "what was acknowledged is not lost")
            entries = value.split(END)
            require(len(set(entries)) == len(entries), "a write takes effect once")
        elif kind == COUNTER:
            require(int(value) > int(before or b"0"), "what was acknowledged is not lost")
            require(int(value) <= len(self.added.get(key, ())), "a write takes effect once")
        elif kind in (REGISTER, PAIR, CHAIN):
            require(value not in self.line(key).values, "a write takes effect once")

    def _judge_state(self, before: bytes | None, value: bytes | None) -> None:
        require(value is not None, "a fenced state that is in use stays")
        assert value is not None
        token, state = _parted(value)
        require(self.states.setdefault(token, state) == state, "a token stands for one state")
        number = 0 if before is None else number_of(_parted(before)[0])
        require(number_of(token) == number + 1, "tokens grow by one with every state")
        require(self.tokens.setdefault(state, token) == token, "a write takes effect once")

    def forget(self, run_id: str) -> None:
        """A run was forgotten, with its store. Its entries may be deleted, and its keys may start again from empty."""
        self.forgotten.add(run_id)

    # ---- messages to nodes

    def round_ended(self, run_id: str, round_: int) -> None:
        """A server sends a node the end of a round."""
        ends = self.ends.setdefault(run_id, [])
        if not ends or round_ > ends[-1][0]:
            ends.append((round_, self.now()))

    def _over_by(self, run_id: str, round_: int, when: float) -> bool:
        """Return True if a node had been sent the end of a round before a time."""
        return any(ended >= round_ and at < when for ended, at in self.ends.get(run_id, ()))

    # ---- calls, as servers receive and answer them

    def asked(self, request: Any) -> Asked:
        """A server receives a request."""
        repeated = False
        if (operation := _operation_of(request)) is not None:
            self.writes[operation] = request
            repeated = self.attempts.get(operation, 0) > 0
            self.attempts[operation] = self.attempts.get(operation, 0) + 1
            if isinstance(request, pb.AddRequest):
                self.added.setdefault((request.run_id, request.round, request.key), set()).add(operation)
        return Asked(request, {key: self.line(key).told for key in _keys_of(request)}, repeated, self.now())

    def undone(self, asked: Asked) -> None:
        """A server replies that it did nothing for a request."""
        if (operation := _operation_of(asked.request)) is not None:
            self.attempts[operation] -= 1

    def answered(self, asked: Asked, answer: Any) -> None:
        """A server answers a request."""
        request = asked.request
        if request.run_id in self.forgotten:
            return
        self.seen.add(type(request).__name__)
        try:
            self._judge_writer(asked, answer)
            judge = getattr(self, f"_{type(request).__name__}", None)
            if judge is not None:
                judge(asked, request, answer)
        except Violation as violation:
            self.note("answered", request, answer)
            self.blame(violation)

    def _judge_writer(self, asked: Asked, answer: Any) -> None:
        request = asked.request
        # The write itself was in time: a repetition of it may be acknowledged after the end of the round.
        if _operation_of(request) is None or asked.repeated:
            return
        if isinstance(answer, pb.CompareSetResponse) and not answer.swapped:
            return
        if isinstance(answer, state_pb.SetStateResponse) and not answer.has_set:
            return
        for round_ in {getattr(request, "writer_round", 0), getattr(request, "round", 0)} - {0}:
            over = self._over_by(request.run_id, round_, self.now())
            require(not over, "no write of a round is acknowledged after its end was told")

    def _must_be(self, asked: Asked, key: Key, holds: Callable[[Any], bool], what: str) -> None:
        """Check that a response has a value that was current at or after the request; it is known from now on."""
        line = self.line(key)
        index = line.find(holds, asked.since.get(key, 0))
        require(index >= 0, what)
        line.tell(index)

    def _SetRequest(self, asked: Asked, request: Any, answer: Any) -> None:
        key = request.run_id, request.round, request.key
        index = self.line(key).find(lambda value: value == request.value)
        require(index >= 0, "what is acknowledged is durable")
        self.line(key).tell(index)

    def _MultiSetRequest(self, asked: Asked, request: Any, answer: Any) -> None:
        for entry in request.entries:
            key = request.run_id, request.round, entry.key
            index = self.line(key).find(partial(eq, entry.value))
            require(index >= 0, "what is acknowledged is durable")
            self.line(key).tell(index)

    def _AppendRequest(self, asked: Asked, request: Any, answer: Any) -> None:
        key, length = (request.run_id, request.round, request.key), answer.length
        index = self.line(key).find(lambda value: value is not None and len(value) >= length)
        require(index >= 0, "what is acknowledged is durable")
        value = self.line(key).values[index] or b""
        require(value[:length].endswith(request.value), "what is appended is where its writer was told")
        self.line(key).tell(index)

    def _AddRequest(self, asked: Asked, request: Any, answer: Any) -> None:
        key = request.run_id, request.round, request.key
        operation = _operation_of(request)
        assert operation is not None
        index = self.line(key).find(lambda value: value is not None and int(value) >= answer.value)
        require(index >= 0, "what is acknowledged is durable")
        own = self.sums.setdefault(key, {}).setdefault(answer.value, operation)
        require(own == operation, "no two additions come to the same sum")
        self.line(key).tell(index)

    def _CompareSetRequest(self, asked: Asked, request: Any, answer: Any) -> None:
        key = request.run_id, request.round, request.key
        if not answer.swapped:
            wanted = answer.value if answer.exists else None
            self._must_be(asked, key, lambda value: value == wanted, "who reads sees nothing that is past")
            return
        index = self.line(key).find(lambda value: value == request.desired)
        require(index >= 0, "what is acknowledged is durable")
        before = self.line(key).values[index - 1] or b""
        require(before == request.expected, "a value is swapped for what was expected")
        self.line(key).tell(index)

    def _GetRequest(self, asked: Asked, request: Any, answer: Any) -> None:
        key = request.run_id, request.round, request.key
        value = answer.value
        self._must_be(asked, key, lambda known: known == value, "who reads sees nothing that is past")

    def _MultiGetRequest(self, asked: Asked, request: Any, answer: Any) -> None:
        require(len(set(answer.values)) == 1, "what is set together is seen together")
        for name, value in zip(request.keys, answer.values, strict=True):
            key = request.run_id, request.round, name
            self._must_be(asked, key, partial(eq, value), "who reads sees nothing that is past")

    def _GetStateRequest(self, asked: Asked, request: Any, answer: Any) -> None:
        self._judge_current(asked, request.run_id, answer)

    def _SetStateRequest(self, asked: Asked, request: Any, answer: Any) -> None:
        if not answer.has_set:
            self._judge_current(asked, request.run_id, answer)
            return
        key, current = (request.run_id, SPACE, STATE_KEY), answer.current
        require(current.state == request.state, "who has set a state is told its own")
        index = self.line(key).find(lambda value: value is not None and _parted(value)[0] == current.token)
        require(index >= 0, "what is acknowledged is durable")
        require(self.states[current.token] == current.state, "a token stands for one state")
        before = self.line(key).values[index - 1]
        shown = request.token if request.HasField("token") else None
        token = None if before is None else _parted(before)[0]
        require(token == shown, "a state takes the place of that whose token was shown")
        self.line(key).tell(index)

    def _judge_current(self, asked: Asked, run_id: str, answer: Any) -> None:
        wanted = (answer.current.token, answer.current.state) if answer.HasField("current") else None

        def same(value: bytes | None) -> bool:
            return (None if value is None else _parted(value)) == wanted

        self._must_be(asked, (run_id, SPACE, STATE_KEY), same, "who reads sees nothing that is past")


def _values_between(key: Key, before: bytes | None, value: bytes | None) -> list[bytes | None]:
    """Return a new value, after those in between: several writes of a key may be one commit, and a reader that waited
    for the key gets the value of the first of them (seed 412)."""
    kind = key[2].partition("/")[0]
    start = before or b""
    if kind == LOG and value is not None and value.startswith(start):
        entries = value.removeprefix(start).split(END)[:-1]
        return [
            start + b"".join(entry + END for entry in entries[:count]) for count in range(1, len(entries) + 1)
        ]
    if kind == COUNTER and value is not None:
        return [b"%d" % number for number in range(int(start or b"0") + 1, int(value) + 1)] or [value]
    return [value]


def _parted(value: bytes) -> tuple[bytes, bytes]:
    """Return token and state of a journal entry, which is a layout byte, the token and the state."""
    return value[1 : 1 + TOKEN_BYTES], value[1 + TOKEN_BYTES :]


def _operation_of(request: Any) -> _Operation | None:
    """Return the operation of a write; None: the request is no write."""
    operation = getattr(request, "operation", None)
    return None if operation is None else (operation.client_id, operation.slot, operation.sequence)


def _keys_of(request: Any) -> list[Key]:
    """Return the keys that a request reads."""
    match request:
        case state_pb.GetStateRequest() | state_pb.SetStateRequest():
            return [(request.run_id, SPACE, STATE_KEY)]
        case pb.MultiGetRequest():
            return [(request.run_id, request.round, key) for key in request.keys]
        case pb.GetRequest() | pb.CompareSetRequest():
            return [(request.run_id, request.round, request.key)]
    return []
