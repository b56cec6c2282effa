"""The connection to one member of the cluster."""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from rallypoint.etcd.credentials import Credentials
from rallypoint.etcd.errors import ClientClosed, EtcdError, EtcdUnavailable, of_call
from rallypoint.etcd.v1 import maintenance_pb2
from rallypoint.rpc.channel import CLIENT_ARGUMENTS
from rallypoint.rpc.endpoint import Endpoint

Metadata: TypeAlias = Sequence[tuple[str, str]]

_T = TypeVar("_T")

MAX_RECEIVED_BYTES = 256 * 1024 * 1024
"""Of one message: pages of keys stay far below it, whatever their values."""

_OURS = {
    # etcd ends connections that ping more often than every 5 s, or at all while no call is open.
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5_000,
    "grpc.keepalive_permit_without_calls": 0,
    "grpc.max_receive_message_length": MAX_RECEIVED_BYTES,
    # The server has the last word on what is too large: it may have been told to take more.
    "grpc.max_send_message_length": -1,
}
_ARGUMENTS = tuple({**dict(CLIENT_ARGUMENTS), **_OURS}.items())

# A name may stand for all members: every other call then goes to another one, so that none that hangs gets all.
_OF_A_NAME = (("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),)

# Seconds: a call fails at once on a connection that can't be made, unless another attempt has just begun.
_CAUSE_PATIENCE = 0.1

_READY = grpc.ChannelConnectivity.READY
_FAILED = grpc.ChannelConnectivity.TRANSIENT_FAILURE
_SHUT = grpc.ChannelConnectivity.SHUTDOWN


class Connection:
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
            EtcdUnavailable: It isn't, and can't be now or in that many seconds. Nothing was sent.
            ClientClosed: It never will be.
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
                # One for all that wait: gRPC forgets none of them before the state has changed.
                self._change = asyncio.ensure_future(self._channel.wait_for_state_change(state))
            remaining = deadline - loop.time()
            if remaining <= 0 or not (await asyncio.wait({self._change}, timeout=remaining))[0]:
                before = f"; before that: {self._obstacle}" if self._obstacle else ""
                raise EtcdUnavailable(
                    f"{self.where}: not connected after {timeout:.3g} s{before}", unsent=True
                )
        self._obstacle = ""

    async def _cause(self) -> str:
        """Why it can't connect, which gRPC tells calls only: one that does nothing, should it get through."""
        path, answer = "/etcdserverpb.Maintenance/Status", maintenance_pb2.StatusResponse
        try:
            await self.unary(path, maintenance_pb2.StatusRequest(), answer, _CAUSE_PATIENCE, ())
        except EtcdError as error:
            return str(error).removeprefix(f"{self.where}: ")
        return "it did a moment ago"

    def _advice(self, cause: str) -> str:
        """What may be wrong where the two sides mean different things by the security of a connection."""
        said, names = cause.lower(), self._credentials.names
        if self._shown is None:
            return "; perhaps it speaks TLS: etcds:// then" if "socket closed" in said else ""
        if "handshake read failed" in said:
            return "; perhaps it speaks no TLS: etcd:// then, and no certificates"
        if "tsi_data_corrupted" in said:
            return f"; perhaps it wants a certificate of ours that it knows: {names.certificate}, {names.key}"
        if "certificate_verify_failed" in said:
            return f"; perhaps its certificate is of an authority of its own: {names.authorities}"
        return ""

    def _open(self) -> grpc.aio.Channel:
        options = _ARGUMENTS if _is_address(self._endpoint.host) else (*_ARGUMENTS, *_OF_A_NAME)
        if self._shown is None:
            return grpc.aio.insecure_channel(self._endpoint.target, options=options)
        return grpc.aio.secure_channel(self._endpoint.target, self._shown, options=options)

    async def _show_new_credentials(self) -> None:
        """Begin anew with other credentials, if there are any. Nothing is under way on a channel that can't connect."""
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
        call = self._calls.get(path)
        if call is None:
            call = self._calls[path] = self._channel.unary_unary(
                path, request_serializer=_serialize, response_deserializer=answer.FromString
            )
        try:
            return await self.outcome(call(request, timeout=timeout, metadata=metadata))
        except grpc.aio.UsageError:
            raise ClientClosed from None

    def stream(self, path: str, answer: type[Message], metadata: Metadata) -> Any:
        """Begin a stream both ways of the method at this path; await what it does in `outcome`, and cancel it.

        Raises:
            ClientClosed: There can be none.
        """
        call = self._calls.get(path)
        if call is None:
            call = self._calls[path] = self._channel.stream_stream(
                path, request_serializer=_serialize, response_deserializer=answer.FromString
            )
        try:
            return call(metadata=metadata)
        except grpc.aio.UsageError:
            raise ClientClosed from None

    async def outcome(self, doing: Awaitable[_T]) -> _T:
        """What comes of something that a call does.

        Raises:
            EtcdError: In our words, what went wrong.
        """
        try:
            return await doing
        except grpc.aio.AioRpcError as error:
            raise of_call(error, self.where) from None
        except asyncio.InvalidStateError:
            # The call was over before it was asked.
            raise EtcdUnavailable(f"{self.where}: the call has ended") from None
        except asyncio.CancelledError:
            # gRPC also cancels whoever waits for a call that somebody else ends, with the client.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EtcdUnavailable(f"{self.where}: the call was cancelled") from None

    async def close(self) -> None:
        """End every call on it."""
        if self._change is not None:
            self._change.cancel()
        await self._channel.close()


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
