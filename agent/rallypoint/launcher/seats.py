"""Which agents of a job serve its rendezvous: as many as there are seats, each a key of etcd on its holder's lease."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.session import Session
from rallypoint.etcd.values import CreateRevision, Put, Txn, prefix_end
from rallypoint.rpc.selector import Pace

SEATS = 3
"""Agents that serve a run at a time: one owns it, the others are ready to. With three, two can be lost at one moment
and the run is taken over; more cost etcd a lease each, and make no job safer than an etcd of three members."""

SEAT_TTL = 10.0
"""Seconds after which the seat of a host that vanished is free; that of torch's keep-alives."""

# Seconds over which those who wait for a seat spread their attempts at it: with a thousand of them, all but the first
# few see that it is taken without asking for it.
_SPREAD = 1.0


@asynccontextmanager
async def seat(client: EtcdClient, holder: str, pace: Pace | None = None) -> AsyncIterator[Session]:
    """Wait for a seat, and have it for as long as the context lasts, or until the session is lost.

    Args:
        client: Of the etcd; its address names the prefix of the run.
        holder: Who takes it, for people.
        pace: How time passes.

    Raises:
        EtcdError: etcd did not answer, or refused. Nothing is held.
    """
    pace = pace or Pace()
    prefix = f"{client.address.prefix}/seats/".encode()
    while True:
        free = await _free_seats(client, prefix, pace)
        session = await Session.open(client, SEAT_TTL, pace=pace)
        try:
            if await _sit(client, free, Put(b"", holder.encode(), session.lease)):
                yield session
                return
        finally:
            await session.close()


async def _free_seats(client: EtcdClient, prefix: bytes, pace: Pace) -> Sequence[bytes]:
    """Seats that nobody has, as soon as there are any."""
    end = prefix_end(prefix)
    while True:
        found = await client.get(prefix, end, keys_only=True)
        taken = {pair.key for pair in found.pairs}
        if free := [key for number in range(SEATS) if (key := prefix + str(number).encode()) not in taken]:
            return free
        async with aclosing(client.watch(prefix, end, found.revision + 1)) as watching:
            async for changes in watching:
                if any(change.deleted for change in changes):
                    break
        await pace.sleep(pace.draw() * _SPREAD)


async def _sit(client: EtcdClient, free: Sequence[bytes], holding: Put) -> bool:
    """Whether one of these was free still."""
    for key in free:
        put = Put(key, holding.value, holding.lease)
        if (await client.transact(Txn([CreateRevision(key, 0)], [put]))).succeeded:
            return True
    return False
