"""A lease that is kept alive, and the certainty, by our own clock, that it is still held."""

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

# Part of the lease's time that is not used: clocks of two machines differ in rate by far less than this, and a reply
# that was permitted must also have been sent before another process can get the lease.
_MARGIN = 0.05
_LEAST_MARGIN = 0.1
# Parts of the lease's time: the interval of keep-alives, and the timeout of one member before all are called, including
# those that hang: a member that has passed a keep-alive on to a leader which vanished never replies to it, but replies
# to another one as soon as there is a leader. The rest is for the election, which may take two rounds of votes.
_EVERY = 1 / 3
_ATTEMPT = 1 / 12
# Part of the lease's time: the longest pause between two keep-alives of which the first was refused.
_BACKOFF = 1 / 20
# Timeout for the revocation at the end, seconds: a lease that is not revoked expires by itself.
_REVOKE = 2.0


class SessionLost(EtcdError):
    """Another process holds the lease, or could hold it."""


class Session:
    """An etcd lease, kept alive until it is closed or lost. A lost session stays lost: open a new one.

    Why `held()` can be trusted. The lease lives for its TTL from the moment when the leader handled a keep-alive, which
    was after it was sent; so the TTL is counted from the sending, by a clock that suspends do not stop, less a margin.
    But a leader that was paused or cut off may reply although another was elected, and the lease may have ended in the
    meantime. So a keep-alive counts only if a linearizable read, sent after its reply, returns the same term: no leader
    of a later term had a majority before that read, so the leader that replied was still the leader at that time. A
    later leader gives every lease its full TTL again when it is elected.
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
        # When the last valid keep-alive was sent.
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
        """Create a lease and begin to keep it alive.

        Args:
            ttl: Seconds that the lease outlives this process; etcd rounds up, and has a minimum from its elections.
            clock: Seconds, also counting while the machine is suspended.
            pace: Sleep and randomness between keep-alives.

        Raises:
            EtcdUnavailable: No member replied in time.
            EtcdRefused: etcd refused it.
        """
        sent = clock()
        lease, granted = await client.grant(math.ceil(ttl))
        session = cls(client, lease, granted, sent=sent, clock=clock, pace=pace or Pace())
        if not session.held():
            await session.close()
            raise EtcdUnavailable(f"etcd took longer to grant a lease than its {granted:g} s")
        return session

    def held(self) -> bool:
        """True if the lease is held for certain.

        The first caller that finds it not held ends the wait of `lost()`. After a suspend of the machine that is sooner
        than any timer, which the suspend has delayed.
        """
        if self._clock() >= self._deadline:
            self._lose(f"it could not be kept alive for {self.ttl:g} s")
        return not self._lost.is_set()

    def check(self) -> None:
        """Raise SessionLost if the lease is not held for certain."""
        if not self.held():
            raise SessionLost(f"the lease {self.lease:x} of this replica is lost: {self._cause}")

    async def lost(self) -> None:
        """Wait until it is lost, or closed."""
        await self._lost.wait()

    async def close(self) -> None:
        """Revoke the lease, so that others need not wait until it expires. Limited in time; never raises."""
        self._lose("the session was closed")
        self._keeping.cancel()
        await asyncio.wait({self._keeping})
        try:
            await self._client.revoke(self.lease, timeout=_REVOKE)
        except EtcdError as error:
            log.info(
                "a lease was not revoked and will expire by itself", lease=f"{self.lease:x}", cause=str(error)
            )

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
            # A bug must not leave tasks that wait for the loss waiting for ever.
            log.exception("keeping a lease alive failed", lease=f"{self.lease:x}")
            self._lose("keeping it alive failed")

    async def _prolong(self) -> None:
        """Send keep-alives until one counts, or the lease is lost: the first to one member, then to all.

        A slow one is not cancelled, since everything may be slow: another is sent in addition.
        """
        members = self._client.members
        trying: set[asyncio.Task[bool]] = set()
        called = [members.current]
        try:
            while self.held():
                current = members.current
                latest = {asyncio.create_task(self._attempt(each)): each for each in called}
                trying |= latest.keys()
                timeout = min(self.ttl * _ATTEMPT, self._deadline - self._clock())
                done, trying = await asyncio.wait(
                    trying, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                if any(attempt.result() for attempt in done):
                    return
                if any(latest.get(attempt) is current for attempt in trying):
                    members.move_on(current)  # no other caller is to wait for a member that hangs
                called = members.connections
                if done:
                    await self._pace.sleep((1 + self._pace.draw()) / 2 * self.ttl * _BACKOFF)
        finally:
            for attempt in trying:
                attempt.cancel()
            if trying:
                await asyncio.wait(trying)

    async def _attempt(self, connection: EtcdChannel) -> bool:
        """Send one keep-alive to a member; return True if it counts."""
        sent = self._clock()
        members = self._client.members
        try:
            renewal = await renew(members, connection, self.lease, self._deadline - sent)
            if renewal.ttl <= 0:
                self._lose("etcd reports that it has ended")
                return False
            # From the member that has just replied: another one may hang.
            left = self._deadline - self._clock()
            if (term := await self._client.term(at=connection, timeout=left)) != renewal.term:
                log.debug("a keep-alive does not count", lease=f"{self.lease:x}", of=renewal.term, now=term)
                return False
        except EtcdUnavailable as error:
            members.move_on(connection)
            log.debug("a keep-alive failed", lease=f"{self.lease:x}", cause=str(error))
            return False
        except EtcdError as error:
            # No later keep-alive will succeed either: the user's rights were removed, for example.
            self._lose(str(error))
            return False
        if not self.held():  # a caller that found it not held must not find it held again
            return False
        self._kept = max(self._kept, sent)
        return True
