"""What a worker says of its own time: `expires` and `progress`. Imports nothing heavy; safe in threads and forks."""

from __future__ import annotations

import operator
import os
import sys
from time import monotonic_ns
from typing import Literal

from rallypoint.timer.guard import Guard, client_guard, learning_guard
from rallypoint.timer.place import by_code, by_scope, place_in, place_of
from rallypoint.timer.process import PATIENCE, TimerClient, process

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
            place = place_in(frame, after, signal)
            if not place.after:
                return learning_guard(place, client)
    else:
        place = by_scope.get(scope) if scope.__class__ is str else None
        if place is None or place.given is not after or place.asked is not signal:
            place = place_of(scope, after, signal)
            if not place.after:
                return learning_guard(place, client)
    if client is not None:
        return client_guard(place, client)
    guard = Guard()
    guard._place = place
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
