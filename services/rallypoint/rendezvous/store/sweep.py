"""Entries that nobody has any more and that a journal still keeps: they go bit by bit, and never one that lives."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice

from rallypoint.rendezvous.base.entries import StoreChange


class Sweep:
    """Deletions that are to be made durable some time."""

    def __init__(self) -> None:
        self._deletions: deque[Iterator[StoreChange]] = deque()

    def __bool__(self) -> bool:
        return bool(self._deletions)

    def add(self, deletions: Iterable[StoreChange]) -> None:
        """Take deletions in; they are looked at as they are taken out."""
        iterator = iter(deletions)
        if (first := next(iterator, None)) is not None:
            self._deletions.append(chain((first,), iterator))

    def take(self, count: int, lives: Callable[[int, str], bool]) -> list[StoreChange]:
        """Take the next `count` deletions out; return those of entries that don't live, by round and key.

        What was obsolete can have been set again since: a run that was forgotten may come again under its name.
        """
        taken: list[StoreChange] = []
        while self._deletions and len(taken) < count:
            part = list(islice(self._deletions[0], count - len(taken)))
            if not part:
                self._deletions.popleft()
            taken += part
        return [deletion for deletion in taken if not lives(deletion.round, deletion.key)]

    def take_all(self) -> Iterator[StoreChange]:
        """Take all deletions out, to be looked at as they come."""
        deletions, self._deletions = self._deletions, deque()
        return chain.from_iterable(deletions)
