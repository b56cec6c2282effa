"""Who waits for which keys of one space. Told key by key, so nothing is ever looked through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Waiter(Generic[T]):
    """One request that waits for keys.

    Attributes:
        keys: All of the keys.
        missing: Those that are not there now.
        told: Whom to tell; the waiting of this module knows nothing of it.
    """

    keys: frozenset[str]
    missing: set[str]
    told: T


class Waiting(Generic[T]):
    """The waiters of one space, by key."""

    def __init__(self) -> None:
        self._by_key: dict[str, dict[Waiter[T], None]] = {}
        self._waiters: dict[Waiter[T], None] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter[T]]:
        return iter(tuple(self._waiters))

    def add(self, keys: Iterable[str], missing: Iterable[str], told: T) -> Waiter[T]:
        """Begin to wait for `keys`, of which `missing`, at least one, are not there now."""
        waiter = Waiter(frozenset(keys), set(missing), told)
        self._waiters[waiter] = None
        for key in waiter.keys:
            self._by_key.setdefault(key, {})[waiter] = None
        return waiter

    def discard(self, waiter: Waiter[T]) -> None:
        """Stop waiting; one that waits no more is no error."""
        if waiter not in self._waiters:
            return
        del self._waiters[waiter]
        for key in waiter.keys:
            others = self._by_key[key]
            del others[waiter]
            if not others:
                del self._by_key[key]

    def key_set(self, key: str) -> list[Waiter[T]]:
        """Note that a key is there; return who has all it waits for, first come first. These wait no more."""
        complete = []
        for waiter in self._by_key.get(key, ()):
            waiter.missing.discard(key)
            if not waiter.missing:
                complete.append(waiter)
        for waiter in complete:
            self.discard(waiter)
        return complete

    def key_deleted(self, key: str) -> None:
        """Note that a key is gone: who waits for several waits for it again."""
        for waiter in self._by_key.get(key, ()):
            waiter.missing.add(key)
