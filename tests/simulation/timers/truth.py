"""What really happens in workers, by the world's time: the scopes that their processes are in, and how often they left.

Nothing of the product is asked here. It is what the watchdog's verdicts are held against.

**Which time counts.** A scope's time runs while its host runs. A pause of a whole host (a VM that is suspended: the
agent and all its workers stand still together) doesn't count if it is one that a watch clock can tell: at least
`NOTICEABLE` long, and at least `APART` after the one before. Everything else counts: a worker that alone is stopped
hangs, whoever stopped it. Pauses of the agent alone, of the service, and of the network don't make a scope's time
longer or shorter; they may delay the verdict, which is what `Referee` grants them time for.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

# Twice the pulse of a watch clock, and the time after which it forgives a pause as fully as the one before.
NOTICEABLE = 0.5
APART = 0.3


@dataclass(slots=True)
class Stillness:
    """When a host stood still, seconds of the world."""

    # Beginning and end of the pauses that count as such; the last may not have ended.
    _pauses: list[tuple[float, float]] = field(default_factory=list)
    _since: float | None = None
    _last: float = -APART
    # Of all pauses, also those that nobody notices: for who works, and stands still as well.
    total: float = 0.0

    @property
    def standing(self) -> bool:
        """Whether it stands still."""
        return self._since is not None

    def begin(self, now: float) -> None:
        """The host stops."""
        self._since = now

    def end(self, now: float) -> None:
        """The host goes on."""
        assert self._since is not None, "what goes on has stopped"
        if now - self._since >= NOTICEABLE and self._since - self._last >= APART:
            self._pauses.append((self._since, now))
        self._last, self.total, self._since = now, self.total + now - self._since, None

    def ran(self, since: float, until: float) -> float:
        """How much of a time counts."""
        still = sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in self._pauses)
        if self._since is not None and self._since - self._last >= APART:
            still += max(0.0, until - max(self._since, since))
        return until - since - still


@dataclass(slots=True, eq=False)
class Span:
    """A scope that a process is in, or was. Seconds of the world."""

    worker_id: str
    pid: int
    scope: str
    # None: how long it may take is learned.
    after: float | None
    since: float
    host: Stillness
    # When it was left, replaced by another one of its token, or ended with its process; None: not yet.
    ended: float | None = None
    replaced: bool = False
    # It is meant to be left never, or too late.
    doomed: bool = False

    def held(self, now: float) -> float:
        """How long it was held, of what counts, up to now."""
        return self.host.ran(self.since, now if self.ended is None else min(self.ended, now))

    def describe(self) -> str:
        """For people."""
        after = "auto" if self.after is None else f"{self.after:.3f}"
        ended = "" if self.ended is None else f" ended {self.ended:.4f}"
        return f"{self.worker_id}/{self.pid} {self.scope} after {after} since {self.since:.4f}{ended}"


class Completions:
    """How often scopes that learn were really left, and the longest time that it took."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.longest: dict[str, float] = {}

    def add(self, scope: str, seconds: float) -> None:
        """It was left once more."""
        self.counts[scope] += 1
        self.longest[scope] = max(self.longest.get(scope, 0.0), seconds)
