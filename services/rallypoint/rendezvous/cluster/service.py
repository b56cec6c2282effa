"""A replica put together: etcd, journals, shards, and what a server serves of them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.endpoint import EtcdAddress
from rallypoint.etcd.session import Session
from rallypoint.rendezvous.api.service import registrations
from rallypoint.rendezvous.base.cooperative import CooperativeRunner, Work
from rallypoint.rendezvous.base.errors import NotOwner
from rallypoint.rendezvous.base.limits import RendezvousLimits, SharedTotals, StoreLimits, on_etcd
from rallypoint.rendezvous.cluster.lookup import RemoteReader, ReplicatedLocator, list_replicas
from rallypoint.rendezvous.cluster.replica import Replica, Replicas, Tell, ignore_ready
from rallypoint.rendezvous.journal.etcd.journal import CommitPool, EtcdJournal, JournalLocation
from rallypoint.rendezvous.journal.journal import Recovered
from rallypoint.rendezvous.shard.reader import ReadOnlyRuns, RunReader
from rallypoint.rendezvous.shard.shard import LEAST_TERM_AFTER_TAKEOVER, Shard, open_shard
from rallypoint.rendezvous.state.core import SampledUse, StateLimits
from rallypoint.rendezvous.state.service import DEFAULT_TTL
from rallypoint.rpc.loop import boot_time
from rallypoint.rpc.pace import Pace
from rallypoint.serving.server import Registration

_INSTANCE_BYTES = 8
# A state lives on by its use, which its owner counts. Replicas have no way to each other, so of the reads that another
# one could answer, one in this part of a state's time to live is sent to the owner. More often keeps unused states for
# less beyond their time; it costs clients that many detours.
_USE_SAMPLED = 1 / 16


class ReplicatedServices:
    """What a server serves of a replica, and the replica behind it.

    Attributes:
        registrations: For the server.
        home: Where runs are.
        replica: Once begun, it serves its share of the shards.
    """

    def __init__(self, registered: list[Registration], home: ReplicatedLocator, replica: Replica) -> None:
        """See `replicated_services`."""
        self.registrations = registered
        self.locator = home
        self.replica = replica
        self._serving: asyncio.Task[None] | None = None

    def begin(self, name: str, address: str, on_failure: Callable[[BaseException], None]) -> None:
        """Begin to serve, once it is known where.

        Args:
            name: Of this replica.
            address: How clients reach it.
            on_failure: Called if it can't, and trying again would not help, with a SettingError.
        """
        self._serving = asyncio.create_task(self.replica.serve(name, address, time.time()))
        self._serving.add_done_callback(partial(_report, on_failure))

    async def drain(self, *, finished: bool = False) -> None:
        """Hand all shards over, and be counted no more. Bounded; to be called before the server drains.

        `finished`: see `Replica.drain`.
        """
        await self.replica.drain(finished=finished)

    async def end(self) -> None:
        """Give up what is left."""
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
    limits: RendezvousLimits | None = None,
    store_limits: StoreLimits | None = None,
    state_limits: StateLimits | None = None,
    state_ttl: float = DEFAULT_TTL,
    on_ready: Tell = ignore_ready,
    connect: Callable[..., EtcdClient] = EtcdClient,
) -> AsyncIterator[ReplicatedServices]:
    """One replica of the rendezvous service, for as long as the context lasts.

    Args:
        address: Of the etcd, and of the prefix that the replicas share.
        wanted: What is asked of all replicas.
        clock: Monotonic seconds that count on while the machine is suspended: then, too, streams break.
        wall_clock: Unix seconds.
        draw: So many random bytes.
        pace: How time passes between attempts.
        limits: What this replica, and each run, may use.
        store_limits: What the store of each run may use.
        state_limits: What fenced states may use.
        state_ttl: How long a fenced state is kept that nobody reads, sets or watches, seconds; here, up to a
            sixteenth longer.
        on_ready: Told when it has come to answer for runs, and when it has ceased to.
        connect: Makes the client of the etcd, of `address` and `pace`.

    Raises:
        TLSFileError: A TLS file of the etcd's URL is missing or unusable.
    """
    totals = SharedTotals()
    slices = CooperativeRunner(clock)
    pace = pace or Pace()
    async with connect(address, pace=pace) as client:
        pool = CommitPool(client, clock)

        async def claim(session: Session, shard: int, on_failure: Callable[[BaseException], None]) -> Shard:
            place = JournalLocation(replica.keys.owner(shard), replica.keys.space(shard))
            return await open_shard(
                EtcdJournal(
                    client, session, place, replica.me, pool=pool, pace=pace, draw=draw, slices=slices
                ),
                clock=clock,
                wall_clock=wall_clock,
                draw=draw,
                limits=limits,
                store_limits=on_etcd(store_limits or StoreLimits()),
                state_limits=state_limits,
                # The last use may have come so long after the last that was counted.
                state_ttl=state_ttl * (1 + _USE_SAMPLED),
                totals=totals,
                guard=session.check,
                least_lease=LEAST_TERM_AFTER_TAKEOVER,
                slices=slices,
                high_water=wanted.keys_end,
                on_failure=on_failure,
            )

        sampled = SampledUse(state_ttl * _USE_SAMPLED)

        def use_state(shard: int, run_id: str) -> None:
            owner = replica.owner_address(shard)
            if owner is not None and sampled.pass_on(run_id, clock()):
                raise NotOwner(run_id, owner)

        def read(shard: int, recovered: Recovered) -> Work[RunReader]:
            return ReadOnlyRuns.restore(
                recovered,
                not_owner=partial(_not_here, replica, shard),
                clock=clock,
                wall_clock=wall_clock,
                limits=limits,
                use_state=partial(use_state, shard),
            )

        instance = draw(_INSTANCE_BYTES).hex()
        replica = Replica(client, claim, instance, wanted=wanted, clock=clock, pace=pace, on_ready=on_ready)
        elsewhere = RemoteReader(
            client, replica.keys, read, refuse=replica.refuse_if_not_owner, clock=clock, slices=slices
        )
        home = ReplicatedLocator(replica, elsewhere, lambda: pool.full)
        services = ReplicatedServices(
            registrations(home, limits, partial(list_replicas, replica)), home, replica
        )
        try:
            yield services
        finally:
            await services.end()


def _not_here(replica: Replica, shard: int, run_id: str) -> NotOwner:
    """The refusal of what can't be had of a shard by reading it."""
    return NotOwner(run_id, replica.owner_address(shard))
