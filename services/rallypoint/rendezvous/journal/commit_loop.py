"""The commit loop under runs, stores and fenced states: nothing is published before it is durable.

One batch at a time is decided, appended to the journal, and published when it is durable. So a batch is decided on
durable state, a failed append leaves no effect, and changes are published in the order of the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, TypeAlias, TypeVar

from rallypoint.rendezvous.base.cooperative import LatestValue
from rallypoint.rendezvous.base.entries import StoreJournal
from rallypoint.rendezvous.base.errors import NotOwner, Refusal, draining_error, of_unknown_outcome
from rallypoint.rendezvous.base.limits import Quota, SharedTotal
from rallypoint.rendezvous.base.refusals import JournalFailed
from rallypoint.rendezvous.core.commands import Refused
from rallypoint.rendezvous.journal.journal import OwnershipLost

_T = TypeVar("_T")

# ---- The check that this process still owns its runs, for replies that no commit has just covered.

CheckOwned: TypeAlias = Callable[[str], None]
"""Called with a run_id before anything is sent about that run that no append has just covered; raises NotOwner."""


def always_owned(run_id: str) -> None:
    """Do nothing: no other process can ever own a run."""


def checked_by(guard: Callable[[], None] | None) -> CheckOwned:
    """Return a check that calls `guard`, and raises NotOwner if it raises: another process may own the runs."""
    if guard is None:
        return always_owned

    def check(run_id: str) -> None:
        try:
            guard()
        except Exception as error:
            raise NotOwner(run_id) from error

    return check


# ---- Requests.


@dataclass(slots=True, eq=False, kw_only=True)
class PendingRequest(Generic[_T]):
    """A request that waits for its commit.

    Attributes:
        run_id: Its run; "": all of them.
        queued_bytes: Bytes that it holds while it waits.
        reply: Its result or error; done before if the caller has gone.
    """

    run_id: str
    queued_bytes: int = 0
    reply: asyncio.Future[_T] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def settle(self, outcome: _T | Refused) -> None:
        """Set the result or the refusal, unless the caller has gone."""
        if isinstance(outcome, Refused):
            self.fail(outcome)
        elif not self.reply.done():
            self.reply.set_result(outcome)

    def fail(self, error: Exception) -> None:
        """Set an error, unless the caller has gone."""
        if not self.reply.done():
            self.reply.set_exception(error)

    def abandon(self, refusal: Refusal) -> None:
        """Reply although a commit is still under way, whose outcome this process will not learn."""
        self.fail(of_unknown_outcome(refusal(self.run_id)))


class FairQueue(Generic[_T]):
    """A queue for each run, so that a run with many requests does not delay the others."""

    def __init__(self, most_per_run: int) -> None:
        """`most_per_run`: the most items of one run that one `take` removes."""
        self._most = most_per_run
        self._waiting: dict[str, deque[_T]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[_T]:
        return chain.from_iterable(self._waiting.values())

    def put(self, run_id: str, item: _T) -> None:
        """Add to the end of a run's queue."""
        self._waiting.setdefault(run_id, deque()).append(item)

    def take(self) -> Iterator[_T]:
        """Remove the oldest items of each run, in the order of their arrival, each when it is read."""
        for run_id, queue in [*self._waiting.items()]:
            for _ in range(min(self._most, len(queue))):
                item = queue.popleft()
                if not queue:
                    del self._waiting[run_id]
                yield item


# ---- The loop.

_P = TypeVar("_P", bound=PendingRequest[Any])
_MakeError: TypeAlias = Callable[[str], Exception]


class CommitLoop(ABC, Generic[_P]):
    """Commits requests in batches. A subclass decides and publishes them."""

    def __init__(
        self,
        journal: StoreJournal,
        check_owned: CheckOwned,
        most_per_run: int = sys.maxsize,
        queued_bytes: SharedTotal | None = None,
    ) -> None:
        """Set up.

        Args:
            journal: Makes the entries of `commit` durable.
            check_owned: Raises NotOwner once the runs may be another process's.
            most_per_run: The most requests of one run in a batch.
            queued_bytes: The total of waiting bytes, shared with other loops; None: it is not shared.
        """
        self._journal = journal
        self._check_owned = check_owned
        self._waiting: FairQueue[_P] = FairQueue(most_per_run)
        self._waiting_bytes = Quota(queued_bytes)
        self._under_way: list[_P] = []
        self._wake = asyncio.Event()
        # True once no further commit begins.
        self._retired = False
        # Once set: they make the error of new requests, and the error that ends streams.
        self._closed: _MakeError | None = None
        self._streams_over: _MakeError | None = None

    @abstractmethod
    def commit(self, requests: Iterator[_P]) -> Iterator[Sequence[Any]]:
        """Decide requests, yield the entries to append, and when resumed publish the outcome and reply. No `await`.

        It is not resumed if the append fails, or if there are no entries and another process may own the runs: the loop
        replies then. Requests that are not taken from the iterator wait for the next commit.
        """

    def has_work(self) -> bool:
        """Return True if the next commit is due now, even without a request."""
        return False

    def timeout(self) -> float | None:
        """Return the seconds until a commit is due without a request; None: never."""
        return None

    def streams(self) -> Iterator[tuple[str, LatestValue[Any]]]:
        """Return all streams, each with the name of its run."""
        return iter(())

    def error_after(self, error: Exception) -> _MakeError:
        """Return a function from a run's name to the error of its requests, after an error that ended the loop."""
        return lambda _: JournalFailed(str(error))

    async def serve(self, *, until_idle: bool = False) -> None:
        """Commit until retired or cancelled, or `until_idle`: until nothing is left to commit.

        Raises:
            Exception: The journal's error, or that of `commit`: all must be restored from the journal.
        """
        try:
            due = until_idle
            while (due or not until_idle) and not self._retired:
                if due:
                    await self._commit_batch()
                    # The callers with a reply go on first. And a journal that never waits must not let a long queue
                    # block everything else.
                    await asyncio.sleep(0)
                    due = bool(self._waiting) or self.has_work()
                    continue
                due, timeout = True, self.timeout()
                if not self._wake.is_set():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(timeout):
                            await self._wake.wait()
        except BaseException as error:
            # After any error: no caller may wait for a reply that can't come any more.
            self._break(error)
            raise

    async def _commit_batch(self) -> None:
        self._wake.clear()
        for entries in self.commit(self._take()):
            if entries:
                await self._journal.append(entries)
                continue
            try:
                self._check_owned("")  # no append has checked it
            except NotOwner:
                self._refuse(self._under_way, NotOwner)
                break
        self._under_way = []

    def _take(self) -> Iterator[_P]:
        for request in self._waiting.take():
            self._waiting_bytes.add(-request.queued_bytes)
            self._under_way.append(request)
            yield request

    def _break(self, error: BaseException) -> None:
        if isinstance(error, OwnershipLost):
            self.halt(NotOwner)
            return
        refusal = self.error_after(error) if isinstance(error, Exception) else draining_error
        closed, self._closed, self._retired = self._closed, self._closed or refusal, True
        # Also if it was retired: the batch under way may be durable, so "nothing was done" would be wrong.
        self._refuse(self._under_way, refusal)
        self._refuse_waiting(refusal)
        if closed is None:
            self.end_streams(refusal)

    def _refuse(self, requests: Iterable[_P], refusal: _MakeError) -> None:
        for request in requests:
            request.fail(refusal(request.run_id))

    def _refuse_waiting(self, refusal: _MakeError) -> None:
        while self._waiting:
            self._refuse(self._waiting.take(), refusal)
        self._waiting_bytes.release()

    def _put(self, request: _P) -> None:
        """Accept a request. Raise an error if new requests are refused."""
        if self._closed is not None:
            raise self._closed(request.run_id)
        self._waiting.put(request.run_id, request)
        self._waiting_bytes.add(request.queued_bytes)
        self._wake.set()

    def _check_open(self, run_id: str) -> None:
        """Raise an error if new requests are refused, or NotOwner."""
        if self._closed is not None:
            raise self._closed(run_id)
        self._check_owned(run_id)

    def retire(self, refusal: Refusal) -> None:
        """Refuse waiting and later requests; the batch under way is the last. Streams stay open."""
        self._closed, self._retired = refusal, True
        self._refuse_waiting(refusal)
        self._wake.set()

    def halt(self, refusal: Refusal) -> None:
        """End everything at once; publish nothing more. The caller cancels the task of the loop."""
        self.retire(refusal)
        self._streams_over = refusal
        for request in self._under_way:
            request.abandon(refusal)
        for run_id, stream in self.streams():
            stream.cut(refusal(run_id))

    def end_streams(self, refusal: _MakeError) -> None:
        """End every stream, each with an error, after its waiting value."""
        self._streams_over = refusal
        for run_id, stream in self.streams():
            stream.end(refusal(run_id))
