"""A plain model of the contents of a journal, and random entries that continue it."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from rallypoint.rendezvous.base.entries import StoreChange
from rallypoint.rendezvous.journal.journal import Checkpoint, Entry, Forgotten, Record, Recovered


@dataclass
class RunModel:
    """One run: the revision of its latest record, its kept records and values, and its checkpoint."""

    last: int = 0
    first: int = 1
    records: dict[int, bytes] = field(default_factory=dict)
    checkpoint: tuple[int, bytes] | None = None
    values: dict[tuple[int, str], bytes] = field(default_factory=dict)


@dataclass
class Model:
    """All runs."""

    runs: dict[str, RunModel] = field(default_factory=dict)

    def after(self, entries: Sequence[Entry]) -> Model:
        """Return the model after one more call."""
        later = copy.deepcopy(self)
        for entry in entries:
            later.add(entry)
        return later

    def add(self, entry: Entry) -> None:
        """Add an entry."""
        run = self.runs.setdefault(entry.run_id, RunModel())
        match entry:
            case Record(_, revision, content):
                run.last = revision
                run.records[revision] = content
            case Checkpoint(_, revision, content, keep_from):
                run.first = max(run.first, keep_from)
                run.checkpoint = revision, content
            case Forgotten(_, revision, content):
                self.runs[entry.run_id] = RunModel(revision, revision + 1, {}, (revision, content))
            case StoreChange(_, round_, key, None):
                run.values.pop((round_, key), None)
            case StoreChange(_, round_, key, value) if value is not None:
                run.values[round_, key] = value
        run = self.runs[entry.run_id]
        run.records = {
            revision: content for revision, content in run.records.items() if revision >= run.first
        }

    def recovered(self) -> list[object]:
        """Return the expected contents of a journal, for `plain` to compare."""
        return plain(
            Recovered(
                [
                    Checkpoint(run_id, *run.checkpoint, run.first)
                    for run_id, run in self.runs.items()
                    if run.checkpoint is not None
                ],
                [
                    Record(run_id, *each)
                    for run_id, run in self.runs.items()
                    for each in sorted(run.records.items())
                ],
                [
                    StoreChange(run_id, *place, value)
                    for run_id, run in self.runs.items()
                    for place, value in run.values.items()
                ],
            )
        )


def plain(recovered: Recovered) -> list[object]:
    """Return recovered contents without the order of runs and of keys."""
    by_run: dict[str, list[Record]] = {}
    for record in recovered.records:
        by_run.setdefault(record.run_id, []).append(record)
    return [
        sorted(recovered.checkpoints, key=lambda each: each.run_id),
        sorted(by_run.items()),
        sorted(recovered.store_entries, key=lambda each: (each.run_id, each.round, each.key)),
    ]


RUNS = ("a", "a/b", "a%2Fb", "", "ä \x00", "head")
_KEYS = ("k", "k/0001", "k/", "", "\x01own", "ü")
# Bytes of contents: one in so many is large enough for several parts, or several transactions.
_LARGE = (600_000, 1_300_000)
_ONE_IN = 60


def random_call(draw: random.Random, model: Model) -> list[Entry]:
    """Return entries of one call that continue a model; a few, or more than one transaction takes."""
    model = copy.deepcopy(model)
    count = draw.choice((1, 1, 2, 3, 10)) if draw.random() < 0.9 else draw.randint(90, 250)
    entries: list[Entry] = []
    for _ in range(count):
        run_id = draw.choice(RUNS)
        entry = _random_entry(draw, run_id, model.runs.get(run_id, RunModel()))
        model.add(entry)
        entries.append(entry)
    return entries


def _random_entry(draw: random.Random, run_id: str, run: RunModel) -> Entry:
    kind = draw.random()
    if kind < 0.45:
        return Record(run_id, run.last + 1, _content(draw))
    if kind < 0.55:
        least = max(0, run.first - 1)
        revision = draw.randint(least, run.last)
        return Checkpoint(run_id, revision, _content(draw), draw.randint(0, revision + 1))
    if kind < 0.58:
        return Forgotten(run_id, run.last + draw.choice((0, 0, 1)), _content(draw))
    value = None if draw.random() < 0.25 else _content(draw)
    # Some distinct keys, so that a large call has more of them than a transaction takes.
    key = draw.choice(_KEYS) if draw.random() < 0.5 else f"key {draw.randint(0, 300)}"
    return StoreChange(run_id, draw.choice((-1, 0, 1, 12)), key, value)


def _content(draw: random.Random) -> bytes:
    size = draw.choice(_LARGE) if draw.randrange(_ONE_IN) == 0 else draw.choice((0, 1, 40))
    return draw.randbytes(8)[: max(0, size)] + b"x" * max(0, size - 8)
