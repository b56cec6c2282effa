"""What a worker says of its own time: `expires`. Imports nothing heavy; safe in threads, tasks and forks."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from rallypoint.timer import wire
from rallypoint.timer.uplink import Uplink

P = ParamSpec("P")
R = TypeVar("R")

SOCKET_VARIABLE = "RALLYPOINT_TIMER_SOCKET"
"""The agent sets it for its workers: the path of its timer socket."""

# Ten years, as the service has it.
_MAX_AFTER = 315_360_000.0
# A program has no more places than this that set timers; one that makes up file names must not fill memory.
_MAX_PLACES = 4096
_PATIENCE = 0.05


class _Unguarded:
    """Takes the place of an uplink where there is no agent, by the user's choice."""

    def acquire(self, after: float, scope: bytes) -> int:
        return 0

    def release(self, token: int) -> None:
        return

    def after_fork(self) -> None:
        return

    def close(self) -> None:
        return


class _Process:
    """Where this process tells its timers; chosen once, by `configure` or by the first `expires`."""

    def __init__(self) -> None:
        self.uplink: Uplink | _Unguarded | None = None
        self._choosing = threading.Lock()

    def choose(self, uplink: Uplink | _Unguarded) -> None:
        with self._choosing:
            former, self.uplink = self.uplink, uplink
        if former is not None:
            former.close()

    def choose_by_environment(self) -> Uplink | _Unguarded:
        with self._choosing:
            if self.uplink is None:
                self.uplink = _find(None, required=True, patience=_PATIENCE)
            return self.uplink

    def after_fork(self) -> None:
        self._choosing = threading.Lock()
        if self.uplink is not None:
            self.uplink.after_fork()


_process = _Process()
_places: dict[tuple[str, int], bytes] = {}


def configure(
    socket: str | os.PathLike[str] | None = None, *, required: bool = True, patience: float = _PATIENCE
) -> None:
    """Says where `expires` finds its agent. Under a Rallypoint agent there is no need to call it.

    Timers that run already are dropped. Child processes that are forked later inherit the choice.

    Args:
        socket: path of the agent's timer socket; None: what RALLYPOINT_TIMER_SOCKET says.
        required: what `expires` does when neither names a socket: True, the default, has it raise RuntimeError,
            so that nobody believes to be guarded who is not; False lets it do nothing, for programs that also
            run by themselves.
        patience: most seconds, more than 0 and at most 60, that `expires` waits for an agent that doesn't read.
            Default 0.05. After that the timer is dropped and the worker goes on.

    Raises:
        RuntimeError: no socket is named, and one is required.
        ValueError: `patience` is out of range.
    """
    if not 0 < patience <= 60:
        raise ValueError(f"patience is {patience!r}; expected seconds, more than 0 and at most 60")
    _process.choose(_find(socket, required, patience))


def _find(socket: str | os.PathLike[str] | None, required: bool, patience: float) -> Uplink | _Unguarded:
    path = os.fspath(socket) if socket is not None else os.environ.get(SOCKET_VARIABLE, "")
    if path:
        return Uplink(path, patience)
    if required:
        raise RuntimeError(
            f"no agent guards this process: {SOCKET_VARIABLE} is not set. Start it with `rallypoint run`, or "
            "call rallypoint.timer.configure(required=False) once to let expires() do nothing here"
        )
    return _Unguarded()


class expires:
    """Has the worker reaped if a block of code takes longer than it may.

    As a context manager, for a block; as a decorator, for each call of a function, `async def` or not::

        with expires(after=60):
            loss = step(batch)

        @expires(after=600, scope="checkpoint")
        def save() -> None: ...

    Each entry of a block is a timer of its own: blocks nest, also with equal scopes, and run in any number of
    threads and tasks at once. One `expires` object guards one block at a time. The countdown is the watchdog's;
    it goes on while this process hangs, whatever it hangs in. Entering and leaving cost some microseconds,
    never raise for the watchdog's sake, and wait at most as long as `configure` allows.

    Args:
        after: seconds, more than 0 and at most ten years.
        scope: what the code is doing, for people who read why a worker was reaped. Default: file#line of the
            caller. Of more than 256 bytes of UTF-8, the last 256 are kept.

    Raises:
        ValueError, TypeError: `after` or `scope` is none of that; a generator function was decorated.
        RuntimeError: on entering, if there is no agent (see `configure`), or if this object guards a block
            already.
    """

    __slots__ = ("_after", "_guard", "_scope", "_token")

    def __init__(self, after: float, scope: str | None = None) -> None:
        try:
            if not 0 < after <= _MAX_AFTER:
                raise ValueError(f"after is {after!r}; expected seconds, more than 0 and at most ten years")
        except TypeError:
            raise TypeError(f"after is {after!r}; expected a number of seconds") from None
        self._after = after
        if scope:
            self._scope = _encode(scope)
        else:
            frame = sys._getframe(1)
            place = (frame.f_code.co_filename, frame.f_lineno)
            self._scope = _places.get(place) or _remember(place)
        # Where the block's timer was started, and under which token; None outside of a block.
        self._guard: Uplink | _Unguarded | None = None
        self._token = 0

    def __enter__(self) -> None:
        if self._guard is not None:
            raise RuntimeError(
                f"this expires() guards a block already (scope {self._scope.decode(errors='replace')}): "
                "make one for each block"
            )
        uplink = _process.uplink or _process.choose_by_environment()
        self._token = uplink.acquire(self._after, self._scope)
        self._guard = uplink

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.release(self._token)

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

    def _another(self) -> expires:
        another = expires.__new__(expires)
        another._after, another._scope, another._guard = self._after, self._scope, None
        return another


def _encode(scope: str) -> bytes:
    if not isinstance(scope, str):
        raise TypeError(f"scope is {scope!r}; expected a string")
    encoded = scope.encode("utf-8", "replace")
    if len(encoded) > wire.MAX_SCOPE_BYTES:
        encoded = encoded[-wire.MAX_SCOPE_BYTES :].decode("utf-8", "ignore").encode()
    return encoded


def _remember(place: tuple[str, int]) -> bytes:
    if len(_places) >= _MAX_PLACES:
        _places.clear()
    scope = _places[place] = _encode(f"{place[0]}#{place[1]}")
    return scope


os.register_at_fork(after_in_child=_process.after_fork)
