"""Delays between the attempts of a client."""

from __future__ import annotations

from collections.abc import Callable

# Bounds of the first and the longest delay, seconds; each delay is drawn from 0 to its bound. The longest is the most
# that a client loses after the service is back.
FIRST_BACKOFF = 0.05
LONGEST_BACKOFF = 2.0


class Backoff:
    """Delays between attempts, seconds: each drawn from 0 to a bound that doubles, so that clients spread out."""

    def __init__(
        self, draw: Callable[[], float], *, first: float = FIRST_BACKOFF, longest: float = LONGEST_BACKOFF
    ) -> None:
        """Begin with the first bound.

        Args:
            draw: Returns a number from 0 to 1.
            first: The first bound, seconds.
            longest: The last bound, seconds.
        """
        self._draw = draw
        self._first = self._bound = min(first, longest)
        self._longest = longest

    def reset(self) -> None:
        """Begin with the first bound again, after a successful attempt."""
        self._bound = self._first

    def next(self) -> float:
        """Return the seconds to wait before the next attempt."""
        bound, self._bound = self._bound, min(2 * self._bound, self._longest)
        return self._draw() * bound
