"""Group commit over the journals of a process: writes that wait while etcd is busy are merged into one transaction."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.errors import REMEDIES, EtcdRefused, EtcdUnavailable, Reason
from rallypoint.etcd.values import Compare, CreateRevision, KeyValue, Put, Txn, TxnResult
from rallypoint.rendezvous.journal.etcd.commit import MOST_BYTES
from rallypoint.rpc.logs import get_logger

_log = get_logger(__name__)

# Comparisons, or operations of either branch, in one transaction: etcd's default limit.
MOST_OPERATIONS = 128
# Steps of the event loop from a request's arrival to its commit. The pool waits so many steps before it builds a
# transaction, so that requests that have already arrived are in it. An idle loop takes microseconds for them; the pool
# never waits for requests still to come.
_STEPS = 4
# While etcd is full, the warning is logged again after this many seconds.
_LOG_AGAIN_AFTER = 30.0
# Seconds after which a write is worth trying again, if no waiting write does so.
_FORGOTTEN = 5.0


@dataclass(slots=True, eq=False)
class _PendingTransaction:
    """A transaction whose sender waits.

    Attributes:
        txn: The transaction.
        result: Set for the sender; done already if the sender no longer waits.
        operations: Number of operations, for etcd's limit.
        size: Bytes, approximately.
    """

    txn: Txn
    result: asyncio.Future[TxnResult]
    operations: int = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        txn = self.txn
        self.operations = max(len(txn.when), len(txn.then), len(txn.otherwise))
        self.size = sum(
            len(each.key) + (len(each.value) if isinstance(each, Put) else 0) for each in txn.then
        )


class CommitPool:
    """Sends transactions of many senders, merged: all of one are done, or none.

    Requests and results are as if each were sent alone, so every sender can follow its own rules and ignore the others:

    - A merged transaction compares all that any of its members compares. So it does nothing for a member unless that
      member's own comparison holds at that very moment: it is one more copy of each of its members. A sender is still
      correct if its copies, however many and however merged, take effect at most once: the cause that voids its other
      copies (it wrote again, or the owner changed) also voids every merged copy with it. The other members of
      that copy lose only an attempt.
    - If it does nothing, the reads of the same moment show for each member if its own comparison held. Members whose
      comparison failed get that result, as if sent alone. The others were blocked by those, and are sent again.
    - If its outcome is unknown, every member gets that error. Each decides for itself if it sends again.
    - If it is refused, nothing was done, and each member is sent alone, so that only the members at fault get the
      error. Exception: etcd is full. No member is at fault then, and the state is temporary, as in an outage.
    """

    def __init__(self, client: EtcdClient, clock: Callable[[], float] = time.monotonic) -> None:
        """`client`: client of the etcd; `clock`: monotonic seconds."""
        self._client = client
        self._clock = clock
        self._refusal = ""
        self._refused_at = self._log_full_at = float("-inf")
        self._waiting: deque[_PendingTransaction] = deque()
        self._sending: asyncio.Task[None] | None = None
        # Members of one transaction; fewer once etcd has shown a limit below its default.
        self._most_members = MOST_OPERATIONS

    async def transact(self, txn: Txn) -> TxnResult:
        """Send a transaction once: immediately, or merged with all others that wait while one is in flight.

        Args:
            txn: `otherwise` reads every key that `when` compares, whole, and `then` reads none.

        Raises:
            EtcdUnavailable: The outcome is unknown, or etcd is full; see `EtcdClient.transact`.
            EtcdError: Nothing was done.
        """
        waiting = _PendingTransaction(txn, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all())
        return await waiting.result

    async def _send_all(self) -> None:
        # One at a time: two in parallel would be smaller, and cost this process and etcd more for each write.
        try:
            while self._waiting:
                for _ in range(_STEPS):
                    await asyncio.sleep(0)
                if members := self._take():
                    await self._send(members)
        finally:
            self._sending = None
            _cancel(self._waiting)  # none, unless the process ends
            self._waiting.clear()

    def _take(self) -> list[_PendingTransaction]:
        """Take the first transaction, and more while they fit. Skip those whose sender is gone."""
        members: list[_PendingTransaction] = []
        operations = size = 0
        while self._waiting:
            first = self._waiting[0]
            if not first.result.done():
                operations += first.operations
                size += first.size
                fits = operations <= MOST_OPERATIONS and size <= MOST_BYTES
                if members and not (fits and len(members) < self._most_members):
                    break
                members.append(first)
            self._waiting.popleft()
        return members

    async def _send(self, members: Sequence[_PendingTransaction]) -> None:
        try:
            result = await self._client.transact(merged([member.txn for member in members]))
            self._has_room()
            self._settle(members, result)
        except EtcdUnavailable as error:
            _fail(members, error)
        except Exception as error:
            if isinstance(error, EtcdRefused) and error.reason is Reason.NO_SPACE:
                self._is_full(error)
                _fail(members, EtcdUnavailable(str(error), unsent=True))
                return
            if len(members) == 1:
                _fail(members, error)
                return
            if isinstance(error, EtcdRefused) and error.reason in (
                Reason.TOO_LARGE,
                Reason.TOO_MANY_OPERATIONS,
            ):
                self._most_members = min(self._most_members, len(members) // 2)
            for member in members:
                if not member.result.done():
                    await self._send([member])
        except BaseException:
            _cancel(members)
            raise

    @property
    def full(self) -> str:
        """The reason why etcd accepts no writes, with the remedy; empty if it does, as the last writes showed."""
        return self._refusal if self._clock() < self._refused_at + _FORGOTTEN else ""

    def _is_full(self, error: EtcdRefused) -> None:
        remedy = REMEDIES[error.reason]
        self._refusal, self._refused_at = f"{error}; {remedy}", self._clock()
        if self._clock() >= self._log_full_at:
            self._log_full_at = self._clock() + _LOG_AGAIN_AFTER
            _log.warning("etcd is full: writes wait, running jobs go on", error=str(error), remedy=remedy)

    def _has_room(self) -> None:
        if self._refusal:
            self._refusal, self._log_full_at = "", float("-inf")
            _log.info("etcd takes writes again")

    def _settle(self, members: Sequence[_PendingTransaction], result: TxnResult) -> None:
        kept_out = []
        for member, own in zip(members, split([member.txn for member in members], result), strict=True):
            if own is None:
                kept_out.append(member)
            elif not member.result.done():
                member.result.set_result(own)
        # First in the queue, in their order: otherwise one could wait for ever behind failed comparisons of others.
        self._waiting.extendleft(reversed(kept_out))


def merged(txns: Sequence[Txn]) -> Txn:
    """Merge transactions into one, which does all of them or none."""
    if len(txns) == 1:
        return txns[0]
    return Txn(
        [compare for txn in txns for compare in txn.when],
        [operation for txn in txns for operation in txn.then],
        [operation for txn in txns for operation in txn.otherwise],
    )


def split(txns: Sequence[Txn], result: TxnResult) -> list[TxnResult | None]:
    """Return each transaction's result, given the merged one's; None: blocked, though its own comparisons held."""
    if result.succeeded or len(txns) == 1:
        return [result] * len(txns)
    return list(_each(txns, result))


def _each(txns: Sequence[Txn], result: TxnResult) -> Iterator[TxnResult | None]:
    found = iter(result.found)
    for txn in txns:
        own = list(itertools.islice(found, len(txn.otherwise)))
        pairs = {pair.key: pair for pairs in own for pair in pairs}
        held = all(_holds(compare, pairs.get(compare.key)) for compare in txn.when)
        yield None if held else TxnResult(succeeded=False, revision=result.revision, found=own)


def _holds(compare: Compare, pair: KeyValue | None) -> bool:
    if pair is None:
        return compare.equals == 0
    revision = pair.create_revision if isinstance(compare, CreateRevision) else pair.mod_revision
    return revision == compare.equals


def _fail(members: Sequence[_PendingTransaction], error: Exception) -> None:
    for member in members:
        if not member.result.done():
            member.result.set_exception(error)


def _cancel(members: Iterable[_PendingTransaction]) -> None:
    for member in members:
        member.result.cancel()
