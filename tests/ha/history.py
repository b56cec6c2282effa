"""The operations of clients and the reports to them, recorded line by line, to be examined and checked again.

All times are seconds of one monotonic clock: that of the process that records, or of its machine.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar


class Outcome(StrEnum):
    """The outcome of an operation, as far as its client knows it."""

    OK = "ok"
    # It was refused, and nothing happened.
    REFUSED = "refused"
    # It may have taken effect, may take effect yet, or never will.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of a client.

    Attributes:
        client: The client; it runs one operation at a time.
        `what`: The kind: "state.set", "store.add", "run.get" …
        object: The run, or key of a run, that it acts on.
        began: Time of the first attempt.
        ended: Time at which its outcome was known; infinite: never.
        outcome: The outcome.
        asked: The fields of the request.
        answered: The fields of the reply; of a refusal, its reason.
        at: The replica of the last attempt.
    """

    kind: ClassVar[str] = "operation"
    client: str
    what: str
    object: str
    began: float
    ended: float
    outcome: Outcome
    asked: Mapping[str, Any] = field(default_factory=dict)
    answered: Mapping[str, Any] = field(default_factory=dict)
    at: str = ""


@dataclass(frozen=True, slots=True)
class Admission:
    """A node got a lease, or resumed the one it had."""

    kind: ClassVar[str] = "admission"
    at: float
    subscriber: str
    run_id: str
    node_id: str
    lease: int
    resumed: bool


@dataclass(frozen=True, slots=True)
class Told:
    """A subscriber received the state of a run.

    Attributes:
        at: The time.
        subscriber: One agent, or one watcher, over any number of streams.
        run_id: The run.
        node_id: The node of an agent; "": a watcher.
        lease: The agent's lease; 0: a watcher.
        update: A NodeUpdate, or a Run, in proto3's JSON with the names of the contract.
    """

    kind: ClassVar[str] = "told"
    at: float
    subscriber: str
    run_id: str
    node_id: str
    lease: int
    update: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Logged:
    """An event of a run, as a subscriber received it, or, with no subscriber, as the log had it at the end."""

    kind: ClassVar[str] = "event"
    at: float
    subscriber: str
    run_id: str
    event: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Fact:
    """A record of a run in the journal, as it lay in etcd at the end; `content` is a JournalRecord in hexadecimal."""

    kind: ClassVar[str] = "fact"
    run_id: str
    revision: int
    content: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """A note about an action of the nemesis, or about the whole run; for people."""

    kind: ClassVar[str] = "trouble"
    at: float
    what: str


@dataclass(frozen=True, slots=True)
class End:
    """The last line: it shows that no operation is missing."""

    kind: ClassVar[str] = "end"
    at: float


Entry = Operation | Admission | Told | Logged | Fact | Trouble | End
_KINDS: dict[str, type[Entry]] = {
    each.kind: each for each in (Operation, Admission, Told, Logged, Fact, Trouble, End)
}
_E = TypeVar("_E", Operation, Admission, Told, Logged, Fact, Trouble, End)


class HistoryIsCutError(Exception):
    """A history has no last line: operations that were pending at its end are missing, so it can't be checked."""


class History:
    """Entries in the order in which they became known; in memory, and in a file where one is named."""

    def __init__(self, file: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with an empty file; `clock` gives the times of entries, in seconds."""
        self.entries: list[Entry] = []
        self.clock = clock
        self._file = file.open("w") if file is not None else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file; write no last line, since entries may be missing: see `end`."""
        if self._file is not None:
            self._file.close()

    def add(self, entry: Entry) -> None:
        """Append an entry."""
        self.entries.append(entry)
        if self._file is not None:
            self._file.write(dump(entry) + "\n")

    def trouble(self, what: str) -> None:
        """Append a note about an action of the nemesis."""
        self.add(Trouble(self.clock(), what))
        if self._file is not None:
            self._file.flush()  # after a crash, the last action is the first thing to look at

    def end(self) -> None:
        """Append the last line."""
        self.add(End(self.clock()))
        if self._file is not None:
            self._file.flush()

    def of(self, kind: type[_E]) -> Iterator[_E]:
        """Return all entries of a kind, in order."""
        return (entry for entry in self.entries if isinstance(entry, kind))


def dump(entry: Entry) -> str:
    """Return an entry as a line of JSON."""
    return json.dumps({"kind": entry.kind} | asdict(entry), separators=(",", ":"))


def load(line: str) -> Entry:
    """Return the entry of a line.

    Raises:
        ValueError: The line is no entry.
    """
    try:
        fields = json.loads(line)
        kind = _KINDS[fields.pop("kind")]
        if kind is Operation:
            fields["outcome"] = Outcome(fields["outcome"])
        return kind(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no entry of a history: {line.strip()[:200]!r} ({error!r})") from error


def read(file: Path) -> History:
    """Read a history from its file.

    Raises:
        ValueError: A line is no entry; the message names it.
        HistoryIsCutError: It has no last line.
    """
    history = History()
    with file.open() as lines:
        for number, line in enumerate(lines, start=1):
            try:
                history.entries.append(load(line))
            except ValueError as error:
                raise ValueError(f"{file}:{number}: {error}") from error
    if not history.entries or not isinstance(history.entries[-1], End):
        raise HistoryIsCutError(f"{file} has no last line: the run was cut off, and can't be judged")
    return history


NEVER = math.inf
"""The end of an operation of unknown outcome."""
