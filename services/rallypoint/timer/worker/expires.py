"""`expires` and `progress`, for the code of a worker. Imports nothing heavy; safe in threads and after forks."""

from __future__ import annotations

import functools
import operator
import os
import sys
import time
from collections.abc import Callable
from time import monotonic_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from rallypoint.timer.worker.process import PATIENCE, ProcessTimers, TimerClient, process
from rallypoint.timer.worker.process import process as this_process
from rallypoint.timer.worker.scopes import CallSite, by_code, by_scope, call_site_in, call_site_of, encode
from rallypoint.timer.worker.table import SLOT_WORD, SLOT_WORDS, TableWriter

# ---- The objects that `expires` returns: each guards a block, or each call of a function.


if TYPE_CHECKING:
    from typing import ParamSpec  # Python 3.10

    P = ParamSpec("P")
R = TypeVar("R")

_NANOSECONDS = 1_000_000_000


class Guard:
    """Guards a block of code with a timeout: see `rallypoint.timer.expires`.

    Entering and leaving are optimised for a worker whose caches are full of other data: TableWriter.acquire and
    release are inlined, nothing calls into Python, and all data is within reach of few objects.
    """

    __slots__ = ("_at", "_call_site", "_client", "_slot", "_table")

    # Outside a block the table is None. The client is set while another client guards the block.
    _client: TimerClient
    _call_site: CallSite
    # The slot, and the index of its first word.
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
            site = self._call_site
            if table.laid[slot] is not site:
                table.lay_out(slot, site, site.scope, site.after, site.kind or self._kind(table))
            token, since = table.tick(), monotonic_ns()
            # Read only now: any call before may run a signal handler, which may fork.
            words = table.words
            at = self._at = SLOT_WORD + slot * SLOT_WORDS
            words[at + 1] = since
            # For a learned timeout the duration is 0, and the kind differs from table to table.
            words[at + 4] = token ^ since ^ (site.terms or words[at + 3])
            words[at] = token
            self._table = table
            if monotonic_ns() > words[1] or site.hasty:
                table.ring()
        except IndexError:
            if slot >= 0:
                self._abandon(table, slot)
                raise
            # The process has reached its limit of timers: it goes on, and this block is not guarded.
            table.drop()
        except BaseException:
            # A signal handler raised: the block is not entered, so `__exit__` will not free the slot.
            self._abandon(table, slot)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        table = self._table
        if table is None:
            self._leave_client()
            return
        words = table.words
        # Before any call: now a signal handler that raises can keep the timer alive only if it runs between the call
        # of this function and its first line. A __del__ would end that timer, too, but it swallows exceptions, and a
        # worker that can't be interrupted is worse.
        words[self._at] = 0
        self._table = None
        table.give(self._slot)
        # The clock is not read: a release that is seen late kills no worker, since the agent polls the table before it
        # does.
        if not words[1]:
            table.ring()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function that guards each call of `function`."""
        # Only here: the import is slow, and workers that use blocks don't need it.
        import inspect  # noqa: PLC0415

        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{function.__qualname__} is a generator: its body runs in pieces, between values. "
                "Use `with expires(...)` inside it"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def guarded_coroutine(*args: P.args, **kwargs: P.kwargs) -> Any:
                with self._another():
                    return await function(*args, **kwargs)

            return cast("Callable[P, R]", guarded_coroutine)

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
        """Return the kind, in that table, of a timer with a learned timeout."""
        return table.kind_of(self._call_site.scope, self._call_site.signal, True)

    def _abandon(self, table: TableWriter, slot: int) -> None:
        if slot >= 0:
            table.words[SLOT_WORD + slot * SLOT_WORDS] = 0
            self._table = None
            table.give(slot)

    def _prepare(self, process: ProcessTimers) -> TableWriter | None:
        """Return the table of this process; None: a custom client guards the block, which is now entered."""
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
        site = self._call_site
        if not site.after or site.signal:
            raise RuntimeError(_not_for_clients(site))
        self._client = client
        try:
            client.acquire(site.scope.decode(errors="replace"), site.after / _NANOSECONDS)
        except BaseException:
            del self._client
            raise

    def _leave_client(self) -> None:
        client = self._in_client()
        if client is not None:
            del self._client
            client.release(self._call_site.scope.decode(errors="replace"))


class LearningGuard(Guard):
    """Guards a block with a learned timeout."""

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
    """Guards a block with the client passed to `expires`."""

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


def learning_guard(site: CallSite, client: TimerClient | None = None) -> Guard:
    """Return a guard for a call site with a learned timeout.

    Raises:
        ValueError: a client is given.
    """
    if client is not None:
        raise ValueError(_not_for_clients(site))
    guard = LearningGuard()
    guard._call_site = site
    guard._table = None
    return guard


def client_guard(site: CallSite, client: TimerClient) -> Guard:
    """Return a guard for a call site whose timers the client keeps.

    Raises:
        ValueError: the call site has a signal, which only Rallypoint's own agent sends.
    """
    if site.signal:
        raise ValueError(_not_for_clients(site))
    guard = ClientGuard()
    guard._call_site = site
    guard._given = client
    guard._table = None
    return guard


def _not_for_clients(site: CallSite) -> str:
    return f"after={site.given!r}, signal={site.asked!r}: a custom client takes seconds, and no signal"


_MAX_STEP = 2**64 - 1
# Module globals, next to each other and not in builtins: each further dictionary lookup costs.
_getframe = sys._getframe
_address = id


def configure(
    socket: str | os.PathLike[str] | None = None,
    *,
    required: bool = True,
    patience: float = PATIENCE,
    client: TimerClient | None = None,
) -> None:
    """Set the agent that `expires` and `progress` use. Workers started by a Rallypoint agent need not call it.

    Running timers are dropped. Processes forked later inherit the setting.

    Args:
        socket: path of the agent's timer socket; None: the value of RALLYPOINT_TIMER_SOCKET.
        required: the behaviour if neither names a socket. True, the default: RuntimeError, so that no program runs
            unguarded by mistake. False: `expires` and `progress` do nothing, for programs that also run alone.
        patience: most seconds, more than 0 and at most 60, that `expires` waits for an agent that does not read.
            Default 0.05. Then the worker goes on, and tries again later.
        client: used in place of an agent for all of `expires`, which raises its exceptions. It learns no durations and
            sends no signals; `progress` does nothing.

    Raises:
        RuntimeError: no socket is named, and one is required.
        ValueError: `patience` is out of range, or both a socket and a client are given.
    """
    if not 0 < patience <= 60:
        raise ValueError(f"patience is {patience!r}; expected seconds, more than 0 and at most 60")
    if client is not None and socket is not None:
        raise ValueError("socket and client are given: the client replaces the socket's agent")
    process.choose(socket, client, required, patience)


def expires(
    after: float | Literal["auto"],
    scope: str | None = None,
    client: TimerClient | None = None,
    *,
    signal: int | None = None,
) -> Guard:
    """Kill this worker if a block of code takes longer than its timeout.

    As a context manager, for a block; as a decorator, for each call of a function, `async def` or not::

        with expires(after=60):
        loss = step(batch)

        @expires(after="auto", scope="checkpoint")
        def save() -> None: ...

    Each entry of a block is a timer of its own: blocks nest, also with equal scopes, and run in any number of threads
    and tasks at once. The returned object guards one block at a time. The watchdog counts down, even while this
    process hangs, and however it hangs. Entering and leaving cost some microseconds, never raise because of the
    watchdog, and wait at most as long as `configure` allows. A process has at most 1,024 timers at once; further
    blocks are not guarded, and the agent logs that.

    Args:
        after: timeout in seconds, more than 0 and at most ten years; or "auto": several times the longest time that
            this scope ever took in any worker of this run. No worker is killed before enough completions were seen.
        scope: name of the code, shown in reports of killed workers; "auto" learns per scope. Default: file#line of the
            caller. Of more than 256 bytes of UTF-8, the last 256 are kept.
        client: used in place of this process's agent; it has one timer per scope. Its exceptions are raised here. It
            supports neither "auto" nor a signal.
        signal: a signal that the worker receives before SIGKILL, for example to log its state: 1 to 64. 0: it is not
            killed, the expiry is only reported. Default: SIGKILL at once.

    Raises:
        ValueError, TypeError: an argument is invalid, or a generator function was decorated.
        RuntimeError: on entering: there is no agent (see `configure`), or this object guards a block already.
    """
    if not scope:
        frame = _getframe(1)
        site = by_code.get(_address(frame.f_code) + frame.f_lasti)
        if site is None or site.given is not after or site.asked is not signal:
            site = call_site_in(frame, after, signal)
            if not site.after:
                return learning_guard(site, client)
    else:
        site = by_scope.get(scope) if scope.__class__ is str else None
        if site is None or site.given is not after or site.asked is not signal:
            site = call_site_of(scope, after, signal)
            if not site.after:
                return learning_guard(site, client)
    if client is not None:
        return client_guard(site, client)
    guard = Guard()
    guard._call_site = site
    guard._table = None
    return guard


def progress(step: int) -> None:
    """Report the step that this worker has reached. Call it once per step, from one of the worker's processes.

    The watchdog reports a run in which no worker has reached another step for a while, and the worker that stopped
    first; no worker is killed for it. Costs a microsecond or two, and never raises because of the watchdog.

    Args:
        step: the program's own count, 0 to 2**64 - 1. A lower step, as after loading a checkpoint, is progress as
            well.

    Raises:
        ValueError, TypeError: `step` is not such a number.
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


# ---- Timers of this process by scope, as in torch's timer clients: one per scope, started and ended at any time.


class Client:
    """A TimerClient that reports to Rallypoint's agent, over a connection of its own.

    Any thread may use it, but no two threads at once for the same scope.
    """

    def __init__(self, socket: str | os.PathLike[str] | None = None, *, patience: float = PATIENCE) -> None:
        """Create a client that connects at its first timer. `socket` and `patience` are as for `configure`.

        Raises:
            RuntimeError: no socket is named.
        """
        connection = process.open_connection(socket, True, patience)
        assert connection is not None
        self._connection = connection
        self._held: dict[str, tuple[TableWriter, int]] = {}

    def acquire(self, scope: str, after: float) -> None:
        """Start the scope's timer, of `after` seconds; replace the deadline of one that runs already.

        Raises:
            ValueError, TypeError: `after` is no duration (see `expires`), or `scope` no string.
        """
        text = encode(scope)
        site = CallSite(after, None, text)
        if not site.after:
            raise TypeError(f"after is {after!r}; expected a number of seconds: a client does not learn them")
        table = self._connection.table()
        slot = table.acquire(table.tick(), time.monotonic_ns(), site.after, text, site.kind)
        former, self._held[scope] = self._held.get(scope), (table, slot)
        _end(former)
        if site.hasty or time.monotonic_ns() > table.listening[0]:
            table.ring()

    def release(self, scope: str) -> None:
        """End the scope's timer. A scope without one is no error."""
        held = self._held.pop(scope, None)
        _end(held)
        if held is not None and not held[0].listening[0]:
            held[0].ring()

    def close(self) -> None:
        """End all timers and close the connection."""
        self._connection.close()


def _end(held: tuple[TableWriter, int] | None) -> None:
    # -1: all slots were in use.
    if held is not None and held[1] >= 0:
        held[0].release(held[1])
