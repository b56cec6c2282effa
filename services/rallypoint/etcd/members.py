"""The members of a cluster: which of them is called, and when another is tried."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from google.protobuf.message import Message

from rallypoint.etcd.address import EtcdAddress
from rallypoint.etcd.connection import Connection, Metadata
from rallypoint.etcd.credentials import Credentials
from rallypoint.etcd.errors import EtcdUnavailable, TokenRefused
from rallypoint.etcd.tokens import Tokens
from rallypoint.rpc.selector import FIRST_BACKOFF, LONGEST_BACKOFF, Pace

_T = TypeVar("_T")
_Answer = TypeVar("_Answer", bound=Message)

# A member without a leader then refuses at once, instead of holding a call until there is one again, and ends
# streams on which nothing would come.
_REQUIRE_LEADER = ("hasleader", "true")


class Members:
    """Connections to all members. One of them is called until it fails; then the next is, for everybody."""

    def __init__(self, address: EtcdAddress, pace: Pace, request_timeout: float) -> None:
        """Connects when first used.

        Args:
            address: Where the members are.
            pace: How time passes.
            request_timeout: Seconds that a request may take over all of them.

        Raises:
            TLSFileError: a TLS file is missing, unusable or does not match.
        """
        credentials = Credentials(address.tls)
        self.connections = [Connection(endpoint, credentials) for endpoint in address.endpoints]
        self.pace = pace
        self.request_timeout = request_timeout
        self.attempt_timeout = min(request_timeout, address.attempt_timeout)
        self.tokens = Tokens(address.user, address.password)
        # Not all clients of a cluster begin with its first member.
        self._current = int(pace.draw() * len(self.connections)) % len(self.connections)

    @property
    def current(self) -> Connection:
        """The one that is called next."""
        return self.connections[self._current]

    def move_on(self, failed: Connection) -> None:
        """Call the next member from now on, unless somebody has moved on from this one already."""
        if self.current is failed:
            self._current = (self._current + 1) % len(self.connections)

    async def ask(
        self,
        path: str,
        request: Message,
        answer: type[_Answer],
        *,
        timeout: float | None = None,
        leader: bool = True,
    ) -> _Answer:
        """Call a method that may be called twice, until a member answers.

        Args:
            path: Of the method.
            request: Its argument.
            answer: The kind of its answer.
            timeout: Seconds, instead of the client's.
            leader: Whether a member that has no leader is to refuse.

        Raises:
            EtcdUnavailable: None did in time.
            EtcdError: It is refused.
        """
        attempts = MemberAttempts(self, self.request_timeout if timeout is None else timeout)
        while True:
            connection = self.current
            try:
                await connection.ready(attempts.patience())
                return await self.call(
                    connection, path, request, answer, timeout=attempts.patience(), leader=leader
                )
            except EtcdUnavailable as error:
                await attempts.failed(connection, error)

    async def ask_once(
        self, path: str, request: Message, answer: type[_Answer], *, timeout: float | None = None
    ) -> _Answer:
        """Send a request once, to a member that is connected.

        Raises:
            EtcdUnavailable: The outcome is unknown, unless it says that nothing was sent.
            EtcdError: It is refused.
        """
        attempts = MemberAttempts(self, self.request_timeout if timeout is None else timeout)
        while True:
            connection = self.current
            try:
                await connection.ready(attempts.patience())
                return await self.call(connection, path, request, answer, timeout=attempts.patience())
            except EtcdUnavailable as error:
                if not error.unsent:
                    self.move_on(connection)
                    raise
                await attempts.failed(connection, error)

    async def call(
        self,
        connection: Connection,
        path: str,
        request: Message,
        answer: type[_Answer],
        *,
        timeout: float,
        leader: bool = True,
    ) -> _Answer:
        """One attempt at one member, and another if it knew our token no more: it has done nothing then.

        Raises:
            EtcdUnavailable: The outcome is unknown, unless it says that nothing was sent.
            EtcdError: It is refused.
        """

        async def send(token: str, remaining: float) -> _Answer:
            metadata = self.metadata(token, leader=leader)
            return await connection.unary(path, request, answer, remaining, metadata)  # type: ignore[no-any-return]

        return await self.with_token(connection, timeout, send)

    async def with_token(
        self, connection: Connection, timeout: float, send: Callable[[str, float], Awaitable[_T]]
    ) -> _T:
        """Send something with our token, and once more with another if the member refuses that one.

        Args:
            connection: The member.
            timeout: Seconds for all of it.
            send: Sends it with a token, within so many seconds.

        Raises:
            EtcdUnavailable: There is no good token in time: nothing was done.
            EtcdRefused: UNAUTHENTICATED: there is no such user, or none was given.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout
        token = await self.tokens.get(connection, timeout)
        try:
            return await send(token, deadline - clock())
        except TokenRefused as error:
            if not self.tokens.has_user:
                raise error.final() from None
        token = await self.tokens.get(connection, max(0.0, deadline - clock()), stale=token)
        try:
            return await send(token, deadline - clock())
        except TokenRefused as error:
            # The cluster's users were changed once more in between.
            raise EtcdUnavailable(str(error), unsent=True) from None

    def metadata(self, token: str, *, leader: bool = True) -> Metadata:
        """What goes along with a call."""
        return (*((_REQUIRE_LEADER,) if leader else ()), *((("token", token),) if token else ()))

    async def close(self) -> None:
        """End every call and every connection."""
        self.tokens.close()
        await asyncio.gather(*(connection.close() for connection in self.connections))


class MemberAttempts:
    """Attempts at one call over all members, until it has taken too long."""

    def __init__(self, members: Members, timeout: float) -> None:
        """`timeout`: there are attempts for so many seconds from now."""
        self._members = members
        self._timeout = timeout
        self._deadline = members.pace.clock() + timeout
        self._backoff = FIRST_BACKOFF
        self._failures = 0

    def remaining(self) -> float:
        """Seconds until it has taken too long."""
        return max(0.0, self._deadline - self._members.pace.clock())

    def patience(self) -> float:
        """Seconds to wait for one member."""
        return min(self.remaining(), self._members.attempt_timeout)

    async def failed(self, connection: Connection, error: EtcdUnavailable) -> None:
        """Move on to the next member; wait a little when all have failed.

        Raises:
            EtcdUnavailable: It has taken too long.
        """
        members = self._members
        members.move_on(connection)
        self._failures += 1
        if self._failures % len(members.connections) == 0:
            pause = members.pace.draw() * self._backoff
            self._backoff = min(2 * self._backoff, LONGEST_BACKOFF)
            await members.pace.sleep(min(pause, self.remaining()))
        if self.remaining() <= 0:
            raise EtcdUnavailable(
                f"etcd gave no answer for {self._timeout:g} s ({error})", unsent=error.unsent
            ) from None
