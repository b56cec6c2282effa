"""How often somebody may do something: a token bucket, and one bucket for each of many. Pure: no clock."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rate:
    """So many a second for ever, and so many at once."""

    per_second: float
    """More than 0."""

    burst: int
    """At least 1: what may come at once after a pause long enough."""

    def __post_init__(self) -> None:
        if not self.per_second > 0 or self.burst < 1:
            raise ValueError(f"no such rate: {self.per_second:g} a second, {self.burst} at once")


class Bucket:
    """What one party has used up of its rate."""

    __slots__ = ("_at", "_burst", "_level", "_per_second")

    def __init__(self, rate: Rate, now: float) -> None:
        """A bucket of which nothing is used up.

        Args:
            rate: what it allows.
            now: monotonic seconds.
        """
        self._per_second = rate.per_second
        self._burst = rate.burst
        self._level = 0.0
        self._at = now

    def take(self, now: float) -> float:
        """Uses one up; returns 0, or if there is none the seconds until there is one again. Then none is used up."""
        level = max(0.0, self._level - (now - self._at) * self._per_second)
        self._level, self._at = level, now
        excess = level + 1 - self._burst
        if excess > 0:
            return excess / self._per_second
        self._level = level + 1
        return 0.0


class Buckets:
    """A bucket for each of the parties seen last.

    Whoever was not seen for longer than all the others has its bucket dropped when there are too many, and comes back
    with a fresh one. So memory is bounded, and a party gains by that only if so many others came meanwhile.
    """

    def __init__(self, rate: Rate, most: int) -> None:
        """No bucket yet.

        Args:
            rate: what each allows.
            most: how many to keep; at least 1. Each takes about 250 bytes, and those of its name.
        """
        self._rate = rate
        self._most = most
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, party: str, now: float) -> float:
        """Uses one up of a party's bucket; see `Bucket.take`."""
        bucket = self._buckets.get(party)
        if bucket is None:
            bucket = self._buckets[party] = Bucket(self._rate, now)
            if len(self._buckets) > self._most:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(party)
        return bucket.take(now)
