"""How long a client waits between attempts."""

from __future__ import annotations

from collections.abc import Callable

# First and longest back-off between two attempts, each drawn from 0 to that. The longest is what a client may
# lose at worst after the service is back. Seconds.
FIRST_BACKOFF = 0.05
LONGEST_BACKOFF = 2.0


class Backoff:
    """Seconds between attempts: each drawn from 0 to a bound that doubles, so that clients do not come all at once."""

    def __init__(
        self, draw: Callable[[], float], *, first: float = FIRST_BACKOFF, longest: float = LONGEST_BACKOFF
    ) -> None:
        """Begin with the shortest.

        Args:
            draw: Returns a number from 0 to 1.
            first: The first bound, seconds.
            longest: The last bound, seconds.
        """
        self._draw = draw
        self._first = self._bound = first
        self._longest = longest

    def reset(self) -> None:
        """Begin with the shortest again: an attempt has succeeded."""
        self._bound = self._first

    def next(self) -> float:
        """Return the seconds to wait before the next attempt."""
        bound, self._bound = self._bound, min(2 * self._bound, self._longest)
        return self._draw() * bound
