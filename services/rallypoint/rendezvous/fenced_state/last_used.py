"""When names were used, and which were not for so long that they are dropped. Pure."""

from __future__ import annotations

from collections.abc import Iterator


class LastUsed:
    """Names in the order of their last use; all live equally long after it."""

    def __init__(self, ttl: float) -> None:
        """Start with no names.

        Args:
            ttl: How long a name lives after its last use, seconds.
        """
        self._ttl = ttl
        self._used: dict[str, float] = {}  # the one used longest ago first

    def touch(self, name: str, now: float) -> None:
        """Note a use."""
        self._used.pop(name, None)  # the latest used goes to the end
        self._used[name] = now

    def discard(self, name: str) -> None:
        """Forget a name, if it is known."""
        self._used.pop(name, None)

    def next_deadline(self) -> float | None:
        """Return when the next name is due unless it is used before; None: there is none."""
        return next((used + self._ttl for used in self._used.values()), None)

    def due(self, now: float) -> Iterator[str]:
        """Yield the names whose time is over, the one used longest ago first. Touch or discard each."""
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            yield next(iter(self._used))

    def __contains__(self, name: str) -> bool:
        """Return whether a name is known; it may be due."""
        return name in self._used


class SampledUse:
    """Uses that are seen in one place and counted in another: one in each period is passed on there."""

    def __init__(self, period: float) -> None:
        """Pass on the next use of every name.

        Args:
            period: Seconds. Those who count must let names live for so much longer.
        """
        self._passed_on = LastUsed(period)

    def pass_on(self, name: str, now: float) -> bool:
        """Note a use; return whether it is to be passed on."""
        for old in self._passed_on.due(now):
            self._passed_on.discard(old)
        if name in self._passed_on:
            return False
        self._passed_on.touch(name, now)
        return True
