"""Who was used when, and who was not for so long that it is dropped. Pure."""

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
