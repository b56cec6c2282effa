"""What a worker says of its own time: `expires` and `progress`. Imports nothing heavy; safe in threads and forks."""

from __future__ import annotations

import functools
import operator
import os
import sys
import time
from collections.abc import Callable
from time import monotonic_ns
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar, cast

from rallypoint.timer.worker.process import PATIENCE, ProcessTimers, TimerClient, process
from rallypoint.timer.worker.process import process as this_process
from rallypoint.timer.worker.scopes import CallSite, by_code, by_scope, call_site_in, call_site_of, encode
from rallypoint.timer.worker.table import SLOT_WORD, SLOT_WORDS, TableWriter

# ---- What `expires` gives out: it guards a block, or each call of a function.


P = ParamSpec("P")
R = TypeVar("R")

_NANOSECONDS = 1_000_000_000


class Guard:
    """Has the worker reaped if a block of code takes longer than it may: see `rallypoint.timer.expires`.

    Entering and leaving are written for a worker whose caches are full of other things: TableWriter.acquire and
    release written out, no call into Python, and everything they touch within reach of few objects.
    """

    __slots__ = ("_at", "_call_site", "_client", "_slot", "_table")

    # Outside of a block, the table is None. The client is set in a block that another client guards.
    _client: TimerClient
    _call_site: CallSite
    # The slot, and the word where it begins.
    _slot: int
    _at: int
    _table: TableWriter | None

    def __enter__(
        self, process: ProcessTimers = this_process, monotonic_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        table = process.table
        if table is None or self._table is not None:
            table = self._prepare(process)
            if table is None:
                return
        slot = -1
        try:
            slot = self._slot = table.take()
            place = self._call_site
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
        guard._call_site = self._call_site
        guard._table = None
        return guard

    def _kind(self, table: TableWriter) -> int:
        """What a timer that learns is in a table."""
        return table.kind_of(self._call_site.scope, self._call_site.signal, True)

    def _abandon(self, table: TableWriter, slot: int) -> None:
        if slot >= 0:
            table.words[SLOT_WORD + slot * SLOT_WORDS] = 0
            self._table = None
            table.give(slot)

    def _prepare(self, process: ProcessTimers) -> TableWriter | None:
        """Finds the table of a process that has none yet; None: the block is entered, with another client."""
        if self._table is not None or self._in_client() is not None:
            raise RuntimeError(
                f"this expires() guards a block already (scope {self._call_site.scope.decode(errors='replace')}): "
                "make one for each block"
            )
        table = process.find()
        if table is None and process.client is not None:
            self._enter_client(process.client)
        return table

    def _in_client(self) -> TimerClient | None:
        return getattr(self, "_client", None)

    def _enter_client(self, client: TimerClient) -> None:
        place = self._call_site
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
            client.release(self._call_site.scope.decode(errors="replace"))


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
        self, process: ProcessTimers = this_process, monotonic_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        if self._in_client() is not None:
            self._prepare(process)
        self._enter_client(self._given)

    def _another(self) -> Guard:
        return client_guard(self._call_site, self._given)


def learning_guard(place: CallSite, client: TimerClient | None = None) -> Guard:
    """A guard for the timers of a place, of which it is to be learned how long they may take.

    Raises:
        ValueError: the timers are a client's.
    """
    if client is not None:
        raise ValueError(_not_for_clients(place))
    guard = LearningGuard()
    guard._call_site = place
    guard._table = None
    return guard


def client_guard(place: CallSite, client: TimerClient) -> Guard:
    """A guard for the timers of a place, which are the client's.

    Raises:
        ValueError: the place asks for what only Rallypoint's own agent does.
    """
    if place.signal:
        raise ValueError(_not_for_clients(place))
    guard = ClientGuard()
    guard._call_site = place
    guard._given = client
    guard._table = None
    return guard


def _not_for_clients(place: CallSite) -> str:
    return f"after={place.given!r}, signal={place.asked!r}: a client of your own takes seconds, and no signal"


_MAX_STEP = 2**64 - 1
# Beside each other, and not among the builtins: each further table that is looked into costs.
_getframe = sys._getframe
_address = id


def configure(
    socket: str | os.PathLike[str] | None = None,
    *,
    required: bool = True,
    patience: float = PATIENCE,
    client: TimerClient | None = None,
) -> None:
    """Says where `expires` finds its agent. Under a Rallypoint agent there is no need to call it.

    Timers that run already are dropped. Child processes that are forked later inherit the choice.

    Args:
        socket: path of the agent's timer socket; None: what RALLYPOINT_TIMER_SOCKET says.
        required: what `expires` and `progress` do when neither names a socket: True, the default, has them raise
            RuntimeError, so that nobody believes to be guarded who is not; False lets them do nothing, for
            programs that also run by themselves.
        patience: most seconds, more than 0 and at most 60, that `expires` waits for an agent that doesn't read.
            Default 0.05. After that the worker goes on, and tries again later.
        client: takes the place of an agent for all of `expires`. What it raises, `expires` raises. It learns no
            durations and takes no signals, and `progress` does nothing.

    Raises:
        RuntimeError: no socket is named, and one is required.
        ValueError: `patience` is out of range, or both a socket and a client are given.
    """
    if not 0 < patience <= 60:
        raise ValueError(f"patience is {patience!r}; expected seconds, more than 0 and at most 60")
    if client is not None and socket is not None:
        raise ValueError("socket and client are given: the client takes the place of the socket's agent")
    process.choose(socket, client, required, patience)


def expires(
    after: float | Literal["auto"],
    scope: str | None = None,
    client: TimerClient | None = None,
    *,
    signal: int | None = None,
) -> Guard:
    """Has the worker reaped if a block of code takes longer than it may.

    As a context manager, for a block; as a decorator, for each call of a function, `async def` or not::

        with expires(after=60):
            loss = step(batch)

        @expires(after="auto", scope="checkpoint")
        def save() -> None: ...

    Each entry of a block is a timer of its own: blocks nest, also with equal scopes, and run in any number of
    threads and tasks at once. What this returns guards one block at a time. The countdown is the watchdog's; it
    goes on while this process hangs, whatever it hangs in. Entering and leaving cost some microseconds, never
    raise for the watchdog's sake, and wait at most as long as `configure` allows. Of more than 1,024 timers at
    once in a process, those beyond are not guarded; the agent's log says so.

    Args:
        after: seconds, more than 0 and at most ten years; or "auto": several times the longest that this scope
            ever took a worker of this run. Nobody is reaped before that was seen often enough.
        scope: what the code is doing, for people who read why a worker was reaped, and for what "auto" learns.
            Default: file#line of the caller. Of more than 256 bytes of UTF-8, the last 256 are kept.
        client: takes the place of this process's agent; it has one timer per scope. What it raises is raised
            here. It takes neither "auto" nor a signal.
        signal: what the worker is sent before SIGKILL, so that it can say something: 1 to 64. 0: it is not
            killed, the expiry is only reported. Default: SIGKILL at once.

    Raises:
        ValueError, TypeError: an argument is none of that; a generator function was decorated.
        RuntimeError: on entering, if there is no agent (see `configure`), or if this guards a block already.
    """
    if not scope:
        frame = _getframe(1)
        place = by_code.get(_address(frame.f_code) + frame.f_lasti)
        if place is None or place.given is not after or place.asked is not signal:
            place = call_site_in(frame, after, signal)
            if not place.after:
                return learning_guard(place, client)
    else:
        place = by_scope.get(scope) if scope.__class__ is str else None
        if place is None or place.given is not after or place.asked is not signal:
            place = call_site_of(scope, after, signal)
            if not place.after:
                return learning_guard(place, client)
    if client is not None:
        return client_guard(place, client)
    guard = Guard()
    guard._call_site = place
    guard._table = None
    return guard


def progress(step: int) -> None:
    """Tells which step this worker has come to. Call it once per step, from one of the worker's processes.

    The watchdog reports a run in which no worker comes to another step for a while, and which worker stopped
    first. Nobody is reaped for that. Costs a microsecond or two, and never raises for the watchdog's sake.

    Args:
        step: as the program counts, 0 to 2**64 - 1. Going back, say to a checkpoint, is an advance as well.

    Raises:
        ValueError, TypeError: `step` is no such number.
        RuntimeError: there is no agent (see `configure`).
    """
    if step.__class__ is not int:
        try:
            step = operator.index(step)
        except TypeError:
            raise TypeError(f"step is {step!r}; expected a whole number") from None
    if not 0 <= step <= _MAX_STEP:
        raise ValueError(f"step is {step!r}; expected 0 to 2**64 - 1")
    table = process.table or process.find()
    if table is not None:
        table.progress(step, monotonic_ns())
        if monotonic_ns() > table.words[1]:
            table.ring()


# ---- Timers of this process by scope, as torch's timer clients have them: one per scope, started and ended at will.


class Client:
    """A TimerClient that tells Rallypoint's agent, over a connection of its own.

    Any thread may use it, but not two at once for the same scope.
    """

    def __init__(self, socket: str | os.PathLike[str] | None = None, *, patience: float = PATIENCE) -> None:
        """Makes a client that connects at its first timer.

        Args:
            socket: path of the agent's timer socket; None: what RALLYPOINT_TIMER_SOCKET says.
            patience: most seconds to wait for an agent that doesn't read.

        Raises:
            RuntimeError: no socket is named.
        """
        uplink = process.open_connection(socket, True, patience)
        assert uplink is not None
        self._connection = uplink
        self._held: dict[str, tuple[TableWriter, int]] = {}

    def acquire(self, scope: str, after: float) -> None:
        """Starts the scope's timer, of `after` seconds; replaces the deadline of one that runs already.

        Raises:
            ValueError, TypeError: `after` is no duration (see `expires`), or `scope` no string.
        """
        text = encode(scope)
        place = CallSite(after, None, text)
        if not place.after:
            raise TypeError(f"after is {after!r}; expected a number of seconds: a client does not learn them")
        table = self._connection.table()
        slot = table.acquire(table.tick(), time.monotonic_ns(), place.after, text, place.kind)
        former, self._held[scope] = self._held.get(scope), (table, slot)
        _end(former)
        if place.hasty or time.monotonic_ns() > table.listening[0]:
            table.ring()

    def release(self, scope: str) -> None:
        """Ends the scope's timer. One that does not run is no error."""
        held = self._held.pop(scope, None)
        _end(held)
        if held is not None and not held[0].listening[0]:
            held[0].ring()

    def close(self) -> None:
        """Ends all timers and the connection."""
        self._connection.close()


def _end(held: tuple[TableWriter, int] | None) -> None:
    # -1: there was no slot left for it.
    if held is not None and held[1] >= 0:
        held[0].release(held[1])
