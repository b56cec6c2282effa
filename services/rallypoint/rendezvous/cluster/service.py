"""A complete replica: etcd, journals, shards, and the gRPC services of a server over them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.endpoint import EtcdAddress
from rallypoint.etcd.session import Session
from rallypoint.rendezvous.api.service import registrations
from rallypoint.rendezvous.base.cooperative import CooperativeRunner, Work
from rallypoint.rendezvous.base.errors import NotOwner
from rallypoint.rendezvous.base.limits import Limits, SharedTotals, on_etcd
from rallypoint.rendezvous.cluster.lookup import RemoteReader, ReplicatedLocator, list_replicas
from rallypoint.rendezvous.cluster.replica import OnReady, Replica, Replicas, ignore_ready
from rallypoint.rendezvous.journal.etcd.journal import EtcdJournal
from rallypoint.rendezvous.journal.etcd.keys import JournalLocation
from rallypoint.rendezvous.journal.etcd.pool import CommitPool
from rallypoint.rendezvous.journal.journal import Recovered
from rallypoint.rendezvous.shard.reader import ReadOnlyRuns
from rallypoint.rendezvous.shard.shard import LEAST_TERM_AFTER_TAKEOVER, Shard, open_shard
from rallypoint.rendezvous.state.core import SampledUse
from rallypoint.rpc.loop import boot_time
from rallypoint.rpc.pace import Pace
from rallypoint.serving.server import Registration

_INSTANCE_BYTES = 8
# The use of a state keeps it alive, and its owner counts the uses. Replicas have no connection to each other, so of the
# reads that another replica could answer, one per this part of a state's time to live is sent to the owner. A smaller
# part keeps unused states for less beyond their time, and redirects clients more often.
_USE_SAMPLED = 1 / 16


class ReplicatedServices:
    """The gRPC services of a replica, and the replica behind them.

    Attributes:
        replica: Once begun, it serves its share of the shards.
    """

    def __init__(self, registered: list[Registration], locator: ReplicatedLocator, replica: Replica) -> None:
        """See `replicated_services`."""
        self.registrations = registered
        self.locator = locator
        self.replica = replica
        self._serving: asyncio.Task[None] | None = None

    def begin(self, name: str, address: str, on_failure: Callable[[BaseException], None]) -> None:
        """Begin to serve, once the address is known.

        Args:
            name: Name of this replica.
            on_failure: Called with a SettingError if it can't serve and a retry would not help.
        """
        self._serving = asyncio.create_task(self.replica.serve(name, address, time.time()))
        self._serving.add_done_callback(partial(_report, on_failure))

    async def drain(self, *, finished: bool = False) -> None:
        """Hand all shards over and withdraw the registration. Bounded; call it before the server drains.

        `finished`: see `Replica.drain`.
        """
        await self.replica.drain(finished=finished)

    async def end(self) -> None:
        """Stop serving."""
        if self._serving is not None:
            self._serving.cancel()
            with suppress(asyncio.CancelledError, Exception):  # a failure was reported when it happened
                await self._serving


def _report(on_failure: Callable[[BaseException], None], serving: asyncio.Task[None]) -> None:
    if not serving.cancelled() and (error := serving.exception()) is not None:
        on_failure(error)


@asynccontextmanager
async def replicated_services(
    address: EtcdAddress,
    wanted: Replicas,
    *,
    clock: Callable[[], float] = boot_time,
    wall_clock: Callable[[], float] = time.time,
    draw: Callable[[int], bytes] = secrets.token_bytes,
    pace: Pace | None = None,
    limits: Limits | None = None,
    on_ready: OnReady = ignore_ready,
    connect: Callable[..., EtcdClient] = EtcdClient,
) -> AsyncIterator[ReplicatedServices]:
    """Run one replica of the rendezvous service while the context lasts.

    Args:
        address: Address of the etcd, and the prefix that the replicas share.
        wanted: Settings of all replicas.
        clock: Monotonic seconds that continue while the machine is suspended: streams break then too.
        wall_clock: Unix seconds.
        draw: Returns so many random bytes.
        pace: Delays between attempts.
        limits: Limits of this replica, and of each run. A fenced state is kept up to a sixteenth longer than it says.
        on_ready: Called with True when this replica begins to serve runs, with False when it ceases to.
        connect: Makes the etcd client from `address` and `pace`.

    Raises:
        TLSFileError: A TLS file of the etcd's URL is missing or unusable.
    """
    limits = limits or Limits()
    # The real last use may be this much later than the last counted one.
    state_ttl = limits.state_ttl * (1 + _USE_SAMPLED)
    on_shards = replace(limits, store=on_etcd(limits.store), state_ttl=state_ttl)
    totals = SharedTotals()
    runner = CooperativeRunner(clock)
    pace = pace or Pace()
    async with connect(address, pace=pace) as client:
        pool = CommitPool(client, clock)

        async def claim(session: Session, shard: int, on_failure: Callable[[BaseException], None]) -> Shard:
            location = JournalLocation(replica.keys.owner(shard), replica.keys.space(shard))
            return await open_shard(
                EtcdJournal(
                    client, session, location, replica.me, pool=pool, pace=pace, draw=draw, runner=runner
                ),
                clock=clock,
                wall_clock=wall_clock,
                draw=draw,
                limits=on_shards,
                totals=totals,
                guard=session.check,
                least_lease=LEAST_TERM_AFTER_TAKEOVER,
                slices=runner,
                high_water=wanted.keys_end,
                on_failure=on_failure,
            )

        sampled = SampledUse(limits.state_ttl * _USE_SAMPLED)

        def use_state(shard: int, run_id: str) -> None:
            owner = replica.owner_address(shard)
            if owner is not None and sampled.pass_on(run_id, clock()):
                raise NotOwner(run_id, owner)

        def read(shard: int, recovered: Recovered) -> Work[ReadOnlyRuns]:
            return ReadOnlyRuns.restore(
                recovered,
                not_owner=lambda run_id: NotOwner(run_id, replica.owner_address(shard)),
                clock=clock,
                wall_clock=wall_clock,
                limits=limits.rendezvous,
                use_state=partial(use_state, shard),
            )

        instance = draw(_INSTANCE_BYTES).hex()
        replica = Replica(client, claim, instance, wanted=wanted, clock=clock, pace=pace, on_ready=on_ready)
        remote = RemoteReader(
            client, replica.keys, read, refuse=replica.refuse_if_not_owner, clock=clock, runner=runner
        )
        locator = ReplicatedLocator(replica, remote, lambda: pool.full)
        registered = registrations(locator, limits, partial(list_replicas, replica), replicated=True)
        services = ReplicatedServices(registered, locator, replica)
        try:
            yield services
        finally:
            await services.end()
