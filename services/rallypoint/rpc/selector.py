"""The choice of the replica that a client calls next, from the results of earlier calls. No clock and no network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rallypoint.rpc.address import Address

CONNECT_TIMEOUT = 2.0
"""Timeout for a connection if there are other replicas, seconds: enough for one lost first packet."""

REPLY_TIMEOUT = 4.0
"""Timeout for a reply if there are other replicas, seconds. A replica that is paused or cut off costs all of it; longer
delays its clients, shorter makes them leave a replica that is only busy."""

_LONGEST_TIMEOUT = 16.0
# Seconds in which a failed replica is called after all others: one that refused at once, which costs little to try
# again, or one that was silent, which costs a timeout.
_DOUBT_OF_REFUSING = 1.0
_DOUBT_OF_SILENT = 2.0
_LONGEST_DOUBT = 16.0
# Counted silences in a row: far more than double a timeout to the longest, and few enough for 2.0 to the power of them.
_MOST_SILENCES = 100
# An owner names another owner, and so on: in a chain longer than this the replicas do not agree yet.
_MOST_HOPS = 4


@dataclass(frozen=True, slots=True)
class _DoubtedReplica:
    """A replica that failed: the end of its doubt, and the number of times that it was silent since its last reply."""

    until: float
    silences: int


class ReplicaSelector:
    """A client's knowledge of the replicas of one service; shared by all its calls."""

    def __init__(self, addresses: Sequence[Address], draw: Callable[[], float]) -> None:
        """Begin with these addresses only.

        Args:
            addresses: In the given order.
            draw: Returns a number from 0 to 1. It selects the address to begin with, so that a thousand clients with
                the same list do not all begin with its first.
        """
        self.owner: Address | None = None
        self.good: Address | None = None
        self._addresses = tuple(addresses)
        self._draw = draw
        self._start = int(draw() * len(self._addresses))
        self._doubts: dict[Address, _DoubtedReplica] = {}
        self._finders: set[Callable[[Address], None]] = set()

    @property
    def ordered(self) -> Sequence[Address]:
        """All addresses, the best first: the owner, the last that replied, the others in turn."""
        known = [address for address in (self.owner, self.good) if address is not None]
        if not self._addresses:
            return known
        start = self._start % len(self._addresses)
        return tuple(dict.fromkeys((*known, *self._addresses[start:], *self._addresses[:start])))

    def renew(self, addresses: Sequence[Address]) -> None:
        """Replace the addresses of the list; the owner and the last that replied stay known."""
        if set(addresses) != set(self._addresses):
            self._start = int(self._draw() * len(addresses))
        self._addresses = tuple(addresses)

    def known_as(self, endpoint: Address) -> Address:
        """Return the list's form of an address that a server sent: with the name that its certificate must have."""
        for address in self._addresses:
            if address == endpoint or address.listed == endpoint.endpoint:
                return address
        return endpoint

    def is_doubtful(self, address: Address, now: float) -> bool:
        """True if a replica failed so recently that it is called after all others."""
        doubt = self._doubts.get(address)
        return doubt is not None and now < doubt.until

    def silences(self, address: Address) -> int:
        """Return the number of times that a replica was silent since its last reply."""
        doubt = self._doubts.get(address)
        return 0 if doubt is None else doubt.silences

    def timeout(self, address: Address, base: float) -> float:
        """Return the timeout for a replica: `base`, doubled for each time that it was silent; infinite if it is alone.

        Doubled, because a busy replica would never finish a call if every attempt was cut off after the same time.
        """
        if len(self.ordered) <= 1:
            return math.inf
        return min(base * 2.0 ** self.silences(address), _LONGEST_TIMEOUT)

    def answered(self, address: Address) -> None:
        """Record a successful call of a replica."""
        self.good = address
        self._doubts.pop(address, None)

    def refused(self, address: Address, now: float, *, silent: bool) -> None:
        """Record that a replica could not be reached, is draining, or did not reply (`silent`)."""
        silences = min(self.silences(address) + silent, _MOST_SILENCES)
        span = min(_DOUBT_OF_SILENT * 2.0 ** (silences - 1), _LONGEST_DOUBT) if silent else _DOUBT_OF_REFUSING
        self._doubts[address] = _DoubtedReplica(now + span, silences)
        if self.owner == address:
            self.owner = None
        if self.good == address:
            self.good = None

    def pointed(self, address: Address, owner: Address | None) -> None:
        """Record that a replica is not the owner, and the owner that it names; None: it knows none."""
        if self.good == address:
            self.good = None
        self.owner = owner if owner != address else None
        # It replies now; earlier silence may have been slowness.
        self._doubts.pop(address, None)

    def when_found(self, callback: Callable[[Address], None]) -> Callable[[], None]:
        """Call `callback` whenever the owner is found; calling the returned function undoes this."""
        self._finders.add(callback)
        return lambda: self._finders.discard(callback)

    def found(self, owner: Address) -> None:
        """Report the owner: it accepted a request that another replica had refused as not the owner."""
        for callback in [*self._finders]:
            callback(owner)

    def rotate(self) -> None:
        """Begin with the next address of the list from now on."""
        self._start += 1


class ReplicaSearch:
    """The attempts of one call, or of a series of streams, to find a replica that replies."""

    def __init__(self, selector: ReplicaSelector) -> None:
        """Begin; `selector` is shared, and learns from these attempts."""
        self.selector = selector
        self._tried: set[Address] = set()
        self._hops = 0
        self._at_once = False
        # The owner that the last called replica named.
        self._followed: Address | None = None

    def next(self, now: float) -> Address:
        """Return the replica to call: one not tried since the last pause and not in doubt, the best first.

        One that was silent, and has sent no reply since, comes after all others, unless the last one called names it as
        the owner. Otherwise, with two of three replicas paused, each round of attempts could begin with those two, and
        with longer timeouts each time.
        """

        def rank(address: Address) -> tuple[bool, bool, int]:
            silences = 0 if address == self._followed else self.selector.silences(address)
            return address in self._tried, self.selector.is_doubtful(address, now), silences

        return min(self.selector.ordered, key=rank)

    @property
    def at_once(self) -> bool:
        """True if the next replica is to be called without a pause."""
        return self._at_once

    def answered(self, address: Address) -> None:
        """Record a successful call of a replica."""
        self.selector.answered(address)
        followed = self._followed
        self._begin_again()
        if address == followed:
            self.selector.found(address)

    def declined(self, address: Address) -> None:
        """Record that a replica replied that it cannot do it now; the connection to it works."""
        self.selector.answered(address)
        self._at_once = False

    def refused(self, address: Address, now: float, *, silent: bool = False) -> None:
        """Record that a replica could not be reached, is draining, or did not reply in time (`silent`)."""
        self.selector.refused(address, now, silent=silent)
        self._followed = None
        self._tried.add(address)
        self._at_once = any(other not in self._tried for other in self.selector.ordered)

    def pointed(self, address: Address, owner: Address | None, now: float) -> None:
        """Record that a replica is not the owner; if it names no owner, the other replicas know none either."""
        self.selector.pointed(address, owner)
        self._tried.add(address)
        self._hops += 1
        self._at_once = (
            owner is not None
            and owner not in self._tried
            and not self.selector.is_doubtful(owner, now)
            and self._hops <= _MOST_HOPS
        )
        self._followed = owner

    def rest(self) -> None:
        """Prepare a pause, after which every replica may be called again."""
        self._begin_again()
        self.selector.rotate()

    def _begin_again(self) -> None:
        self._tried.clear()
        self._followed = None
        self._hops = 0
        self._at_once = False
