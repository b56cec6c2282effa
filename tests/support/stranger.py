"""Call every method of an address as another user of this host, and print the outcome of each call as JSON.

    python -m support.stranger '{"endpoint": "unix:/run/x.sock", "secret": ""}'

Run it as root. `secret`: the run secret to use; empty: plaintext.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import grpc

from rallypoint.agent.v1 import supervisor_service_pb2
from rallypoint.rendezvous.v1 import rendezvous_service_pb2, state_service_pb2, store_service_pb2
from rallypoint.rpc import run_secret as run_secret  # noqa: PLC0414 (loaded now: another user can't read its modules)
from rallypoint.rpc.endpoint import RunSecret, parse_endpoint
from rallypoint.rpc.tls import ClientCredentials
from rallypoint.timer.v1 import timer_service_pb2

NOBODY = 65534
"""The uid of a user with no rights."""

# Seconds for one call: a refusal comes at once.
_TIMEOUT = 10.0

_PROTOS = (
    supervisor_service_pb2,
    rendezvous_service_pb2,
    state_service_pb2,
    store_service_pb2,
    timer_service_pb2,
)


def methods() -> Iterator[str]:
    """Return the path of every method of every service of Rallypoint, and of reflection and health."""
    for proto in _PROTOS:
        for service in proto.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield f"/{service.full_name}/{method.name}"
    yield "/grpc.health.v1.Health/Check"
    yield "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


def _channel(endpoint: str, secret: str) -> grpc.Channel:
    if not secret:
        return grpc.insecure_channel(endpoint)
    credentials, name = ClientCredentials(RunSecret(secret)).of(parse_endpoint(endpoint))
    assert credentials is not None
    return grpc.secure_channel(endpoint, credentials, [("grpc.ssl_target_name_override", name)])


def _outcome(channel: grpc.Channel, method: str) -> str:
    # On the wire, a call with one message and one response is the same for all four kinds.
    call = channel.stream_stream(method, request_serializer=bytes, response_deserializer=bytes)
    try:
        next(iter(call(iter([b""]), timeout=_TIMEOUT)), None)
    except grpc.RpcError as error:
        failure: Any = error
        return str(failure.code().name)
    return "OK"


def main() -> None:
    """Give up all rights for good, then call the methods."""
    order = json.loads(sys.argv[1])
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    with _channel(order["endpoint"], order["secret"]) as channel:
        print(json.dumps({method: _outcome(channel, method) for method in methods()}))  # noqa: T201


if __name__ == "__main__":
    main()
