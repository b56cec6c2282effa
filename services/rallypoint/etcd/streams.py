"""Watches over any member that replies, without gaps or repetitions; and keep-alives of leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from rallypoint.etcd.cluster import EtcdChannel, Members
from rallypoint.etcd.errors import Compacted, EtcdRefused, EtcdUnavailable, Reason, TokenRefused, error_for
from rallypoint.etcd.v1 import lease_pb2, watch_pb2
from rallypoint.etcd.values import Change, from_events

_PATH = "/etcdserverpb.Watch/Watch"

# Seconds without a message from the member after which one is requested: otherwise only gRPC's keep-alive would
# detect a member that hangs. Shorter detects it sooner, at the price of a tiny message each way.
_SILENCE = 2.0


class _WatchStream:
    """One stream to one member, with one watch on it."""

    def __init__(self, connection: EtcdChannel, token: str, members: Members) -> None:
        self._connection = connection
        self._timeout = members.attempt_timeout
        self._call: Any = connection.stream(_PATH, watch_pb2.WatchResponse, members.metadata(token))
        self._reading: asyncio.Task[Any] | None = None

    async def send(self, request: watch_pb2.WatchRequest) -> None:
        """Send a request.

        Raises:
            EtcdUnavailable: The member does not read it.
        """
        try:
            async with asyncio.timeout(self._timeout):
                await self._connection.outcome(self._call.write(request))
        except TimeoutError:
            raise EtcdUnavailable(
                f"{self._connection.where}: the member did not read a watch request"
            ) from None

    async def read(self) -> watch_pb2.WatchResponse:
        """Return the next message. A member that sends none is requested to send an empty one.

        Raises:
            EtcdUnavailable: It sends nothing.
            EtcdError: It has ended the stream.
        """
        if self._reading is None:
            # In its own task: a read that is cancelled ends the call.
            self._reading = asyncio.ensure_future(self._connection.outcome(self._call.read()))
        if not await self._arrives(_SILENCE):
            await self.send(watch_pb2.WatchRequest(progress_request=watch_pb2.WatchProgressRequest()))
            if not await self._arrives(self._timeout):
                raise EtcdUnavailable(f"{self._connection.where}: the member sent nothing on a watch")
        reading, self._reading = self._reading, None
        response = reading.result()
        if response is grpc.aio.EOF:
            raise EtcdUnavailable(f"{self._connection.where}: a watch was ended")
        return response  # type: ignore[no-any-return]

    async def _arrives(self, seconds: float) -> bool:
        assert self._reading is not None
        return bool((await asyncio.wait({self._reading}, timeout=seconds))[0])

    def end(self) -> None:
        """Cancel the stream."""
        self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()


class Position:
    """The progress of a watch, and the changes that may be returned."""

    def __init__(self, revision: int) -> None:
        """`revision`: the first whose changes are returned."""
        self.next_revision = revision
        self._held: list[Change] = []

    def broken(self) -> None:
        """Discard the changes of an incomplete revision: a new stream sends them again."""
        self._held = []

    def take(self, response: watch_pb2.WatchResponse) -> list[Change]:
        """Return the changes that are complete after this message: all of whole revisions.

        The rest of a revision that a server sends in fragments may be lost with the connection; if a part had been
        returned, it would have to be returned twice.
        """
        if not response.events:
            if not response.created and response.watch_id >= 0:
                # All changes up to there were sent, so that their compaction does not matter. The reply to our own
                # request (-1) means the same, but servers before 3.5.8 send it before the last changes.
                self.next_revision = max(self.next_revision, response.header.revision + 1)
            return []
        changes = self._held + from_events(response.events)
        self._held = []
        if response.fragment:
            last = changes[-1].revision
            self._held = [change for change in changes if change.revision == last]
            changes = changes[: len(changes) - len(self._held)]
        if changes:
            self.next_revision = changes[-1].revision + 1
        return changes


async def watch(
    members: Members, key: bytes, end: bytes, revision: int
) -> AsyncGenerator[Sequence[Change], None]:
    """See `EtcdClient.watch`."""
    position = Position(revision)
    backoff = members.pace.backoff()
    failures = 0
    stale: str | None = None
    while True:
        connection = members.current
        stream = None
        token = ""
        try:
            await connection.ready(members.attempt_timeout)
            token = await members.tokens.get(connection, members.attempt_timeout, stale)
            stream = _WatchStream(connection, token, members)
            await stream.send(_create(key, end, position.next_revision))
            while True:
                response = await stream.read()
                _check(response, connection.where)
                if response.created:
                    failures, stale = 0, None
                    backoff.reset()
                changes = position.take(response)
                if changes:
                    yield changes
        except TokenRefused as error:
            # Another token may work. If not, the user lacks the right, or the cluster's users were changed once more.
            if not members.tokens.has_user or (
                stale is not None and error.reason is Reason.PERMISSION_DENIED
            ):
                raise error.final() from None
            first, stale = stale is None, token
            if first:
                continue
            failures += 1
        except EtcdUnavailable:
            members.move_on(connection)
            failures += 1
        finally:
            position.broken()
            if stream is not None:
                stream.end()
        if failures % len(members.connections) == 0:
            await members.pace.sleep(backoff.next())


def _create(key: bytes, end: bytes, revision: int) -> watch_pb2.WatchRequest:
    return watch_pb2.WatchRequest(
        create_request=watch_pb2.WatchCreateRequest(
            key=key, range_end=end, start_revision=revision, progress_notify=True, fragment=True
        )
    )


def _check(response: watch_pb2.WatchResponse, where: str) -> None:
    """Raise the reason why the server has ended the watch, if it has."""
    if response.compact_revision:
        raise Compacted(response.compact_revision)
    if not response.canceled:
        return
    error = error_for(grpc.StatusCode.UNKNOWN, response.cancel_reason, where)
    if isinstance(error, EtcdRefused) and error.reason is Reason.PERMISSION_DENIED:
        # Servers before 3.5.3 send that for a token that they do not know, too.
        raise TokenRefused(error.reason, str(error))
    raise error


# ---- Keep-alives of a lease, one at a time.


_LEASE_PATH = "/etcdserverpb.Lease/LeaseKeepAlive"


@dataclass(frozen=True, slots=True)
class Renewal:
    """The reply to a keep-alive.

    Attributes:
        ttl: Lifetime of the lease in seconds, from when the keep-alive was sent; 0: it has ended.
        term: Term of the leader, as known to the member that replied before it passed the keep-alive on.
    """

    ttl: float
    term: int


async def renew(members: Members, connection: EtcdChannel, lease: int, timeout: float) -> Renewal:
    """Send one keep-alive to a member, on its own stream.

    A stream for each costs little, and none ever stays on a member that has lost its leader.

    Raises:
        EtcdUnavailable: No reply in time; it may have been renewed or not.
        EtcdRefused: etcd refused it.
    """
    try:
        async with asyncio.timeout(timeout):
            await connection.ready(timeout)
            return await members.with_token(
                connection, timeout, lambda token, _: _renew(members, connection, lease, token)
            )
    except TimeoutError:
        raise EtcdUnavailable(f"{connection.where}: no reply to a keep-alive for {timeout:g} s") from None


async def _renew(members: Members, connection: EtcdChannel, lease: int, token: str) -> Renewal:
    call = connection.stream(_LEASE_PATH, lease_pb2.LeaseKeepAliveResponse, members.metadata(token))
    try:
        await connection.outcome(call.write(lease_pb2.LeaseKeepAliveRequest(id=lease)))
        response = await connection.outcome(call.read())
        if response is grpc.aio.EOF:
            raise EtcdUnavailable(f"{connection.where}: the stream ended without a reply to a keep-alive")
        return Renewal(float(response.ttl), response.header.raft_term)
    finally:
        call.cancel()
