"""What `expires` gives out: it guards a block, or each call of a function."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from rallypoint.timer.place import Place
from rallypoint.timer.process import Process, TimerClient
from rallypoint.timer.process import process as this_process
from rallypoint.timer.table import SLOT_WORD, SLOT_WORDS, TableWriter

P = ParamSpec("P")
R = TypeVar("R")

_NANOSECONDS = 1_000_000_000


class Guard:
    """Has the worker reaped if a block of code takes longer than it may: see `rallypoint.timer.expires`.

    Entering and leaving are written for a worker whose caches are full of other things: TableWriter.acquire and
    release written out, no call into Python, and everything they touch within reach of few objects.
    """

    __slots__ = ("_at", "_client", "_place", "_slot", "_table")

    # Outside of a block, the table is None. The client is set in a block that another client guards.
    _client: TimerClient
    _place: Place
    # The slot, and the word where it begins.
    _slot: int
    _at: int
    _table: TableWriter | None

    def __enter__(
        self, process: Process = this_process, monotonic_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        table = process.table
        if table is None or self._table is not None:
            table = self._prepare(process)
            if table is None:
                return
        slot = -1
        try:
            slot = self._slot = table.take()
            place = self._place
            if table.laid[slot] is not place:
                table.lay_out(slot, place, place.scope, place.after, place.kind or self._kind(table))
            token, since = table.tick(), monotonic_ns()
            # Only now: a signal handler, which may run whenever something is called, may have forked.
            words = table.words
            at = self._at = SLOT_WORD + slot * SLOT_WORDS
            words[at + 1] = since
            # Of what learns, the duration is 0 and the kind this table's.
            words[at + 4] = token ^ since ^ (place.terms or words[at + 3])
            words[at] = token
            self._table = table
            if monotonic_ns() > words[1] or place.hasty:
                table.ring()
        except IndexError:
            if slot >= 0:
                self._abandon(table, slot)
                raise
            # The process holds as many timers as it may: it goes on, with this block unguarded.
            table.drop()
        except BaseException:
            # A signal handler raised: the block is not entered, and nobody would release this.
            self._abandon(table, slot)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        table = self._table
        if table is None:
            self._leave_client()
            return
        words = table.words
        # Before anything is called: a signal handler that raises can keep the timer alive only if it runs between
        # the call of this function and its first line. A __del__ would end that one, too, but what is raised in
        # it is swallowed, and a worker that can't be interrupted is worse.
        words[self._at] = 0
        self._table = None
        table.give(self._slot)
        # No look at the clock: a release that is seen late accuses nobody, since the agent looks before it judges.
        if not words[1]:
            table.ring()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Guards each call of the function."""
        # Only here: it is slow to import, and workers that use blocks don't need it.
        import inspect  # noqa: PLC0415

        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{function.__qualname__} is a generator: its body runs piece by piece, as its caller asks. "
                "Use `with expires(...)` inside it"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def guarded_coroutine(*args: P.args, **kwargs: P.kwargs) -> Any:
                with self._another():
                    return await function(*args, **kwargs)

            return cast(Callable[P, R], guarded_coroutine)

        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._another():
                return function(*args, **kwargs)

        return guarded

    def _another(self) -> Guard:
        guard = self.__class__()
        guard._place = self._place
        guard._table = None
        return guard

    def _kind(self, table: TableWriter) -> int:
        """What a timer that learns is in a table."""
        return table.kind_of(self._place.scope, self._place.signal, True)

    def _abandon(self, table: TableWriter, slot: int) -> None:
        if slot >= 0:
            table.words[SLOT_WORD + slot * SLOT_WORDS] = 0
            self._table = None
            table.give(slot)

    def _prepare(self, process: Process) -> TableWriter | None:
        """Finds the table of a process that has none yet; None: the block is entered, with another client."""
        if self._table is not None or self._in_client() is not None:
            raise RuntimeError(
                f"this expires() guards a block already (scope {self._place.scope.decode(errors='replace')}): "
                "make one for each block"
            )
        table = process.find()
        if table is None and process.client is not None:
            self._enter_client(process.client)
        return table

    def _in_client(self) -> TimerClient | None:
        return getattr(self, "_client", None)

    def _enter_client(self, client: TimerClient) -> None:
        place = self._place
        if not place.after or place.signal:
            raise RuntimeError(_not_for_clients(place))
        self._client = client
        try:
            client.acquire(place.scope.decode(errors="replace"), place.after / _NANOSECONDS)
        except BaseException:
            del self._client
            raise

    def _leave_client(self) -> None:
        client = self._in_client()
        if client is not None:
            del self._client
            client.release(self._place.scope.decode(errors="replace"))


class LearningGuard(Guard):
    """Guards a block of which it is to be learned how long it takes."""

    __slots__ = ()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        table = self._table
        if table is None:
            self._leave_client()
            return
        words, at = table.words, self._at
        since = words[at + 1]
        words[at] = 0
        self._table = None
        table.give(self._slot)
        table.note(self._kind(table), monotonic_ns() - since)
        if not words[1]:
            table.ring()


class ClientGuard(Guard):
    """Guards a block with a client that it was given."""

    __slots__ = ("_given",)

    _given: TimerClient

    def __enter__(
        self, process: Process = this_process, monotonic_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        if self._in_client() is not None:
            self._prepare(process)
        self._enter_client(self._given)

    def _another(self) -> Guard:
        return client_guard(self._place, self._given)


def learning_guard(place: Place, client: TimerClient | None = None) -> Guard:
    """A guard for the timers of a place, of which it is to be learned how long they may take.

    Raises:
        ValueError: the timers are a client's.
    """
    if client is not None:
        raise ValueError(_not_for_clients(place))
    guard = LearningGuard()
    guard._place = place
    guard._table = None
    return guard


def client_guard(place: Place, client: TimerClient) -> Guard:
    """A guard for the timers of a place, which are the client's.

    Raises:
        ValueError: the place asks for what only Rallypoint's own agent does.
    """
    if place.signal:
        raise ValueError(_not_for_clients(place))
    guard = ClientGuard()
    guard._place = place
    guard._given = client
    guard._table = None
    return guard


def _not_for_clients(place: Place) -> str:
    return f"after={place.given!r}, signal={place.asked!r}: a client of your own takes seconds, and no signal"
