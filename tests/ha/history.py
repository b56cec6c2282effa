"""What clients did and were told, written down line by line, so that it can be examined and checked again.

All times are of one monotonic clock, in seconds: that of the process that records, or of its machine.
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
    """What a client knows of an operation when it is over."""

    OK = "ok"
    # It was refused, and nothing happened.
    REFUSED = "refused"
    # It may have taken effect, may take effect yet, or never will.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that a client asked for.

    Attributes:
        client: Who asked; it asks for one thing at a time.
        what: The kind: "state.set", "store.add", "run.get" …
        object: What it was done to: a run, or a key of one.
        began: When it was sent first.
        ended: When it was known how it went; infinite: never.
        outcome: How it went.
        asked: What was asked.
        answered: What was answered; of a refusal, its reason.
        at: Which replica was asked, where it was one only.
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
    """A node was given a lease, or was let in again with the one it had."""

    kind: ClassVar[str] = "admission"
    at: float
    subscriber: str
    run_id: str
    node_id: str
    lease: int
    resumed: bool


@dataclass(frozen=True, slots=True)
class Told:
    """A subscriber was told the state of a run.

    Attributes:
        at: When.
        subscriber: Whom, over any number of streams: one agent, or one watcher.
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
    """An event of a run, as a subscriber was told it, or, with no subscriber, as the log had it at the end."""

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
    """What the nemesis did, or the run as a whole; for people."""

    kind: ClassVar[str] = "trouble"
    at: float
    what: str


@dataclass(frozen=True, slots=True)
class End:
    """The last line: nothing that was under way is missing."""

    kind: ClassVar[str] = "end"
    at: float


Entry = Operation | Admission | Told | Logged | Fact | Trouble | End
_KINDS: dict[str, type[Entry]] = {
    each.kind: each for each in (Operation, Admission, Told, Logged, Fact, Trouble, End)
}
_E = TypeVar("_E", Operation, Admission, Told, Logged, Fact, Trouble, End)


class HistoryIsCutError(Exception):
    """A history has no last line: what was under way when it was cut off is not in it, and it can't be judged."""


class History:
    """Entries in the order in which they became known; in memory, and in a file where one is named."""

    def __init__(self, file: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin, with an empty file; `clock` dates what is added (seconds)."""
        self.entries: list[Entry] = []
        self.clock = clock
        self._file = file.open("w") if file is not None else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file; the last line is for who knows that nothing is missing."""
        if self._file is not None:
            self._file.close()

    def add(self, entry: Entry) -> None:
        """Write an entry down."""
        self.entries.append(entry)
        if self._file is not None:
            self._file.write(dump(entry) + "\n")

    def trouble(self, what: str) -> None:
        """Write down what the nemesis does now."""
        self.add(Trouble(self.clock(), what))
        if self._file is not None:
            self._file.flush()  # what was going on is the first thing that is asked of a run that died

    def end(self) -> None:
        """Write the last line."""
        self.add(End(self.clock()))
        if self._file is not None:
            self._file.flush()

    def of(self, kind: type[_E]) -> Iterator[_E]:
        """All entries of a kind, in order."""
        return (entry for entry in self.entries if isinstance(entry, kind))


def dump(entry: Entry) -> str:
    """An entry as a line of JSON."""
    return json.dumps({"kind": entry.kind} | asdict(entry), separators=(",", ":"))


def load(line: str) -> Entry:
    """The entry of a line.

    Raises:
        ValueError: It is none.
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
    """A history from its file.

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
"""When an operation ended of which nobody knows how it went."""
