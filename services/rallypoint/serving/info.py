"""ServerService: the version, capabilities and limits of a server, for its clients and for its log line `ready`."""

from __future__ import annotations

import os
import secrets
import socket
from enum import StrEnum
from typing import Any, TypeVar

from google.protobuf.message import Message

from rallypoint.rpc.channel import MAX_MESSAGE_BYTES
from rallypoint.rpc.durations import to_duration
from rallypoint.rpc.endpoint import ServerOptions
from rallypoint.server.v1 import server_service_pb2 as pb
from rallypoint.server.v1 import server_service_pb2_grpc as rpc
from rallypoint.serving.flow import FIRST_MESSAGE_TIMEOUT, WRITE_TIMEOUT, Context

VERSION = "0.1.0"
"""Version of the package, which pyproject.toml takes from here. To read it from the installed package's metadata would
delay each start of an agent by 20 ms."""

PROTOCOL_VERSION = 1
"""Version of the contract; server_service.proto has the rule by which it grows."""

INSTANCE = secrets.token_hex(8)
"""Random name of this process."""

SERVICE_NAME = "rallypoint.server.v1.ServerService"

SHORTEST_PING_INTERVAL = 5.0
"""Shortest time between pings of a client on a connection without data, seconds."""


class Capability(StrEnum):
    """The capabilities that a server may have; server_service.proto describes them."""

    HEALTH = "health"
    LAUNCH_JOBS = "launch-jobs"
    POLICY = "policy"
    REFLECTION = "reflection"
    REPLICAS = "replicas"
    TOKENS = "tokens"


_Limits = TypeVar("_Limits", bound=Message)


def limits_of(kind: type[_Limits], options: object, **others: Any) -> _Limits:
    """Return a message of limits, each field with the value that an options object has under its name.

    Args:
        kind: The message. Its fields are numbers, and Durations.
        options: The options object; times in seconds.
        others: Values of fields that it does not have.
    """
    for field in kind.DESCRIPTOR.fields:
        value = others.pop(field.name) if field.name in others else getattr(options, field.name)
        others[field.name] = value if field.message_type is None else to_duration(value)
    return kind(**others)


def describe_server(options: ServerOptions, instance: str) -> pb.GetServerInfoResponse:
    """Return the response of GetServerInfo, without the parts that its services and its start add."""
    given = {
        Capability.HEALTH: options.health,
        Capability.POLICY: options.access.policy is not None,
        Capability.REFLECTION: options.reflection,
        Capability.TOKENS: options.access.token_keys is not None,
    }
    calls = limits_of(
        pb.CallLimits,
        options,
        message_bytes=MAX_MESSAGE_BYTES,
        watches_per_client=options.max_watches_per_client,
        first_message_timeout=FIRST_MESSAGE_TIMEOUT,
        write_timeout=WRITE_TIMEOUT,
        ping_interval=SHORTEST_PING_INTERVAL,
    )
    return pb.GetServerInfoResponse(
        version=VERSION,
        protocol_version=PROTOCOL_VERSION,
        capabilities=[each for each, has in given.items() if has],
        limits=pb.ServerLimits(calls=calls),
        instance=instance,
        host_name=socket.gethostname(),
        pid=os.getpid(),
    )


class ServerServicer(rpc.ServerServiceServicer):
    """The calls of ServerService; see server_service.proto."""

    def __init__(self, info: pb.GetServerInfoResponse) -> None:
        """Serve a description, which must be complete when the server starts."""
        self._info = info

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        return self._info
