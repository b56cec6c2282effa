"""Keeping a lease alive, one keep-alive at a time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc.aio

from rallypoint.etcd.connection import Connection
from rallypoint.etcd.errors import EtcdUnavailable
from rallypoint.etcd.members import Members
from rallypoint.etcd.v1 import lease_pb2

_PATH = "/etcdserverpb.Lease/LeaseKeepAlive"


@dataclass(frozen=True, slots=True)
class Renewal:
    """The answer to a keep-alive.

    Attributes:
        ttl: Seconds that the lease lives from when the keep-alive was sent; 0: it has ended.
        term: Of the leader, as the member that answered knew it before it asked that leader.
    """

    ttl: float
    term: int


async def renew(members: Members, connection: Connection, lease: int, timeout: float) -> Renewal:
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


async def _renew(members: Members, connection: Connection, lease: int, token: str) -> Renewal:
    call = connection.stream(_PATH, lease_pb2.LeaseKeepAliveResponse, members.metadata(token))
    try:
        await connection.outcome(call.write(lease_pb2.LeaseKeepAliveRequest(id=lease)))
        response = await connection.outcome(call.read())
        if response is grpc.aio.EOF:
            raise EtcdUnavailable(f"{connection.where}: a keep-alive was not answered")
        return Renewal(float(response.ttl), response.header.raft_term)
    finally:
        call.cancel()
