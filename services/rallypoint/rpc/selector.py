"""Which replica of a service a client asks next: decided from what the ones before said. No clock and no network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rallypoint.rpc.address import Address

CONNECT_PATIENCE = 2.0
"""Seconds that a place has to take a connection, where there are others to ask: a lost first packet costs one."""

ANSWER_PATIENCE = 4.0
"""Seconds that a place has for an answer, where there are others. One that is paused or cut off takes them all; longer
holds up its clients, shorter makes them go away from one that is merely busy."""

_LONGEST_PATIENCE = 16.0
# Seconds for which nobody's word brings a client back to a place that failed it: refused at once, which costs little
# to try again, or silent, which costs a patience.
_DOUBT_OF_REFUSING = 1.0
_DOUBT_OF_SILENT = 2.0
_LONGEST_DOUBT = 16.0
# An owner names another, and that one another: a chain longer than this is replicas that don't agree yet.
_MOST_HOPS = 4


@dataclass(frozen=True, slots=True)
class _DoubtedReplica:
    """A place that failed: until when it is not trusted, and how often it was silent since it last answered."""

    until: float
    silences: int


class ReplicaSelector:
    """What a client knows of the replicas of one service; shared by all its calls."""

    def __init__(self, places: Sequence[Address], draw: Callable[[], float]) -> None:
        """Know these places and nothing else.

        Args:
            places: In the order given.
            draw: A number from 0 to 1. The list is gone through from a place drawn by it, so that a thousand clients
                with the same list don't all begin with its first.
        """
        self.owner: Address | None = None
        self.good: Address | None = None
        self._addresses = tuple(places)
        self._draw = draw
        self._start = int(draw() * len(self._addresses))
        self._doubts: dict[Address, _DoubtedReplica] = {}
        self._finders: set[Callable[[Address], None]] = set()

    @property
    def ordered(self) -> Sequence[Address]:
        """All that may be asked, the best first: the owner, the one that answered last, the others in turn."""
        known = [place for place in (self.owner, self.good) if place is not None]
        if not self._addresses:
            return known
        start = self._start % len(self._addresses)
        return tuple(dict.fromkeys((*known, *self._addresses[start:], *self._addresses[:start])))

    def renew(self, places: Sequence[Address]) -> None:
        """The list has these places now; an owner or one that answers stays known, wherever it is."""
        if set(places) != set(self._addresses):
            self._start = int(self._draw() * len(places))
        self._addresses = tuple(places)

    def known_as(self, endpoint: Address) -> Address:
        """A place that somebody names, as the list has it: with the name that its certificate is asked for."""
        for place in self._addresses:
            if place == endpoint or place.listed == endpoint.endpoint:
                return place
        return endpoint

    def is_doubtful(self, place: Address, now: float) -> bool:
        """Whether a place failed so lately that it is asked after all others."""
        doubt = self._doubts.get(place)
        return doubt is not None and now < doubt.until

    def timeout(self, place: Address, base: float) -> float:
        """Seconds to wait for a place: `base`, doubled with each time that it was silent; without end if it is alone.

        Doubled, since one that is busy rather than gone would never be done with a call that is always broken off.
        """
        if len(self.ordered) <= 1:
            return math.inf
        doubt = self._doubts.get(place)
        return min(base * 2.0 ** (doubt.silences if doubt is not None else 0), _LONGEST_PATIENCE)

    def answered(self, place: Address) -> None:
        """A place did what it was asked."""
        self.good = place
        self._doubts.pop(place, None)

    def refused(self, place: Address, now: float, *, silent: bool) -> None:
        """A place could not be reached, is going away or gave no answer (`silent`)."""
        before = self._doubts.get(place)
        silences = (before.silences if before is not None else 0) + silent
        span = min(_DOUBT_OF_SILENT * 2.0 ** (silences - 1), _LONGEST_DOUBT) if silent else _DOUBT_OF_REFUSING
        self._doubts[place] = _DoubtedReplica(now + span, silences)
        if self.owner == place:
            self.owner = None
        if self.good == place:
            self.good = None

    def pointed(self, place: Address, owner: Address | None) -> None:
        """A place is not the owner, and names who is; None: nobody just now."""
        if self.good == place:
            self.good = None
        self.owner = owner if owner != place else None
        # It is there and speaks; who was silent before may have been slow.
        self._doubts.pop(place, None)

    def when_found(self, tell: Callable[[Address], None]) -> Callable[[], None]:
        """Have `tell` called whenever the owner is found; undone by calling what this returns."""
        self._finders.add(tell)
        return lambda: self._finders.discard(tell)

    def found(self, owner: Address) -> None:
        """A place answered what another had refused for not being the owner: it is."""
        for tell in [*self._finders]:
            tell(owner)

    def rotate(self) -> None:
        """Begin the list with the next place from now on."""
        self._start += 1


class ReplicaSearch:
    """The attempts of one call, or one stream after the other, to find who answers."""

    def __init__(self, route: ReplicaSelector) -> None:
        """`route`: what is known, to which it adds."""
        self.selector = route
        self._tried: set[Address] = set()
        self._hops = 0
        self._at_once = False
        # Whom the place that was asked last named as the owner.
        self._followed: Address | None = None

    def next(self, now: float) -> Address:
        """Whom to ask: who was not asked since the last rest and is not in doubt, the best first."""
        return min(
            self.selector.ordered,
            key=lambda place: (place in self._tried, self.selector.is_doubtful(place, now)),
        )

    @property
    def at_once(self) -> bool:
        """Whether to ask the next without a rest."""
        return self._at_once

    def answered(self, place: Address) -> None:
        """A place did what it was asked."""
        self.selector.answered(place)
        followed = self._followed
        self._begin_again()
        if place == followed:
            self.selector.found(place)

    def declined(self, place: Address) -> None:
        """A place answered that it can't just now; nothing is wrong with the way there."""
        self.selector.answered(place)
        self._at_once = False

    def refused(self, place: Address, now: float, *, silent: bool = False) -> None:
        """A place could not be reached, is going away, or gave no answer in time (`silent`)."""
        self.selector.refused(place, now, silent=silent)
        self._followed = None
        self._tried.add(place)
        self._at_once = any(other not in self._tried for other in self.selector.ordered)

    def pointed(self, place: Address, owner: Address | None, now: float) -> None:
        """A place is not the owner, and names who is; None: nobody just now, which another would say as well."""
        self.selector.pointed(place, owner)
        self._tried.add(place)
        self._hops += 1
        self._at_once = (
            owner is not None
            and owner not in self._tried
            and not self.selector.is_doubtful(owner, now)
            and self._hops <= _MOST_HOPS
        )
        self._followed = owner

    def rest(self) -> None:
        """A pause comes: everybody may be asked again after it."""
        self._begin_again()
        self.selector.rotate()

    def _begin_again(self) -> None:
        self._tried.clear()
        self._followed = None
        self._hops = 0
        self._at_once = False
