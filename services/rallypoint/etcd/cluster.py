"""Connections to the members of a cluster, the user's token, and calls with retries over all members."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from rallypoint.etcd.endpoint import Credentials, EtcdAddress
from rallypoint.etcd.errors import (
    ClientClosed,
    EtcdError,
    EtcdRefused,
    EtcdUnavailable,
    TokenRefused,
    of_call,
)
from rallypoint.etcd.v1 import auth_pb2, maintenance_pb2
from rallypoint.rpc.channel import CLIENT_ARGUMENTS
from rallypoint.rpc.endpoint import Endpoint, ip_address
from rallypoint.rpc.pace import Pace

Metadata: TypeAlias = Sequence[tuple[str, str]]

_T = TypeVar("_T")

MAX_RECEIVED_BYTES = 256 * 1024 * 1024
"""Limit for one message: pages of keys are far smaller, with values of any size."""

_OURS = {
    # etcd ends connections that ping more often than every 5 s, or at all while no call is open.
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5_000,
    "grpc.keepalive_permit_without_calls": 0,
    "grpc.max_receive_message_length": MAX_RECEIVED_BYTES,
    # The server decides which messages are too large: its limit may have been raised.
    "grpc.max_send_message_length": -1,
}
_ARGUMENTS = tuple({**dict(CLIENT_ARGUMENTS), **_OURS}.items())

# A name may resolve to all members: every other call then goes to another one, so that a hung member does not get all.
_OF_A_NAME = (("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),)

# Seconds: on a connection that cannot be made a call fails at once, unless another attempt has just begun.
_CAUSE_TIMEOUT = 0.1

_READY = grpc.ChannelConnectivity.READY
_FAILED = grpc.ChannelConnectivity.TRANSIENT_FAILURE
_SHUT = grpc.ChannelConnectivity.SHUTDOWN


class EtcdChannel:
    """A channel to one endpoint, and calls on it by their path."""

    def __init__(self, endpoint: Endpoint, credentials: Credentials) -> None:
        """Connects when first used."""
        self.where = str(endpoint)
        self._endpoint = endpoint
        self._credentials = credentials
        self._calls: dict[str, Callable[..., Any]] = {}
        self._change: asyncio.Task[None] | None = None
        # Why the last attempt to connect failed; empty since it is connected.
        self._obstacle = ""
        self._shown = credentials.current
        self._channel = self._open()

    async def ready(self, timeout: float) -> None:
        """Wait until it is connected.

        Raises:
            EtcdUnavailable: It cannot connect, or not in that many seconds. Nothing was sent.
            ClientClosed: The client was closed.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while (state := self._channel.get_state(try_to_connect=True)) is not _READY:
            if state is _SHUT:
                raise ClientClosed
            if state is _FAILED:
                await self._show_new_credentials()
                cause = await self._cause()
                self._obstacle = cause + self._advice(cause)
                raise EtcdUnavailable(f"{self.where}: can't connect: {self._obstacle}", unsent=True)
            if self._change is None or self._change.done():
                # One task for all that wait: gRPC keeps every such wait until the state has changed.
                self._change = asyncio.ensure_future(self._channel.wait_for_state_change(state))
            remaining = deadline - loop.time()
            if remaining <= 0 or not (await asyncio.wait({self._change}, timeout=remaining))[0]:
                before = f"; before that: {self._obstacle}" if self._obstacle else ""
                raise EtcdUnavailable(
                    f"{self.where}: not connected after {timeout:.3g} s{before}", unsent=True
                )
        self._obstacle = ""

    async def _cause(self) -> str:
        """Return why it cannot connect. gRPC reports that to calls only: make one that changes nothing."""
        path, answer = "/etcdserverpb.Maintenance/Status", maintenance_pb2.StatusResponse
        try:
            await self.unary(path, maintenance_pb2.StatusRequest(), answer, _CAUSE_TIMEOUT, ())
        except EtcdError as error:
            return str(error).removeprefix(f"{self.where}: ")
        return "a moment ago it could"

    def _advice(self, cause: str) -> str:
        """Return the likely reason if the two sides disagree about the security of the connection."""
        lowered, names = cause.lower(), self._credentials.names
        if self._shown is None:
            return "; it may use TLS: then give etcds://" if "socket closed" in lowered else ""
        if "handshake read failed" in lowered:
            return "; it may not use TLS: then give etcd:// and no certificates"
        if "tsi_data_corrupted" in lowered:
            return f"; it may require a client certificate that it knows: {names.certificate}, {names.key}"
        if "certificate_verify_failed" in lowered:
            return f"; its certificate may need another authority: {names.authorities}"
        return ""

    def _open(self) -> grpc.aio.Channel:
        options = (*_ARGUMENTS, *_OF_A_NAME) if ip_address(self._endpoint.host) is None else _ARGUMENTS
        if self._shown is None:
            return grpc.aio.insecure_channel(self._endpoint.target, options=options)
        return grpc.aio.secure_channel(self._endpoint.target, self._shown, options=options)

    async def _show_new_credentials(self) -> None:
        """Reconnect with new credentials, if there are any. A channel that cannot connect has no calls."""
        self._credentials.refresh()
        if self._credentials.current is self._shown:
            return
        self._shown = self._credentials.current
        old, self._channel, self._calls = self._channel, self._open(), {}
        await old.close()

    async def unary(
        self, path: str, request: Message, answer: type[Message], timeout: float, metadata: Metadata
    ) -> Any:
        """Call the method at this path, once.

        Raises:
            EtcdUnavailable: The outcome is unknown.
            EtcdError: It is refused.
        """
        call = self._method(self._channel.unary_unary, path, answer)
        try:
            return await self.outcome(call(request, timeout=timeout, metadata=metadata))
        except grpc.aio.UsageError:
            raise ClientClosed from None

    def stream(self, path: str, answer: type[Message], metadata: Metadata) -> Any:
        """Begin a bidirectional stream of the method at this path; await its operations in `outcome`, and cancel it.

        Raises:
            ClientClosed: The client was closed.
        """
        call = self._method(self._channel.stream_stream, path, answer)
        try:
            return call(metadata=metadata)
        except grpc.aio.UsageError:
            raise ClientClosed from None

    def _method(self, form: Callable[..., Any], path: str, answer: type[Message]) -> Callable[..., Any]:
        if path not in self._calls:
            self._calls[path] = form(
                path, request_serializer=_serialize, response_deserializer=answer.FromString
            )
        return self._calls[path]

    async def outcome(self, doing: Awaitable[_T]) -> _T:
        """Return the result of an operation of a call.

        Raises:
            EtcdError: The failure, as one of our errors.
        """
        try:
            return await doing
        except grpc.aio.AioRpcError as error:
            raise of_call(error, self.where) from None
        except asyncio.InvalidStateError:
            # The call was over before the operation began.
            raise EtcdUnavailable(f"{self.where}: the call has ended") from None
        except asyncio.CancelledError:
            # gRPC also cancels a task that waits for a call which another task ends, together with the client.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EtcdUnavailable(f"{self.where}: the call was cancelled") from None

    async def close(self) -> None:
        """End every call on it."""
        if self._change is not None:
            self._change.cancel()
        await self._channel.close()


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


# ---- The token sent with the calls of a user: requested once, and again when it has become invalid.


_PATH = "/etcdserverpb.Auth/Authenticate"


class Tokens:
    """One token for all members: they share it, until it expires or one of them restarts."""

    def __init__(self, user: str, password: str) -> None:
        """`user` empty: calls have no token."""
        self._user = user
        self._password = password
        # None: it must be requested. Empty: none is needed.
        self._token = None if user else ""
        self._request: asyncio.Task[str] | None = None

    @property
    def has_user(self) -> bool:
        """True if another token can be requested."""
        return bool(self._user)

    async def get(self, connection: EtcdChannel, timeout: float, stale: str | None = None) -> str:
        """Return the token for a call; empty: without one.

        Args:
            connection: The member to request it from, if necessary.
            timeout: Limit in seconds.
            stale: A token that was refused: do not return it again.

        Raises:
            EtcdUnavailable: There is no reply. Nothing else was sent.
            EtcdRefused: UNAUTHENTICATED: no such user, or another password.
        """
        if self._token is not None and (self._token != stale or not self._user):
            return self._token
        if self._request is None:
            # Checking a password takes a server a tenth of a second: one request serves all that wait.
            self._request = asyncio.ensure_future(self._authenticate(connection, timeout))
            self._request.add_done_callback(self._on_token)
        pending = self._request
        done, _ = await asyncio.wait({pending}, timeout=timeout)
        if not done or pending.cancelled():
            raise EtcdUnavailable(f"{connection.where}: no token after {timeout:g} s", unsent=True)
        try:
            return pending.result()
        except EtcdRefused:
            raise
        except EtcdError as error:
            raise EtcdUnavailable(str(error), unsent=True) from None

    async def _authenticate(self, connection: EtcdChannel, timeout: float) -> str:
        request = auth_pb2.AuthenticateRequest(name=self._user, password=self._password)
        try:
            response = await connection.unary(_PATH, request, auth_pb2.AuthenticateResponse, timeout, ())
        except EtcdRefused as error:
            if "authentication is not enabled" not in str(error):
                raise
            # Authentication is off now; when it is turned on, calls without a token are refused.
            return ""
        return str(response.token)

    def _on_token(self, pending: asyncio.Task[str]) -> None:
        self._request = None
        if not pending.cancelled() and pending.exception() is None:
            self._token = pending.result()

    def close(self) -> None:
        """Cancel the request and all that wait for it."""
        if self._request is not None:
            self._request.cancel()


# ---- The members of a cluster: the choice of the one to call, and of the next one after a failure.


_Answer = TypeVar("_Answer", bound=Message)

# Makes a member without a leader refuse at once, instead of holding a call until there is a leader again, and end
# streams on which nothing would arrive.
_REQUIRE_LEADER = ("hasleader", "true")


class Members:
    """Connections to all members. One of them is called until it fails; then all callers use the next."""

    def __init__(self, address: EtcdAddress, pace: Pace) -> None:
        """Create the connections; they connect when first used.

        Raises:
            TLSFileError: a TLS file is missing, unusable or does not match.
        """
        credentials = Credentials(address.tls)
        self.connections = [EtcdChannel(endpoint, credentials) for endpoint in address.endpoints]
        self.pace = pace
        self.request_timeout = address.request_timeout
        self.attempt_timeout = min(address.request_timeout, address.attempt_timeout)
        self.tokens = Tokens(address.user, address.password)
        # Not all clients of a cluster begin with its first member.
        self._current = int(pace.draw() * len(self.connections)) % len(self.connections)

    @property
    def current(self) -> EtcdChannel:
        """The member that is called next."""
        return self.connections[self._current]

    def move_on(self, failed: EtcdChannel) -> None:
        """Call the next member from now on, unless another caller has done that already."""
        if self.current is failed:
            self._current = (self._current + 1) % len(self.connections)

    async def request(
        self,
        path: str,
        request: Message,
        answer: type[_Answer],
        *,
        timeout: float | None = None,
        once: bool = False,
    ) -> _Answer:
        """Call a method, and again until a member replies.

        Args:
            timeout: Seconds, instead of the client's.
            once: True for a method that may not be repeated: send it once, to a member that is connected.

        Raises:
            EtcdUnavailable: No member replied in time. With `once`, the outcome is unknown, unless `unsent` is set.
            EtcdError: etcd refused it.
        """
        attempts = MemberAttempts(self, self.request_timeout if timeout is None else timeout)
        while True:
            connection = self.current
            try:
                await connection.ready(attempts.timeout())
                return await self.call(connection, path, request, answer, timeout=attempts.timeout())
            except EtcdUnavailable as error:
                if once and not error.unsent:
                    self.move_on(connection)
                    raise
                await attempts.failed(connection, error)

    async def call(
        self,
        connection: EtcdChannel,
        path: str,
        request: Message,
        answer: type[_Answer],
        *,
        timeout: float,
        leader: bool = True,
    ) -> _Answer:
        """Make one attempt at one member, and another if it no longer accepted the token: then it has done nothing.

        Raises:
            EtcdUnavailable: The outcome is unknown, unless `unsent` is set.
            EtcdError: etcd refused it.
        """

        async def send(token: str, remaining: float) -> _Answer:
            metadata = self.metadata(token, leader=leader)
            return await connection.unary(path, request, answer, remaining, metadata)  # type: ignore[no-any-return]

        return await self.with_token(connection, timeout, send)

    async def with_token(
        self, connection: EtcdChannel, timeout: float, send: Callable[[str, float], Awaitable[_T]]
    ) -> _T:
        """Send a request with the token, and once more with a new token if the member refuses the first.

        Args:
            connection: The member.
            timeout: Seconds for both attempts.
            send: Sends it with a token, within a number of seconds.

        Raises:
            EtcdUnavailable: There was no valid token in time: nothing was done.
            EtcdRefused: UNAUTHENTICATED: the user does not exist, or none was given.
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
        """Return the metadata of a call."""
        return (*((_REQUIRE_LEADER,) if leader else ()), *((("token", token),) if token else ()))

    async def close(self) -> None:
        """End every call and every connection."""
        self.tokens.close()
        await asyncio.gather(*(connection.close() for connection in self.connections))


class MemberAttempts:
    """Attempts at one call over all members, within a time limit."""

    def __init__(self, members: Members, timeout: float) -> None:
        """Begin; `timeout`: seconds from now in which attempts are made."""
        self._members = members
        self._timeout = timeout
        self._deadline = members.pace.clock() + timeout
        self._backoff = members.pace.backoff()
        self._failures = 0

    def remaining(self) -> float:
        """Seconds until the time limit."""
        return max(0.0, self._deadline - self._members.pace.clock())

    def timeout(self) -> float:
        """Seconds to wait for one member."""
        return min(self.remaining(), self._members.attempt_timeout)

    async def failed(self, connection: EtcdChannel, error: EtcdUnavailable) -> None:
        """Use the next member; pause when all have failed.

        Raises:
            EtcdUnavailable: The time limit is over.
        """
        members = self._members
        members.move_on(connection)
        self._failures += 1
        if self._failures % len(members.connections) == 0:
            await members.pace.sleep(min(self._backoff.next(), self.remaining()))
        if self.remaining() <= 0:
            raise EtcdUnavailable(
                f"etcd gave no answer for {self._timeout:g} s ({error})", unsent=error.unsent
            ) from None
