"""A lease that is kept alive, and the certainty, by our own clock, that it is still ours."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.cluster import EtcdChannel
from rallypoint.etcd.errors import EtcdError, EtcdUnavailable
from rallypoint.etcd.streams import renew
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.loop import boot_time
from rallypoint.rpc.pace import Pace

log = get_logger(__name__)

# Of the lease's time we count on so much less: clocks of two machines differ in rate by far less than this, and
# what was allowed to be told must also have left before the lease can be another's.
_MARGIN = 0.05
_LEAST_MARGIN = 0.1
# Of the lease's time, how often it is prolonged, and how long a member gets before all are asked, those included that
# hang: one that has passed a keep-alive on to a leader which vanished answers it no more, but another one as soon as
# there is a leader. What is left of the lease's time is for the election, which may take two rounds of votes.
_EVERY = 1 / 3
_ATTEMPT = 1 / 12
# Of the lease's time, the longest pause between two keep-alives of which the first was refused.
_BACKOFF = 1 / 20
# Seconds for the farewell: a lease that isn't revoked dies by itself.
_REVOKE = 2.0


class SessionLost(EtcdError):
    """The lease is another's, or could be."""


class Session:
    """A lease of etcd's, kept alive until it is closed or lost. Once lost, it stays so: begin another.

    Why `held()` can be trusted. The lease lives for its TTL from when the leader handled a keep-alive, which was after
    we sent it; so we count from the sending, by a clock that suspends don't stop, and count on a little less. But a
    leader that was paused or cut off may answer though another has been elected, at which the lease may have ended
    meanwhile. So a keep-alive counts only if a linearizable read, sent after its answer, finds the same term: no leader
    of a later one had a majority before that read, hence the one that answered was still the leader when it did. A
    later leader gives every lease its full TTL anew when it is elected.
    """

    def __init__(
        self,
        client: EtcdClient,
        lease: int,
        ttl: float,
        *,
        sent: float,
        clock: Callable[[], float],
        pace: Pace,
    ) -> None:
        """See `open`."""
        self.lease = lease
        self.ttl = ttl
        self._client = client
        self._clock = clock
        self._pace = pace
        # When the last keep-alive that counts was sent.
        self._kept = sent
        self._lost = asyncio.Event()
        self._cause = ""
        self._keeping = asyncio.create_task(self._keep())

    @classmethod
    async def open(
        cls,
        client: EtcdClient,
        ttl: float,
        *,
        clock: Callable[[], float] = boot_time,
        pace: Pace | None = None,
    ) -> Session:
        """Get a lease and begin to keep it alive.

        Args:
            client: Where from.
            ttl: Seconds that it outlives us; etcd gives whole ones, and no fewer than its elections take.
            clock: Seconds, counting on while the machine is suspended.
            pace: How time passes between keep-alives.

        Raises:
            EtcdUnavailable: No member answered in time.
            EtcdRefused: It is refused.
        """
        sent = clock()
        lease, granted = await client.grant(math.ceil(ttl))
        session = cls(client, lease, granted, sent=sent, clock=clock, pace=pace or Pace())
        if not session.held():
            await session.close()
            raise EtcdUnavailable(f"etcd took longer to grant a lease than its {granted:g} s")
        return session

    def held(self) -> bool:
        """Whether the lease is ours for certain."""
        return not self._lost.is_set() and self._clock() < self._deadline

    def check(self) -> None:
        """Raises SessionLost if it is not."""
        if not self.held():
            cause = self._cause or f"it could not be kept alive for {self.ttl:g} s"
            raise SessionLost(f"the lease {self.lease:x} of this replica is lost: {cause}")

    async def lost(self) -> None:
        """Wait until it is lost, or closed."""
        await self._lost.wait()

    async def close(self) -> None:
        """Give the lease up: whoever waits for its keys to go need not wait for it to end. Bounded; never raises."""
        self._lose("the session was closed")
        self._keeping.cancel()
        await asyncio.wait({self._keeping})
        try:
            await self._client.revoke(self.lease, timeout=_REVOKE)
        except EtcdError as error:
            log.info("a lease was left to end by itself", lease=f"{self.lease:x}", cause=str(error))

    @property
    def _deadline(self) -> float:
        return self._kept + self.ttl - max(_LEAST_MARGIN, _MARGIN * self.ttl)

    def _lose(self, cause: str) -> None:
        if not self._lost.is_set():
            self._cause = cause
            self._lost.set()

    async def _keep(self) -> None:
        try:
            while self.held():
                await self._pace.sleep(max(0.0, self._kept + self.ttl * _EVERY - self._clock()))
                await self._prolong()
        except Exception:
            # A bug must not leave whoever waits for the loss waiting for ever.
            log.exception("keeping a lease alive failed", lease=f"{self.lease:x}")
        self._lose(f"it could not be kept alive for {self.ttl:g} s")

    async def _prolong(self) -> None:
        """Send keep-alives until one counts, or the lease is lost: the first to one member, then to all.

        One that takes long is not given up, since everything may be slow: another is sent besides.
        """
        members = self._client.members
        trying: set[asyncio.Task[bool]] = set()
        asked = [members.current]
        try:
            while self.held():
                current = members.current
                latest = {asyncio.create_task(self._attempt(each)): each for each in asked}
                trying |= latest.keys()
                patience = min(self.ttl * _ATTEMPT, self._deadline - self._clock())
                done, trying = await asyncio.wait(
                    trying, timeout=patience, return_when=asyncio.FIRST_COMPLETED
                )
                if any(attempt.result() for attempt in done):
                    return
                if any(latest.get(attempt) is current for attempt in trying):
                    members.move_on(current)  # nobody else is to wait for a member that hangs
                asked = members.connections
                if done:
                    await self._pace.sleep((1 + self._pace.draw()) / 2 * self.ttl * _BACKOFF)
        finally:
            for attempt in trying:
                attempt.cancel()
            if trying:
                await asyncio.wait(trying)

    async def _attempt(self, connection: EtcdChannel) -> bool:
        """Send one keep-alive to a member; whether it counts."""
        sent = self._clock()
        members = self._client.members
        try:
            renewal = await renew(members, connection, self.lease, self._deadline - sent)
            if renewal.ttl <= 0:
                self._lose("etcd says that it has ended")
                return False
            # Of the member that has just answered: another one may hang.
            left = self._deadline - self._clock()
            if (term := await self._client.term(at=connection, timeout=left)) != renewal.term:
                log.debug("a keep-alive does not count", lease=f"{self.lease:x}", of=renewal.term, now=term)
                return False
        except EtcdUnavailable as error:
            members.move_on(connection)
            log.debug("a keep-alive failed", lease=f"{self.lease:x}", cause=str(error))
            return False
        except EtcdError as error:
            # None ever will: the user's rights were taken away, for example.
            self._lose(str(error))
            return False
        if not self.held():
            # Whoever found it not held must not find it held again.
            return False
        self._kept = max(self._kept, sent)
        return True
