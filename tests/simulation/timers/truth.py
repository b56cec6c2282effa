"""The real events in workers, by the world's time: the scopes that their processes are in, and their completions.

Nothing here calls the product. The referee checks the watchdog's decisions against it.

**Which time counts.** A scope's time runs while its host runs. A pause of a whole host (a suspended VM: the agent and
all its workers stop together) does not count if a watch clock can detect it: if it lasts at least `NOTICEABLE` seconds,
and begins at least `APART` seconds after the one before. Everything else counts: if only a worker is stopped, it
hangs, for any cause. Pauses of the agent alone, of the service, and of the network don't make a scope's time longer or
shorter; they may delay the reaping, and `Referee` allows time for that.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

# Twice the pulse of a watch clock, and the time after a pause until it fully leaves out another. Seconds.
NOTICEABLE = 0.5
APART = 0.3


@dataclass(slots=True)
class Stillness:
    """The pauses of a host, in seconds of the world."""

    # Beginning and end of the pauses that a watch clock detects.
    _pauses: list[tuple[float, float]] = field(default_factory=list)
    _since: float | None = None
    _last: float = -APART
    # Total seconds of all pauses, also of those that are too short to detect: programs need it.
    total: float = 0.0

    @property
    def standing(self) -> bool:
        """True if the host is paused."""
        return self._since is not None

    def begin(self, now: float) -> None:
        """Begin a pause."""
        self._since = now

    def end(self, now: float) -> None:
        """End the pause."""
        assert self._since is not None, "what goes on has stopped"
        if now - self._since >= NOTICEABLE and self._since - self._last >= APART:
            self._pauses.append((self._since, now))
        self._last, self.total, self._since = now, self.total + now - self._since, None

    def ran(self, since: float, until: float) -> float:
        """Return the seconds that count between two times."""
        still = sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in self._pauses)
        if self._since is not None and self._since - self._last >= APART:
            still += max(0.0, until - max(self._since, since))
        return until - since - still


@dataclass(slots=True, eq=False)
class Span:
    """A scope that a process is in, or was in. Times in seconds of the world."""

    worker_id: str
    pid: int
    scope: str
    # The timeout; None: it is learned.
    after: float | None
    since: float
    host: Stillness
    # The time at which it was left, replaced by another of its token, or ended with its process; None: not yet.
    ended: float | None = None
    replaced: bool = False
    # The program will leave it too late, or never.
    doomed: bool = False

    def held(self, now: float) -> float:
        """Return the seconds that count for which it was held until now."""
        return self.host.ran(self.since, now if self.ended is None else min(self.ended, now))

    def describe(self) -> str:
        """Return a description for reports."""
        after = "auto" if self.after is None else f"{self.after:.3f}"
        ended = "" if self.ended is None else f" ended {self.ended:.4f}"
        return f"{self.worker_id}/{self.pid} {self.scope} after {after} since {self.since:.4f}{ended}"


class Completions:
    """Real number and longest duration of the completions of scopes with learned timeouts."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.longest: dict[str, float] = {}

    def add(self, scope: str, seconds: float) -> None:
        """Count a completion."""
        self.counts[scope] += 1
        self.longest[scope] = max(self.longest.get(scope, 0.0), seconds)
