"""Watching keys over whichever member answers, without a gap and without a repetition."""

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

# Seconds without a word from the member after which it is asked for one: a member that hangs would otherwise be
# noticed by gRPC's keep-alive only. Shorter notices sooner, at the price of a tiny message each way.
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
            EtcdUnavailable: The member doesn't take it.
        """
        try:
            async with asyncio.timeout(self._timeout):
                await self._connection.outcome(self._call.write(request))
        except TimeoutError:
            raise EtcdUnavailable(f"{self._connection.where}: a watch was not heard") from None

    async def read(self) -> watch_pb2.WatchResponse:
        """The next message. A member that has none is asked to say so.

        Raises:
            EtcdUnavailable: It says nothing.
            EtcdError: It has ended the stream.
        """
        if self._reading is None:
            # On a task of its own: a read that is cancelled ends the call.
            self._reading = asyncio.ensure_future(self._connection.outcome(self._call.read()))
        if not await self._arrives(_SILENCE):
            await self.send(watch_pb2.WatchRequest(progress_request=watch_pb2.WatchProgressRequest()))
            if not await self._arrives(self._timeout):
                raise EtcdUnavailable(f"{self._connection.where}: a watch heard nothing")
        reading, self._reading = self._reading, None
        response = reading.result()
        if response is grpc.aio.EOF:
            raise EtcdUnavailable(f"{self._connection.where}: a watch was ended")
        return response  # type: ignore[no-any-return]

    async def _arrives(self, seconds: float) -> bool:
        assert self._reading is not None
        return bool((await asyncio.wait({self._reading}, timeout=seconds))[0])

    def end(self) -> None:
        """Give it up."""
        self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()


class Position:
    """How far a watch has come, and which changes may be told."""

    def __init__(self, revision: int) -> None:
        """`revision`: the first whose changes are told; 0: the next when the watch begins."""
        self.next_revision = revision
        self._held: list[Change] = []

    def broken(self) -> None:
        """The stream is gone. What was held comes again, on another one."""
        self._held = []

    def take(self, response: watch_pb2.WatchResponse) -> list[Change]:
        """The changes that can be told after this message: all of whole revisions.

        Of a revision that a server tells in fragments, the rest may be lost with the connection; had a part been
        told, it would have to be told twice.
        """
        if not response.events:
            self._progress(response)
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

    def _progress(self, response: watch_pb2.WatchResponse) -> None:
        revision = response.header.revision
        if response.created:
            if self.next_revision == 0:
                self.next_revision = revision + 1
        elif response.watch_id >= 0:
            # Everything up to there was told, so that a compaction of it costs us nothing. An answer to our own
            # question (-1) says so too, but servers before 3.5.8 say it before they tell the last changes.
            self.next_revision = max(self.next_revision, revision + 1)


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
            # Another token may do. If it doesn't, it is our rights, or the cluster's users were changed once more.
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
    """Raises why the server has ended the watch, if it has."""
    if response.compact_revision:
        raise Compacted(response.compact_revision)
    if not response.canceled:
        return
    error = error_for(grpc.StatusCode.UNKNOWN, response.cancel_reason, where)
    if isinstance(error, EtcdRefused) and error.reason is Reason.PERMISSION_DENIED:
        # Servers before 3.5.3 say that of a token that they don't know, too.
        raise TokenRefused(error.reason, str(error))
    raise error


# ---- Keeping a lease alive, one keep-alive at a time.


_LEASE_PATH = "/etcdserverpb.Lease/LeaseKeepAlive"


@dataclass(frozen=True, slots=True)
class Renewal:
    """The answer to a keep-alive.

    Attributes:
        ttl: Seconds that the lease lives from when the keep-alive was sent; 0: it has ended.
        term: Of the leader, as the member that answered knew it before it asked that leader.
    """

    ttl: float
    term: int


async def renew(members: Members, connection: EtcdChannel, lease: int, timeout: float) -> Renewal:
    """Send one keep-alive to a member, on a stream of its own.

    A stream for each costs a lease little, and none is ever left on a member that has lost its leader.

    Raises:
        EtcdUnavailable: No answer in time; it may have been prolonged or not.
        EtcdRefused: It is refused.
    """
    try:
        async with asyncio.timeout(timeout):
            await connection.ready(timeout)
            return await members.with_token(
                connection, timeout, lambda token, _: _renew(members, connection, lease, token)
            )
    except TimeoutError:
        raise EtcdUnavailable(f"{connection.where}: no answer to a keep-alive for {timeout:g} s") from None


async def _renew(members: Members, connection: EtcdChannel, lease: int, token: str) -> Renewal:
    call = connection.stream(_LEASE_PATH, lease_pb2.LeaseKeepAliveResponse, members.metadata(token))
    try:
        await connection.outcome(call.write(lease_pb2.LeaseKeepAliveRequest(id=lease)))
        response = await connection.outcome(call.read())
        if response is grpc.aio.EOF:
            raise EtcdUnavailable(f"{connection.where}: a keep-alive was not answered")
        return Renewal(float(response.ttl), response.header.raft_term)
    finally:
        call.cancel()
