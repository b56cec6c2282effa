"""Keys in order, so that a page of them costs the page and not all keys."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, takewhile

# Moving this many pointers takes well under a microsecond, and a million keys have no more than so many parts.
_PART = 1_000


class SortedKeys:
    """A set of keys in the order of their Unicode code points.

    It is kept in parts of bounded length. Kept in one list, each key that comes would move all that are behind
    it; sorted when they are asked for, a million keys would hold up the process for a second.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        ordered = sorted(keys)
        self._parts = [ordered[start : start + _PART] for start in range(0, len(ordered), _PART)]
        self._lasts = [part[-1] for part in self._parts]

    def __iter__(self) -> Iterator[str]:
        for part in self._parts:
            yield from part

    def add(self, key: str) -> None:
        """Take a key in that is not there."""
        if not self._parts:
            self._parts.append([key])
            self._lasts.append(key)
            return
        index = min(bisect_left(self._lasts, key), len(self._parts) - 1)
        part = self._parts[index]
        insort(part, key)
        self._lasts[index] = part[-1]
        if len(part) > 2 * _PART:
            self._parts[index : index + 1] = part[:_PART], part[_PART:]
            self._lasts.insert(index, part[_PART - 1])

    def remove(self, key: str) -> None:
        """Take a key out that is there."""
        index = bisect_left(self._lasts, key)
        part = self._parts[index]
        del part[bisect_left(part, key)]
        if part:
            self._lasts[index] = part[-1]
        else:
            del self._parts[index], self._lasts[index]

    def page(self, prefix: str, after: str, count: int) -> list[str]:
        """Return the first `count` keys that begin with `prefix` and come after `after`."""
        # Keys with one prefix stand together, behind whatever is smaller than the prefix itself.
        candidates = self._from(after, bisect_right) if after >= prefix else self._from(prefix, bisect_left)
        return list(islice(takewhile(lambda key: key.startswith(prefix), candidates), count))

    def _from(self, start: str, bisect: Callable[[list[str], str], int]) -> Iterator[str]:
        first = bisect(self._lasts, start)
        for index in range(first, len(self._parts)):
            part = self._parts[index]
            yield from islice(part, bisect(part, start) if index == first else 0, None)
