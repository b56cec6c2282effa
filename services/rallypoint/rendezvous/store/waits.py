"""The requests of one run that wait for keys: each ends by a write, or by a refusal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from rallypoint.rendezvous.base.entries import StoreChange
from rallypoint.rendezvous.base.limits import StoreLimits
from rallypoint.rendezvous.base.refusals import KeyWaitTimedOut, TooManyWaiters
from rallypoint.rendezvous.core.commands import Refused
from rallypoint.rendezvous.store.core import RunSpaces

# ---- Waiting requests of one space, indexed by key, so that no write searches through them.


T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Waiter(Generic[T]):
    """One request that waits for keys.

    Attributes:
        keys: All of the keys.
        missing: Those that are absent now.
        reply: The request to reply to; opaque to this class.
    """

    keys: frozenset[str]
    missing: set[str]
    reply: T


class SpaceWaiters(Generic[T]):
    """The waiters of one space, by key."""

    def __init__(self) -> None:
        self._by_key: dict[str, dict[Waiter[T], None]] = {}
        self._waiters: dict[Waiter[T], None] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter[T]]:
        return iter(tuple(self._waiters))

    def add(self, keys: Iterable[str], missing: Iterable[str], reply: T) -> Waiter[T]:
        """Begin to wait for `keys`, of which `missing`, at least one, are absent now."""
        waiter = Waiter(frozenset(keys), set(missing), reply)
        self._waiters[waiter] = None
        for key in waiter.keys:
            self._by_key.setdefault(key, {})[waiter] = None
        return waiter

    def discard(self, waiter: Waiter[T]) -> None:
        """Stop waiting; no error if it waits no more."""
        if waiter not in self._waiters:
            return
        del self._waiters[waiter]
        for key in waiter.keys:
            others = self._by_key[key]
            del others[waiter]
            if not others:
                del self._by_key[key]

    def key_set(self, key: str) -> list[Waiter[T]]:
        """Mark a key as present; return, in order of arrival, the waiters that are now complete. They wait no more."""
        complete = []
        for waiter in self._by_key.get(key, ()):
            waiter.missing.discard(key)
            if not waiter.missing:
                complete.append(waiter)
        for waiter in complete:
            self.discard(waiter)
        return complete

    def key_deleted(self, key: str) -> None:
        """Mark a key as absent: waiters for several keys wait for it again."""
        for waiter in self._by_key.get(key, ()):
            waiter.missing.add(key)


# Seconds until a retry after TOO_MANY_WAITERS: keys that many wait for arrive all at once, or time out.
_FULL_RETRY = 1.0


@dataclass(slots=True, eq=False)
class _WaitRequest:
    """A reply to send, and the keys whose values it holds; a result of None: the wait timed out."""

    reply: asyncio.Future[list[bytes] | Refused | None]
    keys: Sequence[str]

    def settle(self, outcome: list[bytes] | Refused | None) -> None:
        if not self.reply.done():  # it may have been cancelled at this very moment
            self.reply.set_result(outcome)


_SpaceWaiting: TypeAlias = SpaceWaiters[_WaitRequest]


class Waits:
    """The requests of one run that wait for keys."""

    def __init__(self, run_id: str, limits: StoreLimits) -> None:
        self._run_id = run_id
        self._limits = limits
        self._waiting: dict[int, _SpaceWaiting] = {}
        self._waiters = 0
        self._waited_keys = 0

    @property
    def waiters(self) -> int:
        """Number of waiting requests."""
        return self._waiters

    async def until_present(
        self, spaces: RunSpaces, round: int, keys: Sequence[str], timeout: float, wanted: Sequence[str] = ()
    ) -> list[bytes]:
        """Return the values of `wanted`, some of `keys`, at a moment when all keys are there.

        Args:
            spaces: The present spaces of the run.
            round: The round of the space.
            keys: Each of them once.
            timeout: Longest wait, seconds.
            wanted: Keys whose values are returned.

        Raises:
            KeyWaitTimedOut: Keys were still missing.
            TooManyWaiters: There is no room to wait.
            Refused: The refusal given to `end`.
        """
        missing = spaces.missing(round, keys)
        if not missing:
            return _values(spaces, round, wanted)
        if timeout <= 0:
            raise KeyWaitTimedOut(self._run_id, missing, timeout)
        if not self._has_room_for(len(keys)):
            raise TooManyWaiters(self._run_id, self._waiters, self._waited_keys, _FULL_RETRY)
        loop = asyncio.get_running_loop()
        request = _WaitRequest(loop.create_future(), wanted)
        waiting = self._waiting.setdefault(round, SpaceWaiters())
        waiter = waiting.add(keys, missing, request)
        self._waiters += 1
        self._waited_keys += len(keys)
        timer = loop.call_later(timeout, _time_out, waiting, waiter)
        try:
            outcome = await request.reply
        finally:
            timer.cancel()
            self._waiters -= 1
            self._waited_keys -= len(keys)
            waiting.discard(waiter)
            if not waiting and self._waiting.get(round) is waiting:
                del self._waiting[round]
        if outcome is None:
            raise KeyWaitTimedOut(self._run_id, [key for key in keys if key in waiter.missing], timeout)
        if isinstance(outcome, Refused):
            raise outcome
        return outcome

    def _has_room_for(self, keys: int) -> bool:
        if self._waiters == 0:
            return True  # for any number of keys: otherwise no request could ever wait for these
        return self._waiters < self._limits.waiters and self._waited_keys + keys <= self._limits.waited_keys

    def settle(self, spaces: RunSpaces, changes: Sequence[StoreChange]) -> None:
        """Reply to the waiting requests that the changes of one write complete, when all changes are in the spaces."""
        for change in changes:
            waiting = self._waiting.get(change.round)
            if waiting is None:
                return
            if change.value is None:
                waiting.key_deleted(change.key)
                continue
            for waiter in waiting.key_set(change.key):
                waiter.reply.settle(_values(spaces, change.round, waiter.reply.keys))

    def end(self, rounds: Sequence[int], refusal: Callable[[], Refused]) -> None:
        """Refuse the requests that wait in these rounds, each with a refusal of its own."""
        for round in rounds:
            waiting = self._waiting.pop(round, None) or SpaceWaiters()
            for waiter in waiting:
                waiting.discard(waiter)
                waiter.reply.settle(refusal())

    @property
    def rounds(self) -> list[int]:
        """The rounds with waiting requests."""
        return sorted(self._waiting)


def _time_out(waiting: _SpaceWaiting, waiter: Waiter[_WaitRequest]) -> None:
    # `missing` keeps the keys missing now, also if they arrive before the request resumes.
    waiting.discard(waiter)
    waiter.reply.settle(None)


def _values(spaces: RunSpaces, round: int, keys: Sequence[str]) -> list[bytes]:
    return [spaces.value(round, key) or b"" for key in keys]
