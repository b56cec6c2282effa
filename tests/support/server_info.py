"""A server's description of itself."""

from __future__ import annotations

import grpc.aio

from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ClientSecurity
from rallypoint.server.v1 import server_service_pb2 as pb
from rallypoint.server.v1 import server_service_pb2_grpc as rpc
from support.waiting import PATIENCE


async def server_info(channel: grpc.aio.Channel) -> pb.GetServerInfoResponse:
    """Return the description of the server at the other end."""
    stub: rpc.ServerServiceAsyncStub = rpc.ServerServiceStub(channel)
    return await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=PATIENCE)


async def info_at(endpoint: str, security: ClientSecurity = None) -> pb.GetServerInfoResponse:
    """Return the description of the server at an address."""
    async with open_channel(endpoint, security) as channel:
        return await server_info(channel)
