"""A shard: some runs with their store and fenced states, over one journal. A process owns it, or does not."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable

from rallypoint.rendezvous.base.cooperative import CooperativeRunner, Work
from rallypoint.rendezvous.base.entries import StoreChange
from rallypoint.rendezvous.base.errors import NotOwner, Refusal
from rallypoint.rendezvous.base.limits import Limits, SharedTotals
from rallypoint.rendezvous.core.apply import LEAST_TERM_AFTER_RESTART
from rallypoint.rendezvous.journal.commit_loop import checked_by
from rallypoint.rendezvous.journal.journal import Journal, OwnershipLost, Recovered
from rallypoint.rendezvous.runs.engine import RendezvousEngine
from rallypoint.rendezvous.runs.recovery import TrackedJournal
from rallypoint.rendezvous.state.core import SPACE
from rallypoint.rendezvous.state.service import FencedStateService
from rallypoint.rendezvous.store.service import StoreService
from rallypoint.rpc.clock import LagSettings
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.loop import boot_time

_log = get_logger(__name__)

# Cancelled tasks end in a few iterations of the event loop; others are left behind after this many seconds.
_CANCELLING = 5.0

LEAST_TERM_AFTER_TAKEOVER = 20.0
"""The least seconds of a lease after another replica has taken its run over, even if its term is shorter. A node whose
owner was paused, or cut off, detects that only by gRPC's keep-alive, 10 + 5 s, and then looks for the new owner."""


class Shard:
    """Some runs with all that belongs to them. `open_shard` makes one and starts it.

    It ends in one of two ways. In good order: `retire`, then `end_streams` once the new owner of its runs is known.
    Or because ownership was lost: `halt` or `drop`. It cannot be used again.
    """

    def __init__(
        self,
        journal: TrackedJournal,
        engine: RendezvousEngine,
        store: StoreService,
        states: FencedStateService,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Assemble the parts that `open_shard` has restored, and start them."""
        self.engine = engine
        self.store = store
        self.states = states
        self._journal = journal
        self._on_failure = on_failure
        self._failed = False
        self._retiring: asyncio.Task[None] | None = None
        self._halted = False
        self._serving = [asyncio.create_task(self._serve(each)) for each in (engine.serve, states.serve)]
        store.begin()

    @property
    def runs(self) -> RendezvousEngine:
        """The runs, for reading."""
        return self.engine

    async def settled(self) -> None:
        """Return when all commits under way have succeeded and are visible to reads, or have failed.

        Call it before each read if other processes can read the journal (see `TrackedJournal`).
        """
        await self._journal.settled()

    async def _serve(self, serve: Callable[[], Awaitable[None]]) -> None:
        try:
            await serve()
        except Exception as error:
            self.fail(error)  # in the same step of the event loop: nothing else is sent in between

    def fail(self, error: BaseException) -> None:
        """Handle a broken journal; `on_failure` is called once."""
        if isinstance(error, OwnershipLost):
            # Another process may be the owner, with newer facts: send nothing more, not even this error.
            self.halt(NotOwner)
        if not self._failed:
            self._failed = True
            self._on_failure(error)

    async def retire(self, refusal: Refusal) -> None:
        """Hand the runs over in good order: finish the commits and requests under way, and close the journal.

        Waiting and new requests are refused. No lease ends any more, and streams stay open, so that they can be ended
        with the address of the new owner: see `end_streams`. Takes as long as a commit and closing the journal.
        A second call waits for the first; `halt` ends both.

        Raises:
            JournalError: The journal could not be closed in good order.
        """
        if self._halted:
            return
        if self._retiring is None:
            self.engine.retire(refusal)
            self.store.retire(refusal)
            self.states.retire(refusal)
            self._retiring = asyncio.create_task(self._retire())
        # Not cancelled with its caller: a half-closed journal is useless.
        await asyncio.wait([self._retiring])
        if not self._retiring.cancelled():
            self._retiring.result()

    async def _retire(self) -> None:
        await asyncio.wait([*self._serving, *self.store.committing()])
        self._release()
        await self._journal.close()

    def end_streams(self, refusal: Refusal) -> None:
        """End all streams with a refusal each, after their waiting update."""
        self.engine.end_streams(refusal)
        self.states.end_streams(refusal)

    def halt(self, refusal: Refusal) -> None:
        """End everything at once, for another process owns the runs: nothing is sent or written any more.

        Streams are ended with a refusal each, and their waiting updates are dropped. Requests that were not begun are
        refused; those under way fail with an unknown outcome (`errors.of_unknown_outcome`). The journal is left as it
        is: to close it would be to write. Never raises. A second call changes nothing.
        """
        if self._halted:
            return
        self._halted = True
        self.engine.halt(refusal)
        self.store.halt(refusal)
        self.states.halt(refusal)
        for task in self._ending():
            task.cancel()
        self._release()

    async def drop(self, refusal: Refusal) -> None:
        """Halt, and return when no task of the shard runs any more. Never raises."""
        ending = self._ending()
        self.halt(refusal)
        if ending:
            _, left = await asyncio.wait(ending, timeout=_CANCELLING)
            if left:
                _log.error("a shard did not end in time, its tasks are left behind", tasks=len(left))

    def _ending(self) -> list[asyncio.Task[None]]:
        retiring = [] if self._retiring is None else [self._retiring]
        return [*self._serving, *self.store.committing(), *retiring]

    def _release(self) -> None:
        """Stop counting in the limits of the process."""
        self.engine.release()
        self.states.release()
        self.store.release()


async def open_shard(
    journal: Journal,
    *,
    clock: Callable[[], float] = boot_time,
    wall_clock: Callable[[], float] = time.time,
    draw: Callable[[int], bytes] = secrets.token_bytes,
    limits: Limits | None = None,
    totals: SharedTotals | None = None,
    guard: Callable[[], None] | None = None,
    least_lease: float = LEAST_TERM_AFTER_RESTART,
    lag: LagSettings | None = None,
    slices: CooperativeRunner | None = None,
    high_water: bool = False,
    on_failure: Callable[[BaseException], None] = lambda error: None,
) -> Shard:
    """Open a journal, recover its content, and start to work on it.

    If that fails, or is cancelled, the journal is closed again, and nothing is left counted in `totals`.

    Args:
        journal: Not opened yet. The shard closes it when it is retired.
        clock: Monotonic seconds that count on while the machine is suspended: then, too, streams break.
        wall_clock: Unix seconds.
        draw: Returns this many random bytes.
        limits: Limits of the service and of each run.
        totals: The counters that all shards of the process share, so that the limits apply to all of them together;
            None: there is no other shard.
        guard: Called before anything is sent that no append has just covered. If it raises any error, nothing is sent,
            and the request is refused with NotOwner. None: no other process can ever own the runs.
        least_lease: Least remaining time of recovered leases, seconds.
        lag: How pauses of this process are noticed and forgiven.
        slices: Runner that restores one shard at a time; None: no other shard is restored.
        high_water: True if the journal's entries can expire; see `HighWater`.
        on_failure: Called once, if the journal breaks: nothing can be changed any more. If it broke because
            ownership was lost, the shard has halted by itself.

    Raises:
        JournalError: The journal can't be opened, or not be read by this version.
        Exception: The error of `guard` after everything was restored.
    """
    limits = limits or Limits()
    journal = tracked = TrackedJournal(journal)
    recovered = await journal.open()
    shards: list[Shard] = []

    def fail(error: BaseException) -> None:
        for shard in shards:
            shard.fail(error)

    check_owned = checked_by(guard)
    engine = RendezvousEngine(
        journal,
        clock=clock,
        wall_clock=wall_clock,
        draw=draw,
        limits=limits.rendezvous,
        totals=totals,
        check_owned=check_owned,
        lag=lag,
        high_water=high_water,
    )
    states = FencedStateService(
        journal,
        engine,
        clock=clock,
        draw=draw,
        check_owned=check_owned,
        limits=limits.state,
        totals=totals,
        ttl=limits.state_ttl,
    )
    store = StoreService(
        journal, engine, limits=limits.store, totals=totals, on_journal_failure=fail, check_owned=check_owned
    )
    engine.data = (store, states)
    try:
        await (slices or CooperativeRunner()).carry_out(
            _restoring(recovered, least_lease, engine, states, store)
        )
        if guard is not None:
            # Restoring, and waiting for the runner, may have taken seconds: another process may own the runs by now.
            guard()
    except BaseException:
        engine.release()
        states.release()
        store.release()
        await journal.close()
        raise
    shards.append(Shard(tracked, engine, store, states, on_failure))
    return shards[0]


def _restoring(
    recovered: Recovered,
    least_lease: float,
    engine: RendezvousEngine,
    states: FencedStateService,
    store: StoreService,
) -> Work[None]:
    """Restore the content of a journal into services that are not in use yet."""
    of_states: list[StoreChange] = []
    of_stores: list[StoreChange] = []
    for entry in recovered.store_entries:
        (of_states if entry.round == SPACE else of_stores).append(entry)
        yield
    yield from states.restoring(of_states)
    yield from store.restoring(of_stores)
    # Last: it reduces the events of other shards, and leases begin to run down.
    yield from engine.recovering(recovered, least_lease)
